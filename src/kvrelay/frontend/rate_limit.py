"""Requests per minute and API key: a token bucket for each. Pure, with an injected clock.

A bucket holds a minute's worth and refills evenly, so a client may spend its minute in one burst and then goes on at
the average rate. There are as many buckets as keys. Each frontend process counts for itself.
"""

from __future__ import annotations

from kvrelay.core.clock import Clock

MINUTE_S = 60.0


class RateLimit:
    """``requests_per_minute`` for each key; 0: no limit."""

    def __init__(self, requests_per_minute: int, clock: Clock) -> None:
        self._capacity = float(requests_per_minute)
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def __repr__(self) -> str:
        return f"RateLimit({self._capacity:g} per minute, keys={len(self._buckets)})"

    def take(self, key: str) -> float | None:
        """Count one request. None: it may go on; else the seconds after which the next one may."""
        if not self._capacity:
            return None
        now_s = self._clock.now()
        level, at_s = self._buckets.get(key, (self._capacity, now_s))
        level = min(self._capacity, level + (now_s - at_s) * self._capacity / MINUTE_S)
        if level < 1.0:
            self._buckets[key] = (level, now_s)
            return (1.0 - level) * MINUTE_S / self._capacity
        self._buckets[key] = (level - 1.0, now_s)
        return None
