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
