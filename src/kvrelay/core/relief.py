"""When something that is full will have room again: the rate at which what it holds has ended lately. Pure."""

from __future__ import annotations

import math

from kvrelay.core.clock import Clock

MEAN_OVER_S = 30.0
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


class ReliefRate:
    """How much ends per second, in whatever is counted: an exponentially weighted mean over the time since
    ``restart``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Nothing is known any more."""
        self._since_s = self._added_s = self._clock.now()
        self._weighted = 0.0

    def add(self, num_ended: int) -> None:
        """So much has ended."""
        now_s = self._clock.now()
        self._weighted = self._weighted * _decay(now_s - self._added_s) + num_ended
        self._added_s = now_s

    @property
    def per_s(self) -> float:
        """0 when nothing is known yet."""
        now_s = self._clock.now()
        # What the weights of a time this short add up to; without it the mean would begin at zero.
        weight_s = MEAN_OVER_S * (1.0 - _decay(now_s - self._since_s))
        return self._weighted * _decay(now_s - self._added_s) / weight_s if weight_s else 0.0

    def retry_after_s(self, excess: float) -> float:
        """When so much will have ended, if it goes on ending as it did; the least there is, if nothing is known."""
        per_s = self.per_s
        return min(max(excess / per_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S) if per_s else MIN_RETRY_AFTER_S


def _decay(seconds: float) -> float:
    return math.exp(-seconds / MEAN_OVER_S)
