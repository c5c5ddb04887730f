"""When a way is tried although the costs advise against it. Pure; the clock is injected.

A way that is never taken is never measured, so a wrong cost of it would stay wrong for good: the first prefill of a
worker takes several times as long as the next. So a way that has not been taken for a while is doubtful, and one
prefill tries it. Each trial in a row doubles the time to the next one.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

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


class WorkerTrials:
    """The trials of many workers' prefills, by one frontend."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._trials: dict[str, Trials] = {}
        self._looked_s = -math.inf

    def in_doubt(self, worker_ids: list[str]) -> npt.NDArray[np.bool_] | None:
        """[workers] Which of these have not been used for so long that they may be tried. None: it was looked for a
        moment ago; a look costs as much as a decision."""
        if self._clock.now() - self._looked_s < FIRST_TRIAL_S:
            return None
        self._looked_s = self._clock.now()
        self._trials = {worker_id: self._of(worker_id) for worker_id in worker_ids}
        return np.array([self._trials[worker_id].is_due for worker_id in worker_ids], dtype=np.bool_)

    def taken(self, worker_id: str, *, is_trial: bool) -> None:
        """A prefill goes there, for its cost or as a trial."""
        trials = self._trials[worker_id] = self._of(worker_id)
        trials.taken(is_trial=is_trial)

    def _of(self, worker_id: str) -> Trials:
        return self._trials.get(worker_id) or Trials(self._clock)
