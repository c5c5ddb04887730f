"""The tool that measures gaps of the event loop keeps working; what it measures is no test's business."""

from __future__ import annotations

import asyncio

import pytest
from tests.contracts.waiting import eventually

from tools import loop_gaps


async def test_a_request_is_sent_and_measured() -> None:
    frontend = await loop_gaps.start_frontend()
    heartbeat = loop_gaps.Heartbeat()
    try:
        assert await asyncio.to_thread(loop_gaps.send, "nothing", frontend.port) == "200"
        path, body = loop_gaps.REQUESTS["text of 1 MB"]()
        assert path == loop_gaps.COMPLETIONS
        assert len(body) > 10**6
        await eventually(lambda: heartbeat.longest_s > 0)
    finally:
        heartbeat.stop()
        await frontend.close()


@pytest.mark.parametrize("is_late", [False, True])
async def test_all_streams_are_placed_again_and_end_whole(capsys: pytest.CaptureFixture[str], is_late: bool) -> None:
    await loop_gaps.measure_migration(20, 10, 3, is_late)
    assert "20 ended whole" in capsys.readouterr().out
