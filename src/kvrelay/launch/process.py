"""How a process of ours behaves: signals, as process 1 of a container, priority, the collector of cyclic garbage, and
the end of a stuck one.

Priority. A restarting worker must not slow down the workers that took over its streams: loading, compiling and warming
up take seconds of every core. A process may lower its priority, but raising it again needs a privilege. So that work
has a thread of its own: its nice value applies to that thread and the threads that it starts, and ends with it.
OpenMP's teams belong to the thread that asked for them and end with it too, so the engine's thread gets a team of its
own later. Nice values count only between threads that share CPUs directly. If Linux schedules by session (autogroup),
those are the threads of one session, and the children of ``serve`` share its session. Between sessions the work does
not yield; nor between cgroups (containers, systemd services), where CPU weights decide.

Garbage. Requests allocate thousands of objects a second, and nearly all of them die by their reference count. Python's
default is to look for cycles at every 700 new objects, and now and then at all objects of the process, which stops the
event loop for tens of milliseconds.
"""

from __future__ import annotations

import asyncio
import faulthandler
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from kvrelay.core.tasks import end_tasks


def on_terminate(request_end: Callable[[], None]) -> None:
    """Call ``request_end`` at the first SIGTERM, SIGINT or SIGHUP; end the process at the next SIGTERM or SIGINT. From
    now on the process goes on if nothing takes what it prints.

    A SIGHUP that our parent ignores stays ignored (``nohup``). One never insists: when a terminal is closed, the kernel
    and the shell both send it.
    """
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def handle(number: int) -> None:
        seen.append(number)
        if len(seen) > 1:
            os._exit(128 + number)
        request_end()

    def hang_up() -> None:
        if not seen:
            handle(signal.SIGHUP)

    _print_or_lose()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, hang_up)


class _Output(io.FileIO):
    """stdout or stderr of a process that serves. Its reader may have gone, the terminal may be closed, the disk full:
    what cannot be written then is lost."""

    def write(self, data: Any, /) -> int:
        size = memoryview(data).nbytes
        try:
            return super().write(data) or size  # nothing, should the reader be slow and the pipe not wait for it
        except OSError:
            return size


def _print_or_lose() -> None:
    """Let stdout and stderr of this process be ``_Output``, for its log too."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        if type(before) is not io.TextIOWrapper or before.fileno() != number:
            continue  # in a test
        buffer = io.BufferedWriter(_Output(number, "wb", closefd=False))
        stream = io.TextIOWrapper(buffer, before.encoding, before.errors, line_buffering=True)
        setattr(sys, name, stream)
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                handler.setStream(stream)


FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def go_on_below_init() -> None:
    """As process 1 of a container: go on in a child, of which this process is the init.

    It forwards signals to the child, and ends with its exit code. Ranks of a killed worker, and what a worker's engine
    has left, become its children too; it waits for them, so that none stays a zombie. The program itself could not tell
    them from its own children, whose exit codes it wants.
    """
    signals = (*FORWARDED, signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    while True:
        received = signal.sigwaitinfo(signals)
        if received.si_signo == signal.SIGCHLD:
            ended, status = 1, 0
            while ended:
                ended, status = os.waitpid(-1, os.WNOHANG)
                if ended == child:
                    code = os.waitstatus_to_exitcode(status)
                    os._exit(code if code >= 0 else 128 - code)
        elif received.si_code <= 0:  # not from a terminal, which reaches the child by itself
            os.kill(child, received.si_signo)


MAX_PUT_OFF_INTERVAL_S = 30.0
PUT_OFFS_PER_TIMEOUT = 5
"""Each starts a native thread and wakes three, so they are rare. The process may end sooner by an interval."""


@asynccontextmanager
async def ended_when_stuck(timeout_s: float) -> AsyncIterator[None]:
    """Within this context, if the event loop has not run for ``timeout_s`` (0: no limit), the process writes all stacks
    to stderr and ends with exit code 1. A process has only one such timer.

    A worker's watchdog is a thread of the interpreter, and so is its event loop: native code that keeps the
    interpreter's lock stops both. faulthandler's timer is a native thread; the event loop resets it several times
    before it is due.
    """
    if not timeout_s:
        yield
        return
    putting_off = asyncio.get_running_loop().create_task(_put_off_forever(timeout_s))
    try:
        yield
    finally:
        await end_tasks([putting_off])
        faulthandler.cancel_dump_traceback_later()


async def _put_off_forever(timeout_s: float) -> None:
    while True:
        faulthandler.dump_traceback_later(timeout_s, exit=True)
        await asyncio.sleep(min(MAX_PUT_OFF_INTERVAL_S, timeout_s / PUT_OFFS_PER_TIMEOUT))


T = TypeVar("T")

SWITCH_INTERVAL_S = 0.0005
"""Longest time for which a side thread, e.g. the engine's, may hold the interpreter before it yields to the event loop.
Python's 5 ms would be the time of a token."""

_log = logging.getLogger(__name__)

LOW_NICE = 5
"""A third of the normal weight: a serving worker gets most of a core, and on busy cores a start takes about four times
as long, not for ever."""


async def at_low_priority(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread that yields the CPU; returns its result, or raises its exception, once the thread has
    ended."""
    pool = ThreadPoolExecutor(1, "loading", _be_nice)
    loading = asyncio.get_running_loop().run_in_executor(pool, work)
    try:
        return await loading
    finally:
        pool.shutdown(wait=not loading.cancelled())  # if it was not cancelled, it has nothing left to do


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
