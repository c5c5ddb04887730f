"""When one request more is too much: for the waiting line, or for the KV pool.

Bounded waiting counts requests; the KV watermark counts what they weigh: a few long prompts can keep a pool busy for
minutes, and who comes behind them is better off elsewhere, or told at once when to come back. It does not know who is
let in next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvrelay.config import EngineConfig
from kvrelay.core.clock import Clock
from kvrelay.engine.scheduler import Scheduler
from kvrelay.errors import OverloadedError

MEAN_OVER_S = 30.0
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class OnTheWay:
    """Requests that the engine will look at before the one in question, and their tokens."""

    num_requests: int = 0
    num_tokens: int = 0


NOBODY = OnTheWay()


class Overload:
    """The bounds of one engine: ``max_num_waiting`` requests that have no place, and ``kv_watermark`` times the pool
    in blocks that requests hold or wait for (0: no bound)."""

    def __init__(self, config: EngineConfig, scheduler: Scheduler, clock: Clock) -> None:
        self._scheduler = scheduler
        self._max_num_waiting = config.max_num_waiting
        self._max_blocks = config.kv_watermark * scheduler.pool.num_blocks or math.inf
        self._relief = ReliefRate(clock)
        self._num_relieved = 0

    def check(self, num_tokens: int, *, is_new: bool, ahead: OnTheWay = NOBODY) -> None:
        """Raises OverloadedError if a request of ``num_tokens`` is too much. It only reads numbers, so any thread may
        ask, while a step runs.

        What was begun elsewhere (not ``is_new``) is not weighed: its client would lose what it has. Neither is what
        comes to an idle engine: it takes whatever fits.
        """
        scheduler, pool = self._scheduler, self._scheduler.pool
        num_waiting = scheduler.num_waiting + ahead.num_requests
        if num_waiting >= self._max_num_waiting + scheduler.num_places:
            raise OverloadedError(f"{num_waiting} requests are waiting already")
        if not is_new or not (scheduler.requests or ahead.num_requests):
            return
        num_demanded = scheduler.num_demanded_blocks + pool.blocks_for(ahead.num_tokens)
        num_needed = pool.blocks_for(num_tokens)
        excess = num_demanded + num_needed - self._max_blocks
        if excess > 0:
            raise OverloadedError(
                f"requests hold or wait for {num_demanded} KV blocks; with the {num_needed} of this one that is above "
                f"the watermark of {self._max_blocks:g}",
                retry_after_s=self._retry_after_s(excess),
            )

    def observe(self) -> None:
        """After a step, on the engine's thread: what has ended since the last one."""
        num_ended = self._scheduler.num_ended_blocks
        if num_ended > self._num_relieved:
            self._relief.add(num_ended - self._num_relieved)
            self._num_relieved = num_ended

    def begin_anew(self) -> None:
        """The engine is idle: what it did not do was not asked of it."""
        self._relief.restart()

    def _retry_after_s(self, excess: float) -> float:
        """When so much demand will have ended, if it goes on ending as it did; the least there is, if none has yet."""
        per_s = self._relief.per_s
        return min(max(excess / per_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S) if per_s else MIN_RETRY_AFTER_S


class ReliefRate:
    """Blocks per second whose demand ends: an exponentially weighted mean over the time since ``restart``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        self._since_s = self._added_s = self._clock.now()
        self._weighted = 0.0

    def add(self, num_blocks: int) -> None:
        """The demand for so many has ended."""
        now_s = self._clock.now()
        self._weighted = self._weighted * _decay(now_s - self._added_s) + num_blocks
        self._added_s = now_s

    @property
    def per_s(self) -> float:
        """0 when nothing is known yet."""
        now_s = self._clock.now()
        # What the weights of a time this short add up to; without it the mean would begin at zero.
        weight_s = MEAN_OVER_S * (1.0 - _decay(now_s - self._since_s))
        return self._weighted * _decay(now_s - self._added_s) / weight_s if weight_s else 0.0


def _decay(seconds: float) -> float:
    return math.exp(-seconds / MEAN_OVER_S)
