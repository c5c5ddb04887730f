"""Work that yields the CPU to others: a worker that starts again must not slow down those that took over its streams.

Loading, compiling and warming up take seconds of every core. A process may lower its priority, but raising it again
takes a privilege; so two means that need none:

- the work has a thread of its own, whose nice value counts for that thread and those that it starts, and ends with it.
  OpenMP's teams belong to the thread that asked for them, so the engine's thread gets one of its own later;
- where Linux schedules by session (autogroup), nice values count only within one. The session of a process that leads
  one, as the children of ``serve`` do, has a nice value of its own, which anyone may set to 0 again.

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
"""A third of the normal weight: whoever serves gets most of a core, and on busy cores a start takes some four times as
long, not for ever."""
AUTOGROUP = Path("/proc/self/autogroup")
NUM_ATTEMPTS = 30
ATTEMPT_INTERVAL_S = 0.12
"""Linux allows a change every tenth of a second, of all sessions together."""


async def at_low_priority(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread that yields the CPU; gives what it returns, or raises what it raises."""
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
    """The calling thread only, which is how Linux does it."""
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
    """Lower the session's priority, if it is this process's own, and raise it again to what it was."""
    before = _session_nice(autogroup)
    # A value below 0 could not be had back.
    if before is None or not 0 <= before < LOW_NICE or not await _set_session_nice(autogroup, LOW_NICE):
        yield
        return
    try:
        yield
    finally:
        if not await _set_session_nice(autogroup, before):
            _log.warning("this process stays at low CPU priority: %s cannot be written", autogroup)


def _session_nice(autogroup: Path) -> int | None:
    """None where there is no such thing, or where the session has other processes to look after."""
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
