"""The tool that measures a mass migration: every stream goes on."""

from __future__ import annotations

import pytest

from tools import migration_gap


@pytest.mark.parametrize("is_late", [False, True])
async def test_all_streams_are_placed_again_and_end_whole(capsys: pytest.CaptureFixture[str], is_late: bool) -> None:
    await migration_gap.measure(20, 10, 3, is_late)
    assert "20 ended whole" in capsys.readouterr().out
