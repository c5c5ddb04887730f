"""How many prefill tokens a step may have, so that running answers keep their objective between tokens.

It owns what a step costs and what the batch needs. It does not know who set the objectives. Requests without objectives
set no pace: their worker's token budget alone bounds a step, as ever.
"""

from __future__ import annotations

import math

from kvrelay.core.step_cost import StepWork
from kvrelay.engine.request import Request
from kvrelay.engine.scheduled_batch import ScheduledBatch
from kvrelay.placement.cost_model import StepCostModel

STEP_SHARE = 0.7
"""Share of the objective between tokens that a step may take; the rest is for the way to the client."""
MARGIN = 2.0
"""Standard deviations of a step's time below the objective: of a normal distribution 98 % lie below it."""
ARRIVAL_SHARE = 0.25
"""Share of the objective for the first token: a request that arrives waits for the step that runs."""
MIN_STEP_FACTOR = 2.0
"""If an objective is below the decode step itself, prefills may at most double the step."""


class Pace:
    """The pace of one engine. ``costs`` learns from every step."""

    def __init__(self) -> None:
        self.costs = StepCostModel()
        self._decodes: list[Request] = []
        self._num_context = 0
        self._itl_s = 0.0

    @property
    def num_decodes(self) -> int:
        """Of the last step that was looked at."""
        return len(self._decodes)

    @property
    def num_context(self) -> int:
        return self._num_context

    def look_at(self, decodes: list[Request]) -> None:
        """The decodes of the step to be planned: a list that stays the same object while they do."""
        if decodes is self._decodes:
            self._num_context += len(decodes)
            return
        self._decodes = decodes
        self._num_context = sum(len(request.token_ids) for request in decodes)
        limits = [request.objectives.itl_s for request in decodes if request.objectives is not None]
        self._itl_s = min(limits, default=0.0)

    def prefill_budget(self, prefilling: list[Request], max_num_tokens: int, num_before: int = 0) -> int:
        """The prefill tokens of the next step, at most ``max_num_tokens``. ``num_before``: with a prompt of which so
        many tokens have been computed."""
        cost = self.costs.cost
        limit_s = self._limit_s(prefilling)
        if not limit_s or not cost.is_sound:
            return max_num_tokens
        decodes, context = len(self._decodes), self._num_context
        limit_s = max(limit_s, MIN_STEP_FACTOR * cost.step_seconds(StepWork(0, 0, decodes, context)))
        num_before = max([num_before, *(request.num_computed_tokens for request in prefilling)])
        chunk = cost.chunk_within(limit_s, num_before=num_before, num_decodes=decodes, num_context=context)
        return min(chunk, max_num_tokens)

    def _limit_s(self, prefilling: list[Request]) -> float:
        """Seconds that the step may take; 0: any time."""
        if self._itl_s:
            # The objective is one of the slowest tokens, so the step has to keep it although its time scatters.
            return min(STEP_SHARE, math.exp(-MARGIN * self.costs.spread)) * self._itl_s
        limits = [request.objectives.ttft_s for request in prefilling if request.objectives is not None]
        return ARRIVAL_SHARE * min(limits, default=0.0)

    def work_of(self, batch: ScheduledBatch) -> StepWork:
        """What the step computes, for ``costs``. Before its result is taken in."""
        pairs = sum(count * request.num_computed_tokens for request, count in batch.chunks)
        num_context = self._num_context if batch.decodes else 0
        return StepWork(batch.num_prefill_tokens, pairs, len(batch.decodes), num_context)
