"""Which sequences a step computes, and how many tokens of each: every decode, then prefill chunks under a token budget.

It owns the alternation between exclusive prefills and all other sequences. It changes no request and knows no
blocks, nor who set the objectives.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.core.clock import Clock
from kvrelay.core.step_cost import MIN_CHUNK_TOKENS, StepWork, prefill_pairs
from kvrelay.engine.batch import Batch
from kvrelay.engine.pace import Gaps, gaps_of, pace_of
from kvrelay.engine.request import PrefillMode, Request, service_order
from kvrelay.placement.cost_model import StepCostModel

OLDEST_SHARE = 4
"""A quarter of a step's prefill tokens is for the oldest prompt, so that shorter ones cannot stop it."""


class ScheduledBatch:
    """A step's rows, in order: one token of each decode, then prefill chunks with their numbers of tokens."""

    __slots__ = ("chunks", "decodes", "num_prefill_tokens", "num_tokens")

    def __init__(self, decodes: list[Request], chunks: list[tuple[Request, int]]) -> None:
        self.decodes = decodes
        self.chunks = chunks
        self.num_prefill_tokens = sum([count for _, count in chunks]) if chunks else 0
        self.num_tokens = len(decodes) + self.num_prefill_tokens


class TokenBudget:
    """How many prefill tokens a step of one engine may have, so that running answers keep their objective between
    tokens, as far as the prompts' first tokens allow. ``costs`` learns from every step. Requests without objectives
    have no limit here: the step's token budget alone counts."""

    def __init__(self, clock: Clock) -> None:
        self.costs = StepCostModel()
        self._clock = clock
        self._decodes: list[Request] = []
        self._num_context = 0
        self._gaps = Gaps()

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
        self._gaps = gaps_of(decodes, self._clock.now())

    def decoded(self, seconds: Sequence[float]) -> None:
        """Further steps of the same decodes alone have taken so long: they need not be looked at."""
        count = len(self._decodes)
        self.costs.add_decodes(count, self._num_context + count, seconds)
        self._num_context += count * len(seconds)

    def prefill_budget(self, prefilling: list[Request], max_num_tokens: int, num_before: int = 0) -> int:
        """The prefill tokens of the next step, at most ``max_num_tokens``. ``num_before``: with a prompt of which so
        many tokens have been computed."""
        pace = pace_of(self.costs.cost, self.costs.spread, self._gaps, prefilling, self._clock.now())
        num_before = max([num_before, *(request.num_computed_tokens for request in prefilling)])
        return pace.prefill_budget(
            max_num_tokens, num_before=num_before, num_decodes=len(self._decodes), num_context=self._num_context
        )

    def work_of(self, batch: ScheduledBatch) -> StepWork:
        """What the step computes, for ``costs``. Before its result is taken in."""
        rows = batch.chunks
        pairs = sum([prefill_pairs(count, request.num_computed_tokens) for request, count in rows]) if rows else 0
        num_context = self._num_context if batch.decodes else 0
        return StepWork(batch.num_prefill_tokens, pairs, len(batch.decodes), num_context)


class BatchPlanner:
    """Schedules at most ``max_num_tokens`` tokens of ``batch``, which never has more decodes than that.

    ``exclusive_prefill``: a HANDOFF prefill runs in steps of its own. All other sequences then run in every second
    step, so that requests from before a change of role still end.
    """

    def __init__(self, batch: Batch, max_num_tokens: int, token_budget: TokenBudget | None = None) -> None:
        self.exclusive_prefill = False
        self._batch = batch
        self._max_num_tokens = max_num_tokens
        self._is_others_turn = False
        self._token_budget = token_budget
        self._decodes_alone = ScheduledBatch([], [])
        """The latest batch without a prefill: most steps repeat it."""

    def plan(self) -> ScheduledBatch:
        """Schedule the next step."""
        prefilling = list(self._batch.prefilling)
        is_others_turn, self._is_others_turn = self._is_others_turn, False
        if not self.exclusive_prefill:
            return self._together(prefilling)
        handoffs = [request for request in prefilling if request.mode is PrefillMode.HANDOFF]
        others = [request for request in prefilling if request.mode is not PrefillMode.HANDOFF]
        if not handoffs or is_others_turn:
            return self._together(others)
        self._is_others_turn = bool(others) or self._batch.num_decoding > 0
        # Each key's most urgent hand-off competes; between keys the older one goes first.
        heads: dict[str, Request] = {}
        for request in sorted(handoffs, key=service_order):
            heads.setdefault(request.tenant, request)
        first = min(heads.values(), key=lambda request: request.arrival)
        return ScheduledBatch([], _chunks([first], self._max_num_tokens))

    def _together(self, prefilling: list[Request]) -> ScheduledBatch:
        decodes = self._batch.decode_rows()
        if self._token_budget is not None:
            self._token_budget.look_at(decodes)
        if not prefilling:
            if self._decodes_alone.decodes is not decodes:
                self._decodes_alone = ScheduledBatch(decodes, [])
            return self._decodes_alone
        budget = self._max_num_tokens - len(decodes)
        # No prefill budget is below MIN_CHUNK_TOKENS: short prompts need not know it.
        if self._token_budget is not None and _num_missing(prefilling) > MIN_CHUNK_TOKENS:
            budget = self._token_budget.prefill_budget(prefilling, budget)
        return ScheduledBatch(decodes, _chunks(prefilling, budget))


def _chunks(prefilling: list[Request], budget: int) -> list[tuple[Request, int]]:
    """Split ``budget`` over the prefills: a share for the oldest; then equal shares for the API keys, each for its most
    urgent and shortest prompts first. What a key does not need is for the others."""
    if not prefilling or budget <= 0:
        return []
    if len(prefilling) == 1:
        return [(only, min(budget, only.num_missing_tokens)) for only in prefilling]
    oldest = min(prefilling, key=lambda request: request.arrival)
    counts = {oldest: min(max(budget // OLDEST_SHARE, 1), oldest.num_missing_tokens)}
    budget -= counts[oldest]
    by_key: dict[str, list[Request]] = {}
    for request in sorted(prefilling, key=_chunk_order):
        by_key.setdefault(request.tenant, []).append(request)
    shared = sorted(by_key.values(), key=_num_missing) if len(by_key) > 1 else list(by_key.values())
    for num_before, requests in enumerate(shared):
        share = budget // (len(shared) - num_before)
        budget -= share
        for request in requests:
            given = counts.get(request, 0)
            more = min(share, request.num_missing_tokens - given)
            counts[request] = given + more
            share -= more
        budget += share
    return [(request, counts[request]) for requests in shared for request in requests if counts[request]]


def _num_missing(requests: list[Request]) -> int:
    return sum([request.num_missing_tokens for request in requests])


def _chunk_order(request: Request) -> tuple[int, bool, int, int]:
    return (request.priority, not request.is_begun, request.num_missing_tokens, request.arrival)
