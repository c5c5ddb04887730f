"""When a way is tried although the costs advise against it. Pure; the clock is injected.

A way that is never taken is never measured, so a wrong cost of it would stay wrong for good: the first prefill of a
worker takes several times as long as the next. So a way that has not been taken for a while is doubtful, and one
prefill tries it. Each trial in a row doubles the time to the next one.
"""

from __future__ import annotations

from kvrelay.core.clock import Clock

FIRST_TRIAL_S = 0.5
"""A way that was not taken for so long may be tried."""
MAX_TRIAL_S = 60.0


class Trials:
    """The trials of one way."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._taken_s = clock.now()
        self._interval_s = FIRST_TRIAL_S
        self.num_trials = 0

    @property
    def is_due(self) -> bool:
        return self._clock.now() - self._taken_s >= self._interval_s

    def taken(self, *, is_trial: bool) -> None:
        """A prefill goes this way, for its cost or as a trial."""
        self._taken_s = self._clock.now()
        self.num_trials += is_trial
        self._interval_s = min(2 * self._interval_s, MAX_TRIAL_S) if is_trial else FIRST_TRIAL_S
