"""Random numbers that depend on a request's seed and the output index alone.

SplitMix64 (Steele, Lea and Flood 2014) as a counter-based generator: no state to keep, to share or to hand over, so a
request draws the same numbers in any batch and on any worker.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniform(seeds: npt.NDArray[np.uint64], indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per pair of seed and output index, with 53 random bits."""
    mixed = _mix(_mix(seeds + _GOLDEN) + _GOLDEN * (indices.astype(np.uint64) + np.uint64(1)))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
