"""Where a prompt is computed that the backend has not been given yet: at the backend, or at a prefill worker. Pure.

It is decided when the prompt would be given to the backend. One for which neither way is open waits here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice

from kvrelay.core.clock import Clock
from kvrelay.core.step_cost import StepCost
from kvrelay.engine.admission.queue import MAX_CANDIDATES
from kvrelay.engine.limits import require_in_time
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engine.scheduler import RemotePrefills
from kvrelay.engines.hosted.costs import HostedCosts
from kvrelay.placement.base import Decision, PrefillPlace, Situation
from kvrelay.placement.cost import CostPlacement, stay_here

UNKNOWN_COST = StepCost(math.nan)
"""Not sound, so that thresholds decide."""


class Placing:
    """``begin`` is called with each request that is placed, in its mode. ``max_num_batched_tokens``: of a step."""

    def __init__(
        self, costs: HostedCosts, clock: Clock, max_num_batched_tokens: int, begin: Callable[[Request, Decision], None]
    ) -> None:
        self.sent = RemotePrefills(clock)
        self._costs = costs
        self._clock = clock
        self._max_num_batched_tokens = max_num_batched_tokens
        self._begin = begin
        self._waiting: dict[str, Request] = {}
        """In order of arrival."""

    def num_waiting_tokens(self) -> int:
        """Of the prompts that wait for a way. From any thread."""
        return sum(request.num_queued_tokens for request in list(self._waiting.values()))

    def place(self, request: Request) -> None:
        """Begin it when a way is open, perhaps now."""
        self._waiting[request.request_id] = request
        self.serve()

    def forget(self, request: Request) -> None:
        """The request is over. Unknown ones are ignored."""
        self._waiting.pop(request.request_id, None)
        self.sent.forget(request)

    def serve(self) -> None:
        """Begin the first requests for which a way is open, until there are none."""
        while any([self._place_now(request) for request in list(islice(self._waiting.values(), MAX_CANDIDATES))]):
            pass

    def require_in_time(self, request: Request) -> None:
        """Raise ObjectiveMissedError if even the fastest way is too late for the first token of a request that wants to
        be refused then."""
        placement, cost, objectives = request.placement, self._costs.cost, request.objectives
        if placement is None or not placement.refuses_late or cost is None or objectives is None:
            return
        before = self._costs.answers.num_prefill_tokens + self.num_waiting_tokens()
        require_in_time(objectives, cost, placement.policy, request.num_queued_tokens, before)

    def _place_now(self, request: Request) -> bool:
        placement = request.placement
        assert placement is not None
        assert placement.policy is not None, "else it is placed already"
        decision = self._decide(request, placement.policy)
        if decision.place is None or self._waiting.pop(request.request_id, None) is None:
            return False
        placement.decision = decision
        placement.policy.placed(decision)
        if decision.place is PrefillPlace.REMOTE:
            request.mode = PrefillMode.REMOTE
            self.sent.send(request)
        self._begin(request, decision)
        return True

    def _decide(self, request: Request, policy: CostPlacement) -> Decision:
        """The backend takes any number of prompts, so the way here is always open."""
        if not policy.has_choice or request.objectives is None:
            return stay_here(is_here_open=True)
        answers, num_tokens = self._costs.answers, request.num_queued_tokens
        decodes, context = answers.num_decodes, answers.num_context
        most = max(self._max_num_batched_tokens - decodes, 1)
        situation = Situation(
            num_tokens=num_tokens,
            waited_s=max(self._clock.now() - request.waiting_since_s, 0.0),
            num_here=answers.num_prefill_tokens,
            num_remote_tokens=self.sent.num_tokens,
            num_remote_prefills=len(self.sent),
            num_line=max(self.num_waiting_tokens() - num_tokens, 0),
            chunk=self._costs.pace().prefill_budget(
                most, num_before=num_tokens // 2, num_decodes=decodes, num_context=context
            ),
            num_decodes=decodes,
            num_context=context,
            is_here_open=True,
            cost=self._costs.cost or UNKNOWN_COST,
            objectives=request.objectives,
            spread=self._costs.model.spread,
        )
        return policy.decide(situation)
