"""Where a request's prefill and its decode run, by one decision over both halves (orders auto and prefill-first).

    the decode worker that would serve it alone ──> which way? ──local, queue──> it, alone
                                            └──pair──> the pair with the lowest cost (``placement/pair_cost.py``)

With published costs of both halves ``placement/ways.py`` answers, else ``placement/threshold.py`` does; with auto and
without costs the decode worker decides. Under a routing policy that knows no costs (round-robin, random, ...) each half
of a pair is chosen by that policy. Two routers, one per half, own the load; what is placed here counts there.
"""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from kvrelay.core.handoff import OrderPolicy
from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import WorkerUnavailableError
from kvrelay.placement.base import Objectives, PrefillLoad, PrefillPlace
from kvrelay.placement.cost import objectives_of
from kvrelay.placement.pair_cost import FloatMatrix, PairCosts, pair_costs, pair_seconds
from kvrelay.placement.seconds import BoolColumn, CostColumns, FloatColumn
from kvrelay.placement.threshold import DisaggPolicy
from kvrelay.placement.trials import WorkerTrials
from kvrelay.placement.ways import Way, Ways, is_surely_local, ways_of
from kvrelay.router.base import RoutingDecision, RoutingRequest, Survey
from kvrelay.router.beyond import Lender
from kvrelay.router.costs import pair_token_seconds
from kvrelay.router.policies import pick_best
from kvrelay.router.router import Router


class PairCandidate(msgspec.Struct, frozen=True):
    """One pair's numbers in a decision, in the unit of the PairDecision."""

    prefill_worker_id: str
    decode_worker_id: str
    cost: float
    prefill_cost: float
    decode_cost: float
    transfer_cost: float
    is_transfer_measured: bool = False


class PairDecision(msgspec.Struct, frozen=True):
    """``place`` says why there is a prefill worker, or none. ``ways``: the estimates, if they decided. ``candidates``:
    the cheapest pairs first; only for an explanation, and only under a policy with costs. ``unit`` of their costs:
    ``s``, or ``tokens`` of prefill."""

    place: PrefillPlace
    decode: RoutingDecision
    prefill: RoutingDecision | None = None
    candidates: tuple[PairCandidate, ...] = ()
    unit: str = "tokens"
    ways: Ways | None = None


class _Choice(NamedTuple):
    """The cheapest pair, by its rows, and which way the request goes; None: to the pair."""

    pair: tuple[int, int]
    ways: Ways | None


MAX_EXPLAINED = 32
SAMPLE_LAG_S = 0.1
"""So old a sample may be when it comes: at most 20 a second are sent, and none during a step. What was less work then
is done, as far as anyone knows."""
MIN_TOKEN_S = 1e-12
"""A fit may say that a token takes no time."""
_PLACE_OF = {Way.LOCAL: PrefillPlace.LOCAL_CHEAPER, Way.PAIR: PrefillPlace.REMOTE, Way.QUEUE: PrefillPlace.QUEUE}


class _Queued:
    """Prompts that this frontend expects in the prefill queue, until their first tokens: their ``tokens`` by decode
    worker."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self.total = 0
        self._requests: dict[str, tuple[str, int]] = {}

    def add(self, request_id: str, worker_id: str, num_tokens: int) -> None:
        self.remove(request_id)
        self._requests[request_id] = (worker_id, num_tokens)
        self._count(worker_id, num_tokens)

    def remove(self, request_id: str) -> None:
        worker_id, num_tokens = self._requests.pop(request_id, ("", 0))
        if num_tokens:
            self._count(worker_id, -num_tokens)

    def _count(self, worker_id: str, num_tokens: int) -> None:
        self.tokens[worker_id] += num_tokens
        self.total += num_tokens
        if not self.tokens[worker_id]:
            del self.tokens[worker_id]


class PairRouter:
    """``decodes`` routes requests to workers that decode, ``prefills`` to those that only prefill."""

    def __init__(self, decodes: Router, prefills: Router, disagg: DisaggPolicy) -> None:
        self.decodes = decodes
        self.prefills = prefills
        self._disagg = disagg
        self._rng = random.Random(decodes.config.router_seed)
        self._queued = _Queued()
        self._trials = WorkerTrials(decodes.clock)
        self.places: Counter[PrefillPlace] = Counter()
        """Decisions since start: where the prefill runs, and why."""

    def __repr__(self) -> str:
        return f"PairRouter({self.decodes!r}, {self.prefills!r})"

    def choose(
        self, request: RoutingRequest, order: OrderPolicy = OrderPolicy.PREFILL_FIRST, *, must_be_local: bool
    ) -> PairDecision:
        """Decide, and count the request as placed on the worker or the pair. Raises WorkerUnavailableError."""
        survey = self.decodes.survey(request)
        alone = self.decodes.pick(survey)
        decision, halves = self._decide(request, survey, alone, order, must_be_local, self._rng)
        self.places[decision.place] += 1
        if decision.ways is not None and decision.place is not PrefillPlace.QUEUE:
            placed = decision.decode if decision.prefill is None else decision.prefill
            self._trials.taken(placed.worker_id, is_trial=decision.ways.is_trial)
        if halves is None:
            self.decodes.place(request, decision.decode, survey)
            if decision.place is PrefillPlace.QUEUE:
                num_held = decision.decode.overlap_blocks * self.decodes.block_size
                self._queued.add(request.request_id, decision.decode.worker_id, len(request.token_ids) - num_held)
        elif decision.prefill is not None:
            self.decodes.place(request, decision.decode, survey, prefills=False)
            self.prefills.place(request, decision.prefill, halves)
        return decision

    def explain(self, request: RoutingRequest, order: OrderPolicy = OrderPolicy.PREFILL_FIRST) -> PairDecision:
        """The decision and the pairs that were compared, without placing anything. Raises WorkerUnavailableError."""
        survey = self.decodes.survey(request)
        alone = self.decodes.explain(request)
        rng = copy.copy(self._rng)
        decision, halves = self._decide(request, survey, alone, order, False, rng, explains=True)
        if halves is None:
            return decision
        costs = self._costs(halves, survey)
        if costs is None:
            return decision
        return msgspec.structs.replace(decision, candidates=_candidates(costs, halves, survey), unit=costs.unit)

    def first_token(self, request_id: str) -> None:
        """The prompt is computed, wherever."""
        self.decodes.first_token(request_id)
        self._queued.remove(request_id)

    def prefilled(self, request_id: str) -> None:
        """The prefill half of a pair has ended, or a request has left its worker, for any reason."""
        self.prefills.finished(request_id, 0)
        self._queued.remove(request_id)

    def _decide(
        self,
        request: RoutingRequest,
        survey: Survey,
        alone: RoutingDecision,
        order: OrderPolicy,
        must_be_local: bool,
        rng: random.Random,
        *,
        explains: bool = False,
    ) -> tuple[PairDecision, Survey | None]:
        """``alone``: the decision without a prefill worker. The survey of the prefill half comes with a pair."""
        is_auto, is_by_cost = order is OrderPolicy.AUTO, self._disagg.is_by_cost and not must_be_local
        here = self._here(request, survey, alone)
        if is_auto and is_by_cost and not explains and is_surely_local(survey.candidates, *here):
            return PairDecision(PrefillPlace.LOCAL_CHEAPER, alone), None
        alone = _plain(alone)
        place = self._disagg.decide(
            prompt_length=len(request.token_ids),
            num_cached_tokens=alone.overlap_blocks * self.decodes.block_size,
            prefill_load=PrefillLoad(len(self.prefills.worker_ids), self.prefills.num_pending),
            must_be_local=must_be_local,
        )
        is_remote = place is PrefillPlace.REMOTE
        if not is_remote and not (is_by_cost and self.prefills.worker_ids):
            return PairDecision(place, alone), None
        try:
            halves = self._survey_prefills(request, survey)
        except WorkerUnavailableError:
            return PairDecision(PrefillPlace.LOCAL_NO_PREFILL_WORKER, alone), None
        costs = self._costs(halves, survey)
        if (is_auto or not is_remote) and (costs is None or costs.unit != "s"):
            return PairDecision(PrefillPlace.UNDECIDED if is_auto else place, alone), None
        if costs is None:
            prefill = self.prefills.explain(request) if explains else self.prefills.pick(halves)
            both = halves.workers[prefill.worker_id], survey.workers[alone.worker_id]
            if not _can_exchange(*both, self.decodes.avoided):
                return PairDecision(PrefillPlace.LOCAL_NO_PREFILL_WORKER, alone), None
            return PairDecision(place, alone, _plain(prefill)), halves
        if not np.isfinite(costs.total).any():
            return PairDecision(PrefillPlace.LOCAL_NO_PREFILL_WORKER, alone), None
        choose = partial(self._way, rng=rng, here=here, is_local_open=is_by_cost, is_queue_open=is_auto)
        choice = choose(halves, survey, costs)
        if is_by_cost and not explains:
            choice = self._tried(choice, halves, survey, here[0], choose)
        ways = choice.ways
        if ways is not None:
            place = _PLACE_OF[ways.best]
        if place is not PrefillPlace.REMOTE:
            return PairDecision(place, alone, ways=ways), None
        pair = self.decodes.decision(survey, choice.pair[1]), self.prefills.decision(halves, choice.pair[0])
        return PairDecision(place, *pair, ways=ways), halves

    def _way(
        self,
        halves: Survey,
        survey: Survey,
        costs: PairCosts,
        *,
        rng: random.Random,
        here: tuple[int, float, Objectives],
        is_local_open: bool,
        is_queue_open: bool,
    ) -> _Choice:
        total = costs.total
        pair = divmod(pick_best(-total.ravel(), rng), total.shape[1])
        if not (is_local_open or is_queue_open):
            return _Choice(pair, None)
        numbers = halves.candidates, survey.candidates, costs, pair
        return _Choice(pair, ways_of(*numbers, *here, is_local_open=is_local_open, is_queue_open=is_queue_open))

    def _tried(
        self, usual: _Choice, halves: Survey, survey: Survey, alone: int, choose: Callable[..., _Choice]
    ) -> _Choice:
        """``usual``; or what would pay if workers that have computed no prompt for a while were as fast as the fastest.
        So their costs are measured again. Where a prompt waits, they are measured anyway."""
        prefill, decode = halves.candidates, survey.candidates
        ways = usual.ways
        if ways is None or prefill.costs is None or decode.costs is None:
            return usual
        if ways.best is Way.QUEUE or (ways.best is Way.LOCAL and ways.queue is not None):
            return usual  # the decode worker decides, and tries
        doubts = self._trials.in_doubt([*halves.worker_ids, *survey.worker_ids])
        if doubts is None:
            return usual
        there, here = np.split(doubts, [len(halves.worker_ids)])
        there &= prefill.load.prefill_tokens == 0.0
        here &= decode.load.prefill_tokens == 0.0
        if ways.best is Way.PAIR:
            there[usual.pair[0]] = False
        else:
            here[:] = False
        hoped = (
            _with_costs(halves, prefill.costs.hoped(there, decode.costs)),
            _with_costs(survey, decode.costs.hoped(here, prefill.costs)),
        )
        costs = self._costs(*hoped, doubted=there)
        found = usual if costs is None else choose(*hoped, costs)
        if found.ways is None or found.ways.best is Way.QUEUE:
            return usual
        if not (there[found.pair[0]] if found.ways.best is Way.PAIR else here[alone]):
            return usual
        return found._replace(ways=msgspec.structs.replace(ways, best=found.ways.best, is_trial=True))

    def _here(self, request: RoutingRequest, survey: Survey, alone: RoutingDecision) -> tuple[int, float, Objectives]:
        """The row of the decode worker without a pair, the tokens that wait to be computed there, and the request's
        objectives."""
        row = survey.worker_ids.index(alone.worker_id)
        num_here = float(survey.candidates.load.prefill_tokens[row]) - self._queued.tokens[alone.worker_id]
        return row, num_here, objectives_of(self._disagg.config, request.slo_ttft_ms, request.slo_itl_ms)

    def _survey_prefills(self, request: RoutingRequest, survey: Survey) -> Survey:
        """They may read what the decode worker with the longest hit holds. With what waits at each besides this
        frontend's pairs: its share of the queue, or what others have sent, as published and less what it has computed
        since. Raises WorkerUnavailableError."""
        at = int(survey.candidates.overlap_blocks.argmax())
        num_held = int(survey.candidates.overlap_blocks[at])
        held = [Lender(survey.infos[at], num_held)] if num_held else []
        halves = self.prefills.survey(request, lenders=(*held, *self.decodes.leaving(survey.sequence)))
        load, costs = halves.candidates.load, halves.candidates.costs
        if costs is None:
            return halves
        left_s = load.others_prefill_tokens * costs.prefill_token_s - self.prefills.sample_ages_s - SAMPLE_LAG_S
        left = np.maximum(left_s, 0.0) / np.maximum(costs.prefill_token_s, MIN_TOKEN_S)
        beside = np.maximum(left, self._queued.total / len(halves.worker_ids))
        load = msgspec.structs.replace(load, prefill_tokens=load.prefill_tokens + beside, others_prefill_tokens=beside)
        return msgspec.structs.replace(halves, candidates=msgspec.structs.replace(halves.candidates, load=load))

    def _costs(self, halves: Survey, survey: Survey, doubted: BoolColumn | None = None) -> PairCosts | None:
        """None under a policy without costs. ``doubted``: transfers from these prefill workers count as unmeasured."""
        if self.decodes.config.router not in ("kv", "kv-weights"):
            return None
        pairs, avoided = [[(p, d) for d in survey.infos] for p in halves.infos], self.decodes.avoided
        numbers = (
            halves.candidates,
            survey.candidates,
            _free_tokens(survey),
            np.array([[p.host == d.host for p, d in row] for row in pairs], dtype=np.bool_),
            np.array([[_can_exchange(p, d, avoided) for p, d in row] for row in pairs], dtype=np.bool_),
        )
        costs = (
            pair_seconds(*numbers, self._transfer_seconds(halves, survey, doubted))
            if self.decodes.config.router == "kv"
            else None
        )
        if costs is None:
            costs = pair_costs(*numbers, self.decodes.config.decode_weight)
        costs.prefill[~np.isfinite(halves.scores)] = math.inf
        costs.decode[~np.isfinite(survey.scores)] = math.inf
        return costs

    def _transfer_seconds(self, halves: Survey, survey: Survey, doubted: BoolColumn | None) -> FloatMatrix:
        """Of a token, for each pair, as far as it has been measured; NaN otherwise."""
        times = self.prefills.transfer_times, self.decodes.transfer_times
        known = pair_token_seconds(halves.worker_ids, survey.worker_ids, *times)
        return known if doubted is None else np.where(doubted[:, None], np.nan, known)


def _with_costs(survey: Survey, costs: CostColumns) -> Survey:
    return msgspec.structs.replace(survey, candidates=msgspec.structs.replace(survey.candidates, costs=costs))


def _plain(decision: RoutingDecision) -> RoutingDecision:
    """Without an explanation."""
    fields = {name: getattr(decision, name) for name in RoutingDecision.__struct_fields__}
    return RoutingDecision(**fields)


def _can_exchange(prefill: WorkerInfo, decode: WorkerInfo, avoided: Mapping[str, Collection[str]]) -> bool:
    """``avoided``: by decode worker, the prefill workers whose KV it declines."""
    return (
        prefill.worker_id != decode.worker_id
        and prefill.kv_compatibility == decode.kv_compatibility
        and prefill.worker_id not in avoided.get(decode.worker_id, ())
    )


def _free_tokens(survey: Survey) -> FloatColumn:
    """Room in each KV pool, by the load that counts placements as well."""
    total = np.array([info.num_blocks * info.block_size for info in survey.infos], dtype=np.float64)
    free: FloatColumn = np.maximum(total - survey.candidates.load.context_tokens, 0.0)
    return free


def _candidates(costs: PairCosts, halves: Survey, survey: Survey) -> tuple[PairCandidate, ...]:
    total = costs.total
    order = np.argsort(total, axis=None, kind="stable")[:MAX_EXPLAINED]
    places = [divmod(int(at), total.shape[1]) for at in order]
    return tuple(
        PairCandidate(
            halves.worker_ids[row],
            survey.worker_ids[column],
            float(total[row, column]),
            float(costs.prefill[row]),
            float(costs.decode[column]),
            float(costs.transfer[row, column]),
            costs.is_measured is not None and bool(costs.is_measured[row, column]),
        )
        for row, column in places
        if np.isfinite(total[row, column])
    )
