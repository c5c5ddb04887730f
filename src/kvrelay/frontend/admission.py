"""Admission control of one frontend: which requests may begin now, and when the others should retry.

There are two rules: a bound on sequences in flight, and a bound on requests per minute for API keys with a limit. Each
frontend process counts for itself. Pure, with an injected clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager

from kvrelay.core.clock import Clock
from kvrelay.core.completion_rate import CompletionRate
from kvrelay.core.return_times import ReturnTimes
from kvrelay.errors import InvalidInputError, OverloadedError

MINUTE_S = 60.0
IN_FLIGHT, RATE = "in_flight", "requests_per_minute"


class Admission:
    """At most ``max_in_flight`` sequences at once."""

    def __init__(self, max_in_flight: int, clock: Clock) -> None:
        self.num_in_flight = 0
        self._max_in_flight = max_in_flight
        self._ended = CompletionRate(clock)
        self._returns = ReturnTimes(clock)
        self._keys = _KeyBuckets(clock)
        self.rejections = {IN_FLIGHT: 0, RATE: 0}
        """Requests that were refused, by reason."""

    def __repr__(self) -> str:
        return f"Admission({self.num_in_flight} of {self._max_in_flight} in flight, {self._keys!r})"

    @contextmanager
    def admitted(self, num_sequences: int) -> Iterator[None]:
        """Count the sequences as in flight while the block runs.

        Raises OverloadedError at once if there are too many, and InvalidInputError if the request alone exceeds the
        bound.
        """
        if num_sequences > self._max_in_flight:
            raise InvalidInputError(f"prompts times n is {num_sequences}, above {self._max_in_flight}", param="n")
        excess = self.num_in_flight + num_sequences - self._max_in_flight
        if excess > 0:
            self.rejections[IN_FLIGHT] += 1
            wait_s = self._returns.next_s(self._ended.retry_after_s(excess), self._ended.spacing_s(num_sequences))
            raise OverloadedError(f"{self.num_in_flight} requests are in flight already", retry_after_s=wait_s)
        if not self.num_in_flight:
            # Idle time must not count as slowness.
            self._ended.restart()
            self._returns.restart()
        self.num_in_flight += num_sequences
        try:
            yield
        finally:
            self.num_in_flight -= num_sequences
            self._ended.add(num_sequences)

    def count_request(self, key: str, requests_per_minute: int) -> None:
        """Count one request of an API key; ``requests_per_minute`` 0 means no limit. Raises OverloadedError."""
        wait_s = self._keys.take(key, requests_per_minute)
        if wait_s is not None:
            self.rejections[RATE] += 1
            message = f"this API key allows {requests_per_minute} requests per minute (requests_per_minute)"
            raise OverloadedError(message, retry_after_s=wait_s)

    def keep_keys(self, keys: Set[str]) -> None:
        """Forget the usage of all other API keys."""
        self._keys.keep(keys)


class _KeyBuckets:
    """A token bucket for each key that has a limit.

    A bucket holds the requests of one minute and refills evenly: a client may spend them in one burst, and then
    continues at the average rate.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def __repr__(self) -> str:
        return f"{len(self._buckets)} keys"

    def keep(self, keys: Set[str]) -> None:
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if key in keys}

    def take(self, key: str, requests_per_minute: int) -> float | None:
        """None if the request may begin, else the seconds until the next one may."""
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
