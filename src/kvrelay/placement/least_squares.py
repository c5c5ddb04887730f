"""Recursive least squares: a linear model fitted to a stream of samples, one at a time. Pure.

    y = coefficients . features,   error = y - prediction,   r = f' P f
    coefficients += P f * error / (1 + r)
    P -= (P f) (P f)' / (1 / e + r),   e = MEMORY - (1 - MEMORY) / r

This is directional forgetting (Kulhavy, Automatica 1987): a sample replaces old information about its own direction
only. So a thousand decode steps do not make the model forget what a prefill costs. Three things are particular, because
samples are times measured on a busy machine:

- Errors are relative to the prediction, so that a step of 4 ms counts as much as one of 400 ms.
- A relative error is limited, so that one pause of the process moves the model a little only.
- The fit begins at a prior, and predictions use no coefficient below zero, so they are finite and monotone.

An engine adds a sample after every step, of six features at most. At this size rows of plain floats take as long as
arrays would.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

MEMORY = 0.99
"""A direction's estimate follows about its last 1 / (1 - MEMORY) samples."""
NOISE = 0.1
"""Standard deviation of the relative error of a sample."""
PRIOR_SPREAD = 30.0
"""Standard deviation of a coefficient before the first sample, over its prior."""
MAX_RELATIVE_ERROR = 1.0
ERROR_SHARE = 0.05
"""Weight of the latest sample in ``relative_error``."""
CHANGE_BIAS, CHANGE_SAMPLES = 0.3, 50
"""If the mean relative error of so many samples is this far on one side, the truth has changed, and the fit begins anew
from where it is. Noise lies on both sides."""
MAX_VALUE_S = 600.0
MIN_CERTAINTY = 1e-9


class RecursiveLeastSquares:
    """Fits ``y``, in seconds, to features that are zero or above.

    ``prior``: a positive coefficient for each feature, in seconds per unit. It also gives each feature its scale.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        if not prior or not all(math.isfinite(value) and value > 0 for value in prior):
            raise ValueError("a prior is needed for each feature, and every one must be a finite number above zero")
        self._prior = [float(value) for value in prior]
        self.num_samples = 0
        self.num_rejected = 0
        """Samples that were no times, and resets after a fit that was no longer finite."""
        self.relative_error = 0.0
        """Mean of the last samples' |measured - predicted| / measured."""
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all samples: the next one replaces what was known."""
        # In units of the prior, so that all coefficients and their covariances are of the same order.
        self._shares = [1.0] * len(self._prior)
        self._doubt()

    def _doubt(self) -> None:
        """Be as uncertain as at the start."""
        places = range(len(self._prior))
        self._covariance = [[PRIOR_SPREAD**2 if row == column else 0.0 for column in places] for row in places]
        self._num_since_doubt = 0
        self._bias = 0.0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per unit of each feature, zero or above."""
        return tuple(map(operator.mul, self._shares, self._prior))

    def add(self, features: Sequence[float], seconds: float) -> bool:
        """Take in one sample. False, and nothing changes, unless it is a possible time."""
        # In seconds of the prior.
        scaled = [value * prior for value, prior in zip(features, self._prior, strict=True)]
        largest = max(scaled)
        # A sum is finite only if each of its parts is.
        is_possible = 0.0 < seconds <= MAX_VALUE_S and min(scaled) >= 0.0 and math.isfinite(sum(scaled))
        if not is_possible or not largest > 0.0:
            self.num_rejected += 1
            return False
        predicted = sum(map(operator.mul, self._shares, scaled))
        share = max(ERROR_SHARE, 1.0 / (self.num_samples + 1))
        self.relative_error += share * (abs(seconds - predicted) / seconds - self.relative_error)
        # A prediction near zero must not turn every error into an infinite one.
        unit = max(predicted, largest * 1e-3, 1e-6)
        self._bias += ERROR_SHARE * ((seconds - predicted) / max(seconds, predicted) - self._bias)
        if abs(self._bias) > CHANGE_BIAS and self._num_since_doubt >= CHANGE_SAMPLES:
            self._doubt()
        self._fit([value / unit for value in scaled], (seconds - predicted) / unit)
        self.num_samples += 1
        self._num_since_doubt += 1
        return True

    def _fit(self, row: list[float], error: float) -> None:
        # Huber's weight: an outlier moves the model as far as an error of MAX_RELATIVE_ERROR, and teaches as little.
        factor = math.sqrt(min(1.0, MAX_RELATIVE_ERROR / max(abs(error), 1e-12))) / NOISE
        row = [value * factor for value in row]
        along = [sum(map(operator.mul, line, row)) for line in self._covariance]
        certainty = sum(map(operator.mul, along, row))
        if not certainty > MIN_CERTAINTY:
            return
        step = error * factor / (1.0 + certainty)
        shares = [share + part * step for share, part in zip(self._shares, along, strict=True)]
        weight = MEMORY - (1.0 - MEMORY) / certainty
        if weight != 0.0:
            scale = 1.0 / (1.0 / weight + certainty)
            self._covariance = [
                [value - less * part for value, part in zip(line, along, strict=True)]
                for line, less in zip(self._covariance, [part * scale for part in along], strict=True)
            ]
        if not math.isfinite(sum(shares) + sum(map(sum, self._covariance))):
            self.num_rejected += 1
            self.begin_anew()
        else:
            # At once: another thread may read them at any time.
            self._shares = shares if min(shares) >= 0.0 else self._positive(shares)

    def _positive(self, shares: list[float]) -> list[float]:
        """Set negative coefficients to zero and shift the others by what that says about them (the nearest point, in
        the metric of the covariance). Cutting them off would leave a prediction that no sample supports."""
        for _ in shares:
            lowest = min(shares)
            at = shares.index(lowest)
            line = self._covariance[at]
            if lowest >= -1e-9 or not line[at] > 0.0:
                break
            shares = [share - part * (lowest / line[at]) for share, part in zip(shares, line, strict=True)]
        return [max(share, 0.0) for share in shares]
