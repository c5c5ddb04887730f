"""The two bounds above which an engine refuses a request: the length of its queue, and demand for its KV pool.

``max_num_waiting`` counts requests. The KV watermark counts their blocks: a few long prompts can occupy a pool for
minutes, and a request that comes after them is better off on another worker, or with a client that retries later. This
module does not decide which waiting request gets blocks next (``admission/queue.py``).
"""

from __future__ import annotations

import math

import msgspec

from kvrelay.config import EngineConfig
from kvrelay.core.clock import Clock
from kvrelay.core.completion_rate import MIN_RETRY_AFTER_S, CompletionRate
from kvrelay.core.step_cost import StepCost, StepWork
from kvrelay.engine.request import Request
from kvrelay.engine.scheduler import Scheduler
from kvrelay.errors import KvDemandError, ObjectiveMissedError, OverloadedError
from kvrelay.placement.base import Objectives
from kvrelay.placement.cost import CostPlacement

EXPECTED_OUTPUT = 128
"""Tokens of an answer, before any has ended."""


class PendingArrivals(msgspec.Struct, frozen=True):
    """Requests that were posted to the engine before the one in question and not yet received, and their tokens."""

    num_requests: int = 0
    num_tokens: int = 0


NONE_PENDING = PendingArrivals()


def require_in_time(
    objectives: Objectives, cost: StepCost, policy: CostPlacement | None, own: int, before: int
) -> None:
    """Raise ObjectiveMissedError if the first token of ``own`` tokens, after ``before`` others, is late at best."""
    if policy is not None:
        soonest_s = policy.soonest_s(own, before, cost)
    else:
        soonest_s = cost.prefill_seconds(before + own) if cost.is_sound else 0.0
    late_s = soonest_s - objectives.ttft_s
    if late_s > 0.0:
        raise ObjectiveMissedError(
            f"the first token would come after {soonest_s:.2f} s at best; the objective is {objectives.ttft_s:g} s",
            retry_after_s=max(late_s, MIN_RETRY_AFTER_S),
            spacing_s=soonest_s * own / (before + own),
        )


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

    def check(self, num_tokens: int, *, is_new: bool, tenant: str = "", ahead: PendingArrivals = NONE_PENDING) -> None:
        """Raise OverloadedError if a request of ``num_tokens`` is above a limit. Reads numbers only, so any thread may
        call it, also while a step runs.

        The watermark does not apply to a migrated request (not ``is_new``), whose client would lose the tokens that it
        has, nor to a request to an idle engine, which accepts whatever fits into its pool.

        No API key keeps another one out: above the length of the queue a key may have its equal share of it, and above
        the watermark one request.
        """
        scheduler, pool, shares = self._scheduler, self._scheduler.pool, self._scheduler.admission.shares
        num_waiting = scheduler.num_waiting + ahead.num_requests
        num_too_many = num_waiting + 1 - self._max_num_waiting - scheduler.num_places
        if num_too_many > 0 and not shares.may_exceed(tenant, self._max_num_waiting):
            raise OverloadedError(
                f"{num_waiting} requests are waiting already",
                retry_after_s=self._ended_requests.retry_after_s(num_too_many),
                spacing_s=self._ended_requests.spacing_s(1) or self._expected_spacing_s(num_waiting),
            )
        if not is_new or not (scheduler.requests or ahead.num_requests):
            return
        num_demanded = scheduler.num_demanded_blocks + pool.blocks_for(ahead.num_tokens)
        num_needed = pool.blocks_for(num_tokens)
        excess = num_demanded + num_needed - self._max_blocks
        if excess > 0 and not shares.is_newcomer(tenant):
            raise KvDemandError(
                f"requests hold or wait for {num_demanded} KV blocks; with the {num_needed} of this one that is above "
                f"the watermark of {self._max_blocks:g}",
                retry_after_s=self._ended_blocks.retry_after_s(excess),
                spacing_s=self._ended_blocks.spacing_s(num_needed) or self._expected_spacing_s(num_waiting),
            )

    def check_objective(self, request: Request) -> None:
        """Raise ObjectiveMissedError if even the fastest way is too late for the request's first token. On the engine's
        thread, before the request is added.

        Prompts that are not longer are computed before it: those that wait, and those that are being computed.
        """
        placement, objectives = request.placement, request.objectives
        if placement is None or objectives is None:
            return
        admission, cost = self._scheduler.admission, self._scheduler.token_budget.costs.cost
        num_held = len(admission.find_hit(request)) * self._scheduler.pool.block_size
        own = max(len(request.token_ids) - num_held, 1)
        before = admission.num_tokens_before(own) + self._scheduler.num_prefilling_tokens_before(own)
        require_in_time(objectives, cost, placement.policy, own, before)

    def _expected_spacing_s(self, num_waiting: int) -> float:
        """Before the first completion: seconds per request, by the cost of what waits."""
        cost, scheduler = self._scheduler.token_budget.costs.cost, self._scheduler
        if num_waiting <= 0 or not cost.is_sound:
            return 0.0
        prefill_s = cost.prefill_seconds(scheduler.admission.num_waiting_tokens) / num_waiting
        num_rows = scheduler.max_num_running
        return prefill_s + EXPECTED_OUTPUT * cost.token_seconds(StepWork(0, 0, num_rows, 0)) / num_rows

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
