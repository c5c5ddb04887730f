"""Distributions as every report shows them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Distribution:
    """Count, mean, percentiles (linear between neighbours) and maximum, in the unit of the values."""

    count: int
    mean: float
    median: float
    p90: float
    p95: float
    p99: float
    max: float


def distribution(values: npt.ArrayLike) -> Distribution | None:
    """Summarise; None where there is nothing to summarise."""
    data = np.asarray(values, dtype=np.float64)
    if not data.size:
        return None
    median, p90, p95, p99 = np.percentile(data, [50, 90, 95, 99]).tolist()
    return Distribution(int(data.size), float(data.mean()), median, p90, p95, p99, float(data.max()))
