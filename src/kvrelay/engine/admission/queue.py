"""Which waiting request gets blocks next.

It owns the three queues and their rule: a request gets blocks for all its known tokens at once (adjacent where
possible, after its prefix hit), or it waits. ``fair.py`` has the order. It does not know slots or steps.

There is one queue per kind of need. Requests that are computed here also wait for their share of the token budget:
admitting them earlier would bind blocks early, and would miss prefix hits on prompts that are being computed. Only what
is computed before them counts, so a long prompt does not keep short ones out. Requests whose next step is a transfer (a
remote prefill, a KV load) do not wait for the budget. A prompt whose KV another request is loading waits for it, if
that is cheaper than computing.

A request that does not fit into the pool lets smaller ones pass until they have taken as many blocks as it needs. From
then on no request passes it, and the blocks that become free are kept for it.

A remote prefill that finds no room in the pool, or no slot, begins at once if the holding area has room. When its KV
has come, it waits here again until the pool has room, in a third queue: else those whose KV is here, which go before
others, would be all that is tried, and no other prefill would begin.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from kvrelay.core.clock import Clock
from kvrelay.core.status import RequestStatus
from kvrelay.engine.admission.fair import Candidate, FairQueue, Shares
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.holding import Holding
from kvrelay.engine.kv_source import Sources
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engine.scheduled_batch import TokenBudget
from kvrelay.placement.base import Decision, PrefillPlace, Situation
from kvrelay.placement.cost import stay_here

MAX_CANDIDATES = 8
"""The number of requests that are tried in turn; later ones are longer, so they would not fit either."""


class Backlog(NamedTuple):
    """A prompt that is being computed: its tokens still to compute and its arrival number."""

    num_tokens: int
    arrival: int


def _whole_step(num_tokens: int) -> int:
    return 2048


class EngineLoad(NamedTuple):
    """The engine's present load: admitted requests, those of them with a slot, prompts that are being computed.
    ``chunk`` computes the prefill tokens of a step in the middle of a prompt of so many tokens."""

    num_admitted: int
    num_with_slot: int
    backlog: tuple[Backlog, ...] = ()
    token_budget: TokenBudget | None = None
    chunk: Callable[[int], int] = _whole_step
    num_remote_tokens: int = 0
    num_remote_prefills: int = 0
    """Prompt tokens of remote prefills that have not come back, and the number of these prefills."""
    has_slot: bool = True

    def num_tokens_before(self, candidate: Candidate) -> int:
        """Prompt tokens that will be computed before the candidate's: of shorter prompts, or of older ones if due."""
        request = candidate.request
        if candidate.is_due:
            return sum(prompt.num_tokens for prompt in self.backlog if prompt.arrival < request.arrival)
        return sum(prompt.num_tokens for prompt in self.backlog if prompt.num_tokens <= request.num_queued_tokens)


class _Shortage(msgspec.Struct):
    """A request that did not fit, and the number of blocks that others have taken since."""

    request: Request
    num_passed_blocks: int = 0


class _Admissible(NamedTuple):
    """A request that fits, with its prefix hit and the fresh blocks that it needs. ``decision``: its placement.
    ``is_held``: it fits into the holding area only."""

    request: Request
    hit: list[int]
    num_needed: int
    decision: Decision | None
    is_held: bool = False


class AdmissionQueue:
    """The waiting requests of one engine.

    ``max_backlog_tokens``: with that many prompt tokens to compute before it, a request that needs computing is not
    admitted. ``ageing_s``: seconds of waiting that count as much as one priority.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_backlog_tokens: int,
        clock: Clock,
        ageing_s: float = 0.0,
        sources: Sources | None = None,
    ) -> None:
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_waiting = 0
        self.num_waiting_blocks = 0
        """Blocks that the known tokens of all waiting requests need. Prefix hits are not deducted: they may be lost."""
        self.num_waiting_tokens = 0
        """Tokens to compute of all waiting requests, as estimated when they began to wait."""
        self._pool = pool
        self._max_backlog_tokens = max_backlog_tokens
        self._clock = clock
        self._watermark = max(1, pool.num_blocks // 100)
        self.shares = Shares()
        self._here = FairQueue(ageing_s, self.shares)
        self._elsewhere = FairQueue(ageing_s, self.shares)
        self._held = FairQueue(ageing_s, self.shares)
        self._short: _Shortage | None = None
        self._sources = Sources() if sources is None else sources
        """KV beyond the pool."""
        self.holding: Holding | None = None

    def __repr__(self) -> str:
        here, elsewhere, held = map(len, self._queues)
        others = f"{elsewhere} others, {held} with their KV held"
        return f"AdmissionQueue({here} to compute, {others}, {self.num_waiting_blocks} blocks)"

    @property
    def _queues(self) -> tuple[FairQueue, ...]:
        return self._here, self._elsewhere, self._held

    @property
    def is_short_of_blocks(self) -> bool:
        return self._short is not None

    def push(self, request: Request) -> None:
        num_held = max(self.num_held_tokens(request), request.num_load_tokens)
        request.num_queued_tokens = max(len(request.token_ids) - num_held, 1)
        self._queue_of(request).push(request)
        self.num_waiting += 1
        self.num_waiting_tokens += request.num_queued_tokens
        self.num_waiting_blocks += self._pool.blocks_for(len(request.token_ids))

    def discard(self, request: Request) -> None:
        """Remove ``request`` if it waits."""
        self._remove(request, is_admitted=False)

    def cancel_remote_prefills(self) -> None:
        """Requests that wait for a remote prefill will be computed here, unless a prefill worker has them already."""
        for request in self._elsewhere.members():
            if request.mode is PrefillMode.REMOTE and not request.handoff_number:
                self._elsewhere.remove(request)
                request.mode = PrefillMode.LOCAL
                self._here.push(request)
        self._short = None

    def held(self) -> list[Request]:
        """Those whose KV is in the holding area, in the order in which it came."""
        return self._held.members()

    def num_tokens_before(self, num_tokens: int) -> int:
        """Tokens of waiting requests that are not longer than ``num_tokens``."""
        members = (request for queue in self._queues for request in queue.members())
        return sum(request.num_queued_tokens for request in members if request.num_queued_tokens <= num_tokens)

    def may_admit(self, load: EngineLoad) -> bool:
        """Whether ``admit`` would succeed."""
        return self._next(load) is not None

    def admit(self, load: EngineLoad, tenant: str | None = None) -> Request | None:
        """Admit the first request that may start, with its blocks and its prefix hit; None if there is none.
        ``tenant``: only a request of this API key, which passes those of others."""
        found = self._next(load, tenant)
        if found is None:
            return None
        request = found.request
        self._remove(request, is_admitted=True)
        if found.is_held and self.holding is not None:
            self.holding.expect(request)
        else:
            if self._short is not None:
                self._short.num_passed_blocks += len(found.hit) + found.num_needed
            self._give_blocks(request, found.hit, found.num_needed)
        self._count_hit(request)
        placement = request.placement
        if found.decision is not None and placement is not None and placement.policy is not None:
            placement.decision = found.decision
            if found.decision.place is PrefillPlace.REMOTE:
                request.mode = PrefillMode.REMOTE
            placement.policy.placed(found.decision)
        return request

    def num_blocks_wanted(self, load: EngineLoad, tenant: str) -> int | None:
        """Blocks of the key's first request that waits for nothing but blocks or a slot; None: there is none."""
        for request, _ in self._placeable(load, tenant):
            return self._pool.blocks_for(len(request.token_ids))
        return None

    def _next(self, load: EngineLoad, tenant: str | None = None) -> _Admissible | None:
        is_open = load.has_slot
        for request, decision in self._placeable(load, tenant):
            fitting = self._fit(request, load, decision) if is_open else None
            if fitting is None and tenant is None:
                fitting = self._fit_held(request, decision)
            if fitting is not None:
                return fitting
            is_open = is_open and tenant is None and self._may_be_passed(request)
            if not is_open and not self.may_hold:
                return None
        return None

    @property
    def may_hold(self) -> bool:
        """Whether a remote prefill might begin without blocks of the pool."""
        return self.holding is not None and self.holding.blocks.num_free > 0

    def _fit_held(self, request: Request, decision: Decision | None) -> _Admissible | None:
        """A remote prefill may begin without a slot and without blocks of the pool."""
        is_remote = request.mode is PrefillMode.REMOTE or (
            decision is not None and decision.place is PrefillPlace.REMOTE
        )
        if not is_remote or self.holding is None or request.num_handoff_tokens <= 0:
            return None
        num_needed = self._pool.blocks_for(request.num_handoff_tokens)
        return _Admissible(request, [], num_needed, decision, True) if self.holding.has_room(num_needed) else None

    def _placeable(self, load: EngineLoad, tenant: str | None) -> Iterator[tuple[Request, Decision | None]]:
        """The first waiting requests in order of service, without those that wait for their turn to be computed."""
        now_s = self._clock.now()
        queues = [queue.candidates(now_s, MAX_CANDIDATES, tenant) for queue in self._queues if queue]
        in_order = queues[0] if len(queues) == 1 else heapq.merge(*queues, key=lambda candidate: candidate.urgency)
        for candidate in in_order:
            if self._sources.has_pending and self._awaits_kv(candidate.request):
                continue
            decision = self._decide(candidate, load)
            if decision is None and self._is_over_budget(candidate, load):
                continue
            if decision is None or decision.place is not None:
                yield candidate.request, decision

    def _awaits_kv(self, request: Request) -> bool:
        """Whether what follows its prefix hit is on its way, and waiting for that is cheaper than computing it."""
        if request.wants_prompt_logprobs or request.held_block_ids:
            return False
        found = self._sources.find(request, len(self.find_hit(request)))
        return found is not None and found[1].is_pending

    def _is_over_budget(self, candidate: Candidate, load: EngineLoad) -> bool:
        is_computed_here = candidate.request in self._here
        return is_computed_here and load.num_tokens_before(candidate) >= self._max_backlog_tokens

    def _decide(self, candidate: Candidate, load: EngineLoad) -> Decision | None:
        """The request's placement, if it is decided now."""
        request, token_budget, placement = candidate.request, load.token_budget, candidate.request.placement
        if placement is None or placement.policy is None or placement.objectives is None or token_budget is None:
            return None
        is_here_open = not self._is_over_budget(candidate, load)
        if not placement.policy.has_choice:
            return stay_here(is_here_open, request.load_s)
        situation = Situation(
            num_tokens=request.num_queued_tokens,
            num_stored=request.num_stored_tokens,
            load_s=request.load_s,
            num_cached=len(request.token_ids) - request.num_queued_tokens - request.num_stored_tokens,
            waited_s=max(self._clock.now() - request.waiting_since_s, 0.0),
            num_here=load.num_tokens_before(candidate),
            num_remote_tokens=load.num_remote_tokens,
            num_remote_prefills=load.num_remote_prefills,
            num_line=max(self.num_waiting_tokens - request.num_queued_tokens, 0),
            chunk=load.chunk(request.num_queued_tokens),
            num_decodes=token_budget.num_decodes,
            num_context=token_budget.num_context,
            is_here_open=is_here_open,
            cost=token_budget.costs.cost,
            objectives=placement.objectives,
            spread=token_budget.costs.spread,
        )
        return placement.policy.decide(situation)

    def _fit(self, request: Request, load: EngineLoad, decision: Decision | None) -> _Admissible | None:
        hit = self.find_hit(request)
        num_needed = self._pool.blocks_for(len(request.token_ids)) - len(hit)
        num_available = self._pool.num_free - self._pool.num_free_among(hit)
        if num_needed > num_available - self._reserve_for(request, load):
            return None
        return _Admissible(request, hit, num_needed, decision)

    def _may_be_passed(self, request: Request) -> bool:
        """Whether others may go before ``request``, which does not fit. Only the first such request is protected."""
        if self._short is None:
            self._short = _Shortage(request)
        if self._short.request is not request:
            return True
        return self._short.num_passed_blocks < self._pool.blocks_for(len(request.token_ids))

    def _remove(self, request: Request, *, is_admitted: bool) -> None:
        queue = self._queue_of(request)
        if request not in queue:
            return
        queue.remove(request, is_admitted=is_admitted)
        self.num_waiting -= 1
        self.num_waiting_tokens -= request.num_queued_tokens
        self.num_waiting_blocks -= self._pool.blocks_for(len(request.token_ids))
        if self._short is not None and self._short.request is request:
            self._short = None

    def _queue_of(self, request: Request) -> FairQueue:
        if request.status is RequestStatus.KV_HELD:
            return self._held
        by_transfer = request.mode is PrefillMode.REMOTE or request.num_load_tokens > 0
        return self._elsewhere if by_transfer else self._here

    def find_hit(self, request: Request) -> list[int]:
        """The cached blocks that ``request`` begins with; its last token is always left to compute."""
        if not self._pool.enable_prefix_caching or request.wants_prompt_logprobs:
            return []
        request.hash_blocks((len(request.token_ids) - 1) // self._pool.block_size, self._pool.block_size)
        return self._pool.find_prefix(request.packed(), request.sequence_hashes)

    def num_held_tokens(self, request: Request) -> int:
        """Tokens that the request need not compute: all with held KV; else its prefix hit, and what is worth loading
        after that."""
        if request.status is RequestStatus.KV_HELD:
            return request.num_held_tokens
        first = len(self.find_hit(request))
        if not self._sources.beyond or request.wants_prompt_logprobs:
            return first * self._pool.block_size
        num_stored, request.load_s, _, request.stored_media = self._sources.reach(request, first)
        request.num_stored_tokens = num_stored * self._pool.block_size
        return (first + num_stored) * self._pool.block_size

    def _reserve_for(self, request: Request, load: EngineLoad) -> int:
        """Blocks to leave free, against thrashing. A preempted request returns only if every running sequence could
        fill one more block. A request that would run alone needs no reserve."""
        if not load.num_admitted:
            return 0
        return self._watermark + (load.num_with_slot if request.status is RequestStatus.PREEMPTED else 0)

    def _give_blocks(self, request: Request, hit: list[int], num_fresh: int) -> None:
        self._pool.acquire(hit)
        fresh = self._pool.allocate(num_fresh, after=hit[-1] if hit else None)
        assert fresh is not None, "as many blocks were free a moment ago"
        request.block_ids = hit + fresh
        request.num_cached_blocks = len(hit)
        request.num_computed_tokens = len(hit) * self._pool.block_size

    def _count_hit(self, request: Request) -> None:
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            self.num_queried_tokens += len(request.token_ids)
            self.num_hit_tokens += request.num_computed_tokens
