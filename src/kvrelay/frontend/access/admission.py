"""Admission control of one frontend: which requests may begin now, and when the others should retry.

There is a bound on sequences in flight over all API keys, and each key may have its own: on sequences in flight,
requests per minute, and tokens per minute. Each frontend process counts for itself. Pure, with an injected clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

import msgspec

from kvrelay.config import KeyLimits
from kvrelay.core.clock import Clock
from kvrelay.core.completion_rate import CompletionRate
from kvrelay.core.return_times import ReturnTimes
from kvrelay.errors import InvalidInputError, OverloadedError

MINUTE_S = 60.0
IN_FLIGHT, RATE, TOKENS, AT_ONCE = "in_flight", "requests_per_minute", "tokens_per_minute", "requests_at_once"
NO_LIMITS = KeyLimits()


class Admitted(msgspec.Struct):
    """Sequences in flight, until the end of the ``with`` block."""

    admission: Admission
    num_sequences: int
    key: str

    def __enter__(self) -> None:
        """They are counted already."""

    def __exit__(self, *_: object) -> None:
        self.admission.leave(self.num_sequences, self.key)


class Admission:
    """At most ``max_in_flight`` sequences at once."""

    def __init__(self, max_in_flight: int, clock: Clock) -> None:
        self.num_in_flight = 0
        self._max_in_flight = max_in_flight
        self._ended = CompletionRate(clock)
        self._returns = ReturnTimes(clock)
        self._requests = _KeyBuckets(clock)
        self._tokens = _KeyBuckets(clock)
        self._at_once: Counter[str] = Counter()
        self.rejections = {IN_FLIGHT: 0, RATE: 0, TOKENS: 0, AT_ONCE: 0}
        """Requests that were refused, by reason."""

    def __repr__(self) -> str:
        return f"Admission({self.num_in_flight} of {self._max_in_flight} in flight, {self._requests!r})"

    def admitted(self, num_sequences: int, key: str = "", limits: KeyLimits = NO_LIMITS) -> Admitted:
        """Count the sequences of this API key as in flight while the block runs.

        No key keeps another one out: above the bound a key may have its equal share.

        Raises OverloadedError at once if there are too many, or if the key has used up its tokens; InvalidInputError if
        the request alone exceeds the bound.
        """
        at_once = limits.requests_at_once
        most = min(at_once or self._max_in_flight, self._max_in_flight)
        if num_sequences > most:
            raise InvalidInputError(f"prompts times n is {num_sequences}, above {most}", param="n")
        per_minute = limits.tokens_per_minute or 0
        wait_s = self._tokens.wait_s(key, per_minute)
        if wait_s:
            self.rejections[TOKENS] += 1
            message = f"this API key allows {per_minute} tokens per minute (tokens_per_minute)"
            raise OverloadedError(message, retry_after_s=wait_s)
        if at_once and self._at_once[key] + num_sequences > at_once:
            self.rejections[AT_ONCE] += 1
            message = f"this API key allows {at_once} sequences at once (requests_at_once)"
            raise OverloadedError(message, retry_after_s=self._ended.retry_after_s(num_sequences))
        excess = self.num_in_flight + num_sequences - self._max_in_flight
        if excess > 0 and not self._is_below_share(key, num_sequences):
            self.rejections[IN_FLIGHT] += 1
            wait_s = self._returns.next_s(self._ended.retry_after_s(excess), self._ended.spacing_s(num_sequences))
            raise OverloadedError(f"{self.num_in_flight} requests are in flight already", retry_after_s=wait_s)
        if not self.num_in_flight:
            # Idle time must not count as slowness.
            self._ended.restart()
            self._returns.restart()
        self.num_in_flight += num_sequences
        self._at_once[key] += num_sequences
        return Admitted(self, num_sequences, key)

    def leave(self, num_sequences: int, key: str) -> None:
        """Admitted sequences have ended."""
        self.num_in_flight -= num_sequences
        self._at_once[key] -= num_sequences
        if not self._at_once[key]:
            del self._at_once[key]
        self._ended.add(num_sequences)

    def _is_below_share(self, key: str, num_sequences: int) -> bool:
        """Whether other keys fill the frontend, and this one stays within an equal share of it. So at most twice the
        bound is in flight."""
        num_own, num_keys = self._at_once[key], len(self._at_once)
        num_keys += not num_own
        return key != "" and num_keys > 1 and (num_own + num_sequences) * num_keys <= self._max_in_flight

    def count_request(self, key: str, requests_per_minute: int) -> None:
        """Count one request of an API key; ``requests_per_minute`` 0 means no limit. Raises OverloadedError."""
        wait_s = self._requests.wait_s(key, requests_per_minute)
        if wait_s:
            self.rejections[RATE] += 1
            message = f"this API key allows {requests_per_minute} requests per minute (requests_per_minute)"
            raise OverloadedError(message, retry_after_s=wait_s)
        self._requests.spend(key, requests_per_minute, 1)

    def count_tokens(self, key: str, tokens_per_minute: int, num_tokens: int) -> None:
        """Count tokens of a prompt, or of an answer that has ended. They may be more than the key has left: its next
        request then waits for longer."""
        self._tokens.spend(key, tokens_per_minute, num_tokens)

    def keep_keys(self, keys: Set[str]) -> None:
        """Forget the usage of all other API keys."""
        self._requests.keep(keys)
        self._tokens.keep(keys)


class _KeyBuckets:
    """A token bucket for each key that has a limit.

    A bucket holds what a key may spend in one minute and refills evenly: a client may spend it in one burst, and then
    continues at the average rate.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def __repr__(self) -> str:
        return f"{len(self._buckets)} keys"

    def keep(self, keys: Set[str]) -> None:
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if key in keys}

    def wait_s(self, key: str, per_minute: int) -> float:
        """Seconds until the key may spend one; 0 if it may now. ``per_minute`` 0 means no limit."""
        if not per_minute:
            return 0.0
        return max(1.0 - self._level(key, per_minute), 0.0) * MINUTE_S / per_minute

    def spend(self, key: str, per_minute: int, count: int) -> None:
        """Take ``count``, whether the key may spend it or not."""
        if per_minute:
            self._buckets[key] = (self._level(key, per_minute) - count, self._clock.now())

    def _level(self, key: str, per_minute: int) -> float:
        now_s, capacity = self._clock.now(), float(per_minute)
        level, at_s = self._buckets.get(key, (capacity, now_s))
        return min(capacity, level + (now_s - at_s) * capacity / MINUTE_S)
