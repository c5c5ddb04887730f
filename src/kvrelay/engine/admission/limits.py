"""The two bounds above which an engine refuses a request: the length of its queue, and demand for its KV pool.

``max_num_waiting`` counts requests. The KV watermark counts their blocks: a few long prompts can occupy a pool for
minutes, and a request that comes after them is better off on another worker, or with a client that retries later. This
module does not decide which waiting request gets blocks next (``queue.py``).
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
class PendingArrivals:
    """Requests that were posted to the engine before the one in question and not yet received, and their tokens."""

    num_requests: int = 0
    num_tokens: int = 0


NONE_PENDING = PendingArrivals()


class AdmissionLimits:
    """The limits of one engine: at most ``max_num_waiting`` requests without a slot, and at most ``kv_watermark`` times
    the pool in blocks that requests hold or wait for (0: no limit)."""

    def __init__(self, config: EngineConfig, scheduler: Scheduler, clock: Clock) -> None:
        self._scheduler = scheduler
        self._max_num_waiting = config.max_num_waiting
        self._max_blocks = config.kv_watermark * scheduler.pool.num_blocks or math.inf
        self._ended_requests = CompletionRate(clock)
        self._ended_blocks = CompletionRate(clock)
        self._num_requests_seen = self._num_blocks_seen = 0

    def check(self, num_tokens: int, *, is_new: bool, ahead: PendingArrivals = NONE_PENDING) -> None:
        """Raise OverloadedError if a request of ``num_tokens`` is above a limit. Reads numbers only, so any thread may
        call it, also while a step runs.

        The watermark does not apply to a migrated request (not ``is_new``), whose client would lose the tokens that it
        has, nor to a request to an idle engine, which accepts whatever fits into its pool.
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
        """After a step, on the engine's thread: count what has ended since the last call."""
        num_requests, num_blocks = self._scheduler.num_ended_requests, self._scheduler.num_ended_blocks
        if num_requests > self._num_requests_seen:
            self._ended_requests.add(num_requests - self._num_requests_seen)
            self._ended_blocks.add(num_blocks - self._num_blocks_seen)
            self._num_requests_seen, self._num_blocks_seen = num_requests, num_blocks

    def reset_rates(self) -> None:
        """The engine was idle. Idle time must not count as slowness."""
        self._ended_requests.restart()
        self._ended_blocks.restart()
