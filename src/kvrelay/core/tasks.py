"""Background tasks of one owner: kept until they end, their failures logged, ended together. And a wait for events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Iterable, Iterator
from typing import Any

from kvrelay.errors import KvrelayError

_log = logging.getLogger(__name__)

CANCEL_INTERVAL_S = 1.0


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and return when all of them have ended. Their failures are not raised.

    A task that has not ended after a while is cancelled again: ``asyncio.wait_for`` in 3.11 swallows a cancellation
    that arrives together with the result, and a loop around it would go on for ever.
    """
    tasks = tuple(tasks)
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=CANCEL_INTERVAL_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # asyncio complains of failures that nobody retrieves


async def failure_of(work: Awaitable[object], what: str) -> KvrelayError | None:
    """Await ``work``; returns how it has failed, since somebody waits for an answer whatever it was."""
    try:
        await work
    except KvrelayError as exc:
        return exc
    except Exception as exc:  # noqa: BLE001 - the outermost frame of what another thread or worker waits for
        _log.exception("%s failed", what)
        return KvrelayError(f"{what} failed: {exc!r}")
    return None


async def happen(timeout_s: float, *events: asyncio.Event) -> bool:
    """Whether all events are set within ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            for event in events:
                await event.wait()
    except TimeoutError:
        return False
    return True


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
        await end_tasks(self)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the background task %s failed", getattr(task.get_coro(), "__qualname__", task), exc_info=error)
