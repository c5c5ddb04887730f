"""Work that yields the CPU: a restarting worker must not slow down the workers that took over its streams.

Loading, compiling and warming up take seconds of every core. A process may lower its priority, but raising it again
needs a privilege. These two means need none:

- The work has a thread of its own. Its nice value applies to that thread and the threads that it starts, and ends with
  it. OpenMP's teams belong to the thread that asked for them, so the engine's thread gets a team of its own later.
- If Linux schedules by session (autogroup), nice values count only within a session. The session of a process that
  leads one, like the children of ``serve``, has a nice value of its own, and every process may set it to 0 again.

Neither crosses a cgroup: between containers or systemd services their CPU weights decide.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)

LOW_NICE = 5
"""A third of the normal weight: a serving worker gets most of a core, and on busy cores a start takes about four times
as long, not for ever."""
AUTOGROUP = Path("/proc/self/autogroup")
NUM_ATTEMPTS = 30
ATTEMPT_INTERVAL_S = 0.12
"""Linux allows one change per tenth of a second, over all sessions."""


async def at_low_priority(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread that yields the CPU; returns its result, or raises its exception."""
    async with _yielding_session(AUTOGROUP):
        return await _in_nice_thread(work)


async def _in_nice_thread(work: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            _be_nice()
            result = work()
        except BaseException as exc:  # noqa: BLE001 - raised again on the event loop
            _tell(loop, done, partial(done.set_exception, exc))
        else:
            _tell(loop, done, partial(done.set_result, result))

    threading.Thread(target=run, name="loading").start()
    return await done


def _tell(loop: asyncio.AbstractEventLoop, done: asyncio.Future[T], settle: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(lambda: None if done.done() else settle())


def _be_nice() -> None:
    """Lower the priority of the calling thread only; on Linux, nice values belong to threads."""
    if sys.platform != "linux":
        return
    try:
        thread_id = threading.get_native_id()
        current = os.getpriority(os.PRIO_PROCESS, thread_id)
        os.setpriority(os.PRIO_PROCESS, thread_id, max(current, LOW_NICE))
    except OSError as exc:
        _log.debug("loading at normal priority: %s", exc)


@asynccontextmanager
async def _yielding_session(autogroup: Path) -> AsyncIterator[None]:
    """Lower the session's priority, if the session is this process's own, and restore it afterwards."""
    before = _session_nice(autogroup)
    # A value below 0 could not be restored without a privilege.
    if before is None or not 0 <= before < LOW_NICE or not await _set_session_nice(autogroup, LOW_NICE):
        yield
        return
    try:
        yield
    finally:
        if not await _set_session_nice(autogroup, before):
            _log.warning("this process stays at low CPU priority: %s cannot be written", autogroup)


def _session_nice(autogroup: Path) -> int | None:
    """The session's autogroup file; None if there is none, or if the session has other processes."""
    if sys.platform != "linux" or os.getsid(0) != os.getpid():
        return None
    try:
        found = re.search(r"nice (-?\d+)", autogroup.read_text(encoding="utf-8"))
    except OSError:
        return None
    return int(found[1]) if found else None


async def _set_session_nice(autogroup: Path, nice: int) -> bool:
    for _ in range(NUM_ATTEMPTS):
        try:
            _write(autogroup, nice)
        except BlockingIOError:
            await asyncio.sleep(ATTEMPT_INTERVAL_S)
        except OSError as exc:
            _log.debug("cannot set the session's nice value to %d: %s", nice, exc)
            return False
        else:
            return True
    return False


def _write(autogroup: Path, nice: int) -> None:
    autogroup.write_text(str(nice), encoding="utf-8")
