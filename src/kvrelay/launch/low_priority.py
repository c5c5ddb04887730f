"""Work that yields the CPU: a restarting worker must not slow down the workers that took over its streams.

Loading, compiling and warming up take seconds of every core. A process may lower its priority, but raising it again
needs a privilege. So the work has a thread of its own: its nice value applies to that thread and the threads that it
starts, and ends with it. OpenMP's teams belong to the thread that asked for them and end with it too, so the engine's
thread gets a team of its own later.

Nice values count only between threads that share CPUs directly. If Linux schedules by session (autogroup), those are
the threads of one session, and the children of ``serve`` share its session. Between sessions the work does not yield;
nor between cgroups (containers, systemd services), where CPU weights decide.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)

LOW_NICE = 5
"""A third of the normal weight: a serving worker gets most of a core, and on busy cores a start takes about four times
as long, not for ever."""


async def at_low_priority(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread that yields the CPU; returns its result, or raises its exception, once the thread has
    ended."""
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

    thread = threading.Thread(target=run, name="loading")
    thread.start()
    try:
        return await done
    finally:
        if not done.cancelled():
            thread.join()  # it has nothing left to do


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
