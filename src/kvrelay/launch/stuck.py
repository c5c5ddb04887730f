"""The last resort against a process in which neither the event loop nor the watchdog runs any more.

A worker's watchdog is a thread of the interpreter, and so is its event loop: native code that keeps the interpreter's
lock stops both. faulthandler's timer is a native thread; the event loop resets it several times before it is due.
"""

from __future__ import annotations

import asyncio
import faulthandler
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MAX_PUT_OFF_INTERVAL_S = 10.0
PUT_OFFS_PER_TIMEOUT = 5
"""Each starts a native thread, so they are rare."""


@asynccontextmanager
async def ended_when_stuck(timeout_s: float) -> AsyncIterator[None]:
    """Within this context, if the event loop has not run for ``timeout_s`` (0: no limit), the process writes all stacks
    to stderr and ends with exit code 1. A process has only one such timer."""
    if not timeout_s:
        yield
        return
    putting_off = asyncio.get_running_loop().create_task(_put_off_forever(timeout_s))
    try:
        yield
    finally:
        putting_off.cancel()
        await asyncio.gather(putting_off, return_exceptions=True)
        faulthandler.cancel_dump_traceback_later()


async def _put_off_forever(timeout_s: float) -> None:
    while True:
        faulthandler.dump_traceback_later(timeout_s, exit=True)
        await asyncio.sleep(min(MAX_PUT_OFF_INTERVAL_S, timeout_s / PUT_OFFS_PER_TIMEOUT))
