"""Waiting for things that happen by themselves, within bounds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tests.patience import PATIENCE_S

from kvrelay.control.base import Discovery, WatchEvent, WatchKind

NUM_ATTEMPTS = 5


async def eventually(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> float:
    """Return when the condition holds; gives the seconds that it took."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    while not condition():
        assert loop.time() - start_s < timeout_s, "did not happen in time"
        await asyncio.sleep(0.005)
    return loop.time() - start_s


async def holds(attempt: Callable[[], Awaitable[bool]]) -> None:
    """For what holds only while nothing stands still for long: a pause of the machine breaks an attempt, and a fault
    breaks every one."""
    for _ in range(NUM_ATTEMPTS):
        if await attempt():
            return
    pytest.fail("it did not hold in any of the attempts")


class Watching:
    """A watch that runs in a task and keeps what it saw."""

    def __init__(self, discovery: Discovery, prefix: str) -> None:
        self.events: list[WatchEvent] = []
        self.state: dict[str, bytes] = {}
        self.task = asyncio.create_task(self._run(discovery, prefix))

    async def _run(self, discovery: Discovery, prefix: str) -> None:
        async for event in discovery.watch(prefix):
            self.events.append(event)
            if event.kind is WatchKind.PUT:
                self.state[event.key] = event.value
            elif event.kind is WatchKind.DELETE:
                del self.state[event.key]

    @property
    def is_synced(self) -> bool:
        return any(event.kind is WatchKind.SYNCED for event in self.events)

    @property
    def num_deletes(self) -> int:
        return sum(event.kind is WatchKind.DELETE for event in self.events)


@contextlib.asynccontextmanager
async def watching(discovery: Discovery, prefix: str) -> AsyncIterator[Watching]:
    """A synced watch."""
    watch = Watching(discovery, prefix)
    try:
        await eventually(lambda: watch.is_synced)
        yield watch
    finally:
        watch.task.cancel()
        await asyncio.gather(watch.task, return_exceptions=True)
