"""How tests wait: for a condition, for as long as even a busy machine may need, and not for a fixed time.

A deadline is there to end a test that has gone wrong; no test may fail because the machine had something else to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_IPV6 = Path("/proc/net/if_inet6")
HAS_IPV6 = _IPV6.exists() and " lo\n" in _IPV6.read_text()
PATIENCE_S = 60.0
"""Nothing that a test waits for takes nearly so long, unless it never happens."""


def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Return when the condition holds."""
    start = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - start
        assert waited_s < timeout_s, "the condition did not come true in time"
        # Asking costs time that what is waited for needs itself.
        time.sleep(min(max(0.02, waited_s / 10), 0.5))


async def noticed(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Return when the condition holds, or has held for as little as one turn of the running event loop.

    A state that passes is not missed, however long the machine leaves this process alone: the condition is asked after
    each turn, and what one turn begins no earlier turn can end. What other threads do by themselves is looked at every
    10 ms; a test that waits for such a state holds it.
    """

    def ask() -> None:
        if not came.done():
            try:
                if condition():
                    came.set_result(None)
            except Exception as error:  # noqa: BLE001 - the waiting test gets it
                came.set_exception(error)

    came = asyncio.get_running_loop().create_future()
    ask()
    asking = _asked_after_each_turn(came.get_loop())
    asking.append(ask)
    try:
        async with asyncio.timeout(timeout_s):
            while not came.done():
                await asyncio.wait([came], timeout=0.01)
    finally:
        asking.remove(ask)
    came.result()


def _asked_after_each_turn(loop: Any) -> list[Callable[[], None]]:
    """What a loop of asyncio asks after each of its turns."""
    if not hasattr(loop, "asked_after_each_turn"):
        loop.asked_after_each_turn = []
        turn = loop._run_once

        def turn_and_ask() -> None:
            turn()
            for ask in loop.asked_after_each_turn:
                ask()

        loop._run_once = turn_and_ask
    asked: list[Callable[[], None]] = loop.asked_after_each_turn
    return asked


def skip(seconds: float) -> None:
    """Timers of the running event loop that are due within so many seconds are due now."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]


def stop(pid: int) -> None:
    """Send SIGSTOP and return when every thread of the process has stopped, which ``kill`` does not wait for."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _thread_states(pid) <= set("TtXZ"))


def _thread_states(pid: int) -> set[str]:
    found = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.add(stat.read_text().rpartition(")")[2].split()[0])
    return found
