"""Heartbeats of a group. Pure.

A process that is stopped, or hangs as a whole, closes no connection. So every BEAT_S each rank sends ``Beat`` to the
coordinator, and the coordinator sends one to each rank, from the moment when the group is formed.
"""

from __future__ import annotations

import math

BEAT_S = 0.5
DEFAULT_SILENCE_S = 3.0
LOADING_SILENCE_S = 60.0
"""Until all ranks are loaded: importing libraries and reading weights may keep the thread that beats from running."""


class SilenceDetector:
    """Detects that the other end has sent nothing for ``timeout_s``. Counts calls of ``tick``, one every BEAT_S, not
    seconds: a process that was stopped itself has not waited."""

    def __init__(self, timeout_s: float) -> None:
        self.allow(timeout_s)

    def allow(self, timeout_s: float) -> None:
        """From now on so much silence, which begins anew."""
        self.timeout_s = timeout_s
        self._max_ticks = max(2, math.ceil(timeout_s / BEAT_S))
        self._num_ticks = 0

    def received(self) -> None:
        """Something has arrived."""
        self._num_ticks = 0

    def tick(self) -> bool:
        """True if the other end has been silent for too long."""
        self._num_ticks += 1
        return self._num_ticks > self._max_ticks


def silent(timeout_s: float) -> str:
    """What a rank has done that sends nothing."""
    return f"has sent nothing for {timeout_s:g} s (--rank-timeout-s): it hangs"
