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
from kvrelay.core.completion_rate import CompletionRate
from kvrelay.engine.scheduler import Scheduler
from kvrelay.errors import OverloadedError


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
        self._ended_requests = CompletionRate(clock)
        self._ended_blocks = CompletionRate(clock)
        self._num_requests_seen = self._num_blocks_seen = 0

    def check(self, num_tokens: int, *, is_new: bool, ahead: OnTheWay = NOBODY) -> None:
        """Raises OverloadedError if a request of ``num_tokens`` is too much. It only reads numbers, so any thread may
        ask, while a step runs.

        What was begun elsewhere (not ``is_new``) is not weighed: its client would lose what it has. Neither is what
        comes to an idle engine: it takes whatever fits.
        """
        scheduler, pool = self._scheduler, self._scheduler.pool
        num_waiting = scheduler.num_waiting + ahead.num_requests
        num_too_many = num_waiting + 1 - self._max_num_waiting - scheduler.num_places
        if num_too_many > 0:
            raise OverloadedError(
                f"{num_waiting} requests are waiting already",
                retry_after_s=self._ended_requests.retry_after_s(num_too_many),
            )
        if not is_new or not (scheduler.requests or ahead.num_requests):
            return
        num_demanded = scheduler.num_demanded_blocks + pool.blocks_for(ahead.num_tokens)
        num_needed = pool.blocks_for(num_tokens)
        excess = num_demanded + num_needed - self._max_blocks
        if excess > 0:
            raise OverloadedError(
                f"requests hold or wait for {num_demanded} KV blocks; with the {num_needed} of this one that is above "
                f"the watermark of {self._max_blocks:g}",
                retry_after_s=self._ended_blocks.retry_after_s(excess),
            )

    def observe(self) -> None:
        """After a step, on the engine's thread: what has ended since the last one."""
        num_requests, num_blocks = self._scheduler.num_ended_requests, self._scheduler.num_ended_blocks
        if num_requests > self._num_requests_seen:
            self._ended_requests.add(num_requests - self._num_requests_seen)
            self._ended_blocks.add(num_blocks - self._num_blocks_seen)
            self._num_requests_seen, self._num_blocks_seen = num_requests, num_blocks

    def begin_anew(self) -> None:
        """The engine is idle: what it did not do was not asked of it."""
        self._ended_requests.restart()
        self._ended_blocks.restart()
