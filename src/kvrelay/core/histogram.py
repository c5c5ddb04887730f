"""Histograms of durations for Prometheus: an observation is a bisection and two additions, without a lock.

A histogram has one writer, the thread that owns it. A scrape reads it from any thread: the counts are copied at once,
so buckets and count agree; the sum may be an observation ahead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import add

LATENCY_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ENDLESS_S = 1e9
"""Where the last bucket ends: JSON has no infinity."""
TOKEN_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Histogram:
    """Counts per bucket and the sum, in seconds."""

    __slots__ = ("_bounds", "counts", "total_s")

    def __init__(self, bounds_s: Sequence[float] = LATENCY_BUCKETS_S) -> None:
        self._bounds = tuple(bounds_s)
        self.counts = [0] * (len(self._bounds) + 1)
        self.total_s = 0.0

    def __repr__(self) -> str:
        return f"Histogram({self.count} in {self.total_s:.3f} s)"

    def observe(self, value_s: float, count: int = 1) -> None:
        """``count`` equal observations."""
        self.counts[bisect_left(self._bounds, value_s)] += count
        self.total_s += value_s * count

    def add(self, other: Histogram) -> None:
        """Its observations, too; of the same bounds."""
        self.counts = list(map(add, self.counts, other.counts))
        self.total_s += other.total_s

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, as Prometheus expects them."""
        running, rows = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self.counts.copy()):
            running += count
            rows.append((bound, float(running)))
        return rows


def quantile_bucket_s(bounds_s: Sequence[float], counts: Sequence[int], share: float) -> tuple[float, float]:
    """The bounds of the bucket with the quantile, of some observations."""
    wanted, below = share * sum(counts), 0
    for upper, lower, count in zip(bounds_s, (0.0, *bounds_s), counts):
        below += count
        if below >= wanted:
            return lower, upper
    return bounds_s[-1], ENDLESS_S


def quantile_s(bounds_s: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The quantile of what the buckets hold, interpolated within its bucket as Prometheus does; None if they are empty.
    Beyond the last bound it is that bound."""
    wanted, below = share * sum(counts), 0
    if not wanted:
        return None
    for upper, lower, count in zip(bounds_s, (0.0, *bounds_s), counts):
        if below + count >= wanted:
            return lower + (upper - lower) * (wanted - below) / count
        below += count
    return float(bounds_s[-1])
