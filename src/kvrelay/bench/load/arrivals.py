"""Arrival times: Poisson and burstier streams, and traces."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from kvrelay.errors import InvalidInputError


def check_rate(rate: float, name: str = "request rate") -> float:
    """A rate in requests per second must be a positive number; infinity means all at once."""
    if math.isnan(rate) or rate <= 0:
        raise InvalidInputError(f"{name} must be above zero, not {rate:g}", param=name)
    return rate


def random_arrivals(rng: np.random.Generator, rate: float, burstiness: float = 1.0) -> Iterator[float]:
    """Endless offsets in seconds with ``rate`` arrivals per second on average; the first is one gap after the start.

    Gaps are gamma-distributed with shape ``burstiness``: 1 is Poisson, below 1 burstier, above 1 more regular.
    """
    check_rate(rate)
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise InvalidInputError(f"burstiness must be above zero, not {burstiness:g}", param="burstiness")
    now = 0.0
    while True:
        if math.isfinite(rate):
            now += float(rng.gamma(burstiness, 1.0 / (rate * burstiness)))
        yield now


def trace_arrivals(arrivals_s: Iterable[float], time_scale: float = 1.0) -> Iterator[float]:
    """The trace's own times from its first request on, ``time_scale`` times as fast."""
    if not (time_scale > 0 and math.isfinite(time_scale)):
        raise InvalidInputError(f"the trace's time scale must be above zero, not {time_scale:g}", param="time_scale")
    start: float | None = None
    for arrival in arrivals_s:
        start = arrival if start is None else start
        yield max(0.0, (arrival - start) / time_scale)
