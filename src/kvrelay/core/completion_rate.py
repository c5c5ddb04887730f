"""The rate at which requests or blocks have completed lately: it tells when a full room will have space again. Pure."""

from __future__ import annotations

import math

from kvrelay.core.clock import Clock

MEAN_OVER_S = 30.0
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


class CompletionRate:
    """Completions per second: an exponentially weighted mean over the time since ``restart``.

    The unit is the caller's, for example requests or blocks.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Forget all completions so far."""
        self._since_s = self._added_s = self._clock.now()
        self._weighted = 0.0

    def add(self, num_ended: int) -> None:
        """Count ``num_ended`` completions now."""
        now_s = self._clock.now()
        self._weighted = self._weighted * _decay(now_s - self._added_s) + num_ended
        self._added_s = now_s

    @property
    def per_s(self) -> float:
        """0 before the first completion."""
        now_s = self._clock.now()
        # The sum of the weights since the restart. A division by the full MEAN_OVER_S would begin at zero.
        weight_s = MEAN_OVER_S * (1.0 - _decay(now_s - self._since_s))
        return self._weighted * _decay(now_s - self._added_s) / weight_s if weight_s else 0.0

    def retry_after_s(self, excess: float) -> float:
        """Seconds until ``excess`` completions at the present rate, within the bounds above.

        MIN_RETRY_AFTER_S while the rate is 0.
        """
        per_s = self.per_s
        return min(max(excess / per_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S) if per_s else MIN_RETRY_AFTER_S

    def spacing_s(self, amount: float) -> float:
        """Seconds in which ``amount`` completes at the present rate; 0 while that is unknown."""
        per_s = self.per_s
        return amount / per_s if per_s else 0.0


def _decay(seconds: float) -> float:
    return math.exp(-seconds / MEAN_OVER_S)
