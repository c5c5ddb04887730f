"""Why and when a worker ends: asked to drain, or by a fatal failure of one of its threads."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine

from kvrelay.core.tasks import end_tasks
from kvrelay.errors import EngineHungError, FatalError

DRAIN_INTERVAL_S = 0.02
HUNG_JOIN_S = 0.1
"""How long to wait for an engine thread that hangs."""
FAILED_JOIN_S = 4.0
"""The same after another failure: other ranks of a data-parallel group, which keep working, must not keep this rank
from ending."""


async def none_left(left: Callable[[], object], timeout_s: float = math.inf) -> None:
    """Return when ``left`` gives something false, or after ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while left() and time.monotonic() < deadline_s:
        await asyncio.sleep(DRAIN_INTERVAL_S)


class Shutdown:
    """Begins once. Made on the event loop; ``fail`` and ``transfer_failed`` may be called from any thread."""

    def __init__(self) -> None:
        self.failure: FatalError | None = None
        """The first fatal failure: work in flight cannot finish."""
        self._loop = asyncio.get_running_loop()
        self._begun = asyncio.Event()
        self._failed = asyncio.Event()

    def has_begun(self) -> bool:
        return self._begun.is_set()

    def begin(self) -> None:
        """The worker is to drain and leave."""
        self._begun.set()

    async def begun(self) -> None:
        """Return when the worker is to leave."""
        await self._begun.wait()

    def fail(self, error: FatalError) -> None:
        """On the failed thread: nothing can be finished, so leave."""

        def leave() -> None:
            self.failure = self.failure or error
            self._failed.set()
            self._begun.set()

        self._loop.call_soon_threadsafe(leave)

    @property
    def engine_join_s(self) -> float | None:
        """How long to wait for the engine's thread; None: until it has ended."""
        if self.failure is None:
            return None
        return HUNG_JOIN_S if isinstance(self.failure, EngineHungError) else FAILED_JOIN_S

    def transfer_failed(self, error: Exception) -> None:
        """The same for an unexpected error of the transfer thread."""
        failure = FatalError(f"the KV transfer failed: {error!r}")
        failure.__cause__ = error
        self.fail(failure)

    async def run_unless_failed(self, work: Coroutine[None, None, None]) -> None:
        """Return when ``work`` has ended, or has been cancelled by a failure. Raises what ``work`` raises."""
        done, failed = self._loop.create_task(work), self._loop.create_task(self._failed.wait())
        try:
            await asyncio.wait((done, failed), return_when=asyncio.FIRST_COMPLETED)
            if done.done():
                done.result()
        finally:
            await end_tasks((done, failed))
