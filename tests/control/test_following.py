"""A watch goes on whatever one entry, or one callback, does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.contracts.waiting import eventually

from kvrelay.control.base import WatchEvent
from kvrelay.control.following import follow
from kvrelay.control.memory import MemoryBroker
from kvrelay.errors import ConfigError, ProtocolError


@pytest.mark.parametrize("error", [ProtocolError("odd"), ConfigError("odd"), KeyError("odd"), RecursionError()])
async def test_an_entry_that_fails_ends_nothing(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    plane = MemoryBroker().plane()
    heard: list[str] = []
    synced: list[None] = []

    def on_change(event: WatchEvent) -> None:
        if event.key == "kvrelay/a/config/evil":
            raise error
        heard.append(event.key)

    on_synced: Callable[[], None] = lambda: synced.append(None)  # noqa: E731
    await plane.discovery.put("kvrelay/a/config/evil", b"")
    await plane.discovery.put("kvrelay/a/config/good", b"")
    task = asyncio.create_task(follow(plane.discovery, "kvrelay/a/config/", on_change, on_synced))
    await eventually(lambda: bool(synced))
    assert heard == ["kvrelay/a/config/good"]
    await plane.discovery.delete("kvrelay/a/config/evil")
    await plane.discovery.put("kvrelay/a/config/next", b"")
    await eventually(lambda: heard == ["kvrelay/a/config/good", "kvrelay/a/config/next"])
    assert "kvrelay/a/config/evil" in caplog.text
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await plane.close()
