"""When an engine has been asked for enough: a bound on the KV blocks that its requests hold or wait for.

Bounded waiting counts requests; this counts what they weigh: a few long prompts can keep a pool busy for minutes, and
who comes behind them is better off elsewhere, or told at once when to come back. It does not know requests: the engine
says how many blocks are demanded, and how many had been demanded by those that have ended.
"""

from __future__ import annotations

import math

from kvrelay.core.clock import Clock
from kvrelay.errors import OverloadedError

MEAN_OVER_S = 30.0
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


class KvWatermark:
    """Refuses new requests while the demand on a pool of ``num_blocks`` is above ``ratio`` times its size; 0: never."""

    def __init__(self, ratio: float, num_blocks: int, clock: Clock) -> None:
        self._max_blocks = ratio * num_blocks if ratio else math.inf
        self._relief = ReliefRate(clock)

    def check(self, num_needed: int, num_demanded: int) -> None:
        """Raises OverloadedError if a request of ``num_needed`` blocks is too much on top of ``num_demanded``."""
        excess = num_demanded + num_needed - self._max_blocks
        if excess > 0:
            raise OverloadedError(
                f"requests hold or wait for {num_demanded} KV blocks; with the {num_needed} of this one that is above "
                f"the watermark of {self._max_blocks:g}",
                retry_after_s=self._retry_after_s(excess),
            )

    def observe(self, num_ended: int, *, is_idle: bool) -> None:
        """At an arrival: ``num_ended`` blocks have been demanded by requests that have ended, since the start."""
        self._relief.observe(num_ended, is_idle=is_idle)

    def _retry_after_s(self, excess: float) -> float:
        """When so much demand will have ended, if it goes on ending as it did; the least there is, if none has yet."""
        per_s = self._relief.per_s
        return min(max(excess / per_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S) if per_s else MIN_RETRY_AFTER_S


class ReliefRate:
    """Blocks per second whose demand ends: an exponentially weighted mean over the time that the engine was busy."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s = self._seen_s = clock.now()
        self._num_seen = 0
        self._weighted = 0.0

    def observe(self, num_ended: int, *, is_idle: bool) -> None:
        """``num_ended`` counts from the start. An idle engine begins anew: what it did not do was not asked of it."""
        now_s = self._clock.now()
        if is_idle:
            self._since_s, self._weighted = now_s, 0.0
        else:
            decay = math.exp((self._seen_s - now_s) / MEAN_OVER_S)
            self._weighted = self._weighted * decay + num_ended - self._num_seen
        self._seen_s, self._num_seen = now_s, num_ended

    @property
    def per_s(self) -> float:
        """As of the last observation; 0 when nothing is known yet."""
        # What the weights of a time this short add up to; without it the mean would begin at zero.
        weight_s = MEAN_OVER_S * -math.expm1((self._since_s - self._seen_s) / MEAN_OVER_S)
        return self._weighted / weight_s if weight_s else 0.0
