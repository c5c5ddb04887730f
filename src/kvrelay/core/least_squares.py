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
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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

FloatArray = npt.NDArray[np.float64]


class RecursiveLeastSquares:
    """Fits ``y``, in seconds, to features that are zero or above.

    ``prior``: a positive coefficient for each feature, in seconds per unit. It also gives each feature its scale.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        if not prior or not all(math.isfinite(value) and value > 0 for value in prior):
            raise ValueError("every prior must be a finite number above zero")
        self._prior = np.array(prior, dtype=np.float64)
        self.num_samples = 0
        self.num_rejected = 0
        """Samples that were no times, and resets after a fit that was no longer finite."""
        self.relative_error = 0.0
        """Mean of the last samples' |measured - predicted| / measured."""
        # In units of the prior, so that all coefficients and their covariances are of the same order.
        self._shares = np.ones(len(self._prior))
        self._doubt()

    def _doubt(self) -> None:
        """Be as uncertain as at the start."""
        self._covariance = np.eye(len(self._prior)) * PRIOR_SPREAD**2
        self._num_since_doubt = 0
        self._bias = 0.0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per unit of each feature, zero or above."""
        values: list[float] = (self._shares * self._prior).tolist()
        return tuple(values)

    def predict(self, features: Sequence[float]) -> float:
        """Seconds, zero or above."""
        return float(self._shares @ (np.asarray(features, dtype=np.float64) * self._prior))

    def add(self, features: Sequence[float], seconds: float) -> bool:
        """Take in one sample. False, and nothing changes, unless it is a possible time."""
        scaled = np.asarray(features, dtype=np.float64) * self._prior
        is_possible = 0.0 < seconds <= MAX_VALUE_S and bool(np.isfinite(scaled).all() and (scaled >= 0.0).all())
        if not is_possible or not scaled.any():
            self.num_rejected += 1
            return False
        predicted = float(self._shares @ scaled)
        self._remember_error(abs(seconds - predicted) / seconds)
        # A prediction near zero must not turn every error into an infinite one.
        unit = max(predicted, float(scaled.max()) * 1e-3, 1e-6)
        self._bias += ERROR_SHARE * ((seconds - predicted) / max(seconds, predicted) - self._bias)
        if abs(self._bias) > CHANGE_BIAS and self._num_since_doubt >= CHANGE_SAMPLES:
            self._doubt()
        self._fit(scaled / unit, (seconds - predicted) / unit)
        self.num_samples += 1
        self._num_since_doubt += 1
        return True

    def _remember_error(self, error: float) -> None:
        share = max(ERROR_SHARE, 1.0 / (self.num_samples + 1))
        self.relative_error += share * (error - self.relative_error)

    def _fit(self, row: FloatArray, error: float) -> None:
        # Huber's weight: an outlier moves the model as far as an error of MAX_RELATIVE_ERROR, and teaches as little.
        factor = math.sqrt(min(1.0, MAX_RELATIVE_ERROR / max(abs(error), 1e-12))) / NOISE
        row, error = row * factor, error * factor
        spread = self._covariance @ row
        certainty = float(row @ spread)
        if not certainty > MIN_CERTAINTY:
            return
        self._shares = self._shares + spread * (error / (1.0 + certainty))
        weight = MEMORY - (1.0 - MEMORY) / certainty
        if weight != 0.0:
            self._covariance = self._covariance - np.outer(spread, spread) / (1.0 / weight + certainty)
        if not (np.isfinite(self._shares).all() and np.isfinite(self._covariance).all()):
            self.num_rejected += 1
            self._shares = np.ones(len(self._prior))
            self._doubt()
            return
        self._make_positive()

    def _make_positive(self) -> None:
        """Set negative coefficients to zero and shift the others by what that says about them (the nearest point, in
        the metric of the covariance). Cutting them off would leave a prediction that no sample supports."""
        for _ in range(len(self._shares)):
            at = int(self._shares.argmin())
            variance = float(self._covariance[at, at])
            if self._shares[at] >= -1e-9 or not variance > 0.0:
                break
            self._shares = self._shares - self._covariance[:, at] * (float(self._shares[at]) / variance)
        np.maximum(self._shares, 0.0, out=self._shares)
