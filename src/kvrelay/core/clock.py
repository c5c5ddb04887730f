"""Time as a dependency: policies take a clock, so tests and the simulator can move it by hand."""

from __future__ import annotations

import math
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds. Comparable within one process only; never put on a wire."""

    def now(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.monotonic)


class ManualClock:
    """A clock that stands still until it is advanced."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds

    def move_to(self, now_s: float) -> None:
        """Show exactly ``now_s``; a sum of small steps would round."""
        self._now_s = now_s


def next_beat_s(now_s: float, interval_s: float) -> float:
    """The next multiple of ``interval_s`` on this clock that is at least an eighth of it away: timers may be early.

    Idle processes act on beats, so those of a host wake up together, and they and their control server rest in between.
    The machine's monotonic clock is the same for all its processes, and other machines' clocks have other beats.
    """
    return (math.floor(now_s / interval_s + 0.125) + 1) * interval_s
