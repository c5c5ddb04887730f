"""Background tasks of one owner: kept until they end, their failures logged, ended together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from typing import Any

_log = logging.getLogger(__name__)


class TaskSet:
    """The running tasks of one owner. Use it on the event loop that runs them.

    The event loop itself keeps only weak references, and reports a failed task only once the task is collected.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[None]]:
        return iter(tuple(self._tasks))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` in the background. A failure is logged and ends nothing else."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Cancel every task, without waiting."""
        for task in self:
            task.cancel()

    async def wait(self) -> None:
        """Return when no task runs, including tasks that are spawned meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel the running tasks and wait until they have ended."""
        tasks = tuple(self)
        self.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the background task %s failed", getattr(task.get_coro(), "__qualname__", task), exc_info=error)
