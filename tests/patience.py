"""How tests wait: for a condition, for as long as even a busy machine may need, and not for a fixed time.

A deadline is there to end a test that has gone wrong; no test may fail because the machine had something else to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""Nothing that a test waits for takes nearly so long, unless it never happens."""


def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Return when the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)
