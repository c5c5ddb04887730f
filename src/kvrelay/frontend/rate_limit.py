"""Requests per minute and API key: a token bucket for each. Pure, with an injected clock.

A bucket holds a minute's worth and refills evenly, so a client may spend its minute in one burst and then goes on at
the average rate. There are no more buckets than keys. Each frontend process counts for itself.
"""

from __future__ import annotations

from collections.abc import Set

from kvrelay.core.clock import Clock

MINUTE_S = 60.0


class RateLimit:
    """A bucket for each key that has a limit."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def __repr__(self) -> str:
        return f"RateLimit(keys={len(self._buckets)})"

    def keep(self, keys: Set[str]) -> None:
        """Forget all others."""
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if key in keys}

    def take(self, key: str, requests_per_minute: int) -> float | None:
        """Count one request; 0: no limit. None: it may go on; else the seconds after which the next one may."""
        if not requests_per_minute:
            return None
        now_s, capacity = self._clock.now(), float(requests_per_minute)
        level, at_s = self._buckets.get(key, (capacity, now_s))
        level = min(capacity, level + (now_s - at_s) * capacity / MINUTE_S)
        if level < 1.0:
            self._buckets[key] = (level, now_s)
            return (1.0 - level) * MINUTE_S / capacity
        self._buckets[key] = (level - 1.0, now_s)
        return None
