"""Prefill-first: where a request's prefill and its decode run, by one decision over both halves.

    the decode worker that would serve it alone ──> local or remote? ──local──> it, alone
                                            └──remote──> the pair with the lowest cost (``placement/pair_cost.py``)

By cost, with published costs of both halves, ``placement/cost.py`` answers as in decode-first, for the best pair; else
``placement/threshold.py`` does. Under a routing policy that knows no costs (round-robin, random, ...) each half is
chosen by that policy. It owns no load: two routers do, one per half, and what is placed here counts there.
"""

from __future__ import annotations

import copy
import math
import random
from collections import Counter

import msgspec
import numpy as np

from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import WorkerUnavailableError
from kvrelay.placement.base import PrefillLoad, PrefillPlace
from kvrelay.placement.cost import objectives_of
from kvrelay.placement.pair_cost import FloatMatrix, PairCosts, pair_costs, pair_seconds, place_pair
from kvrelay.placement.seconds import FloatColumn
from kvrelay.placement.threshold import DisaggPolicy
from kvrelay.router.base import RoutingDecision, RoutingRequest, Survey
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
    """``place`` says why there is a prefill worker, or none. ``candidates``: the cheapest pairs first; only for an
    explanation, and only under a policy with costs. ``unit`` of their costs: ``s``, or ``tokens`` of prefill."""

    place: PrefillPlace
    decode: RoutingDecision
    prefill: RoutingDecision | None = None
    candidates: tuple[PairCandidate, ...] = ()
    unit: str = "tokens"


MAX_EXPLAINED = 32


class PairRouter:
    """``decodes`` routes requests to workers that decode, ``prefills`` to those that only prefill."""

    def __init__(self, decodes: Router, prefills: Router, disagg: DisaggPolicy) -> None:
        self.decodes = decodes
        self.prefills = prefills
        self._disagg = disagg
        self._rng = random.Random(decodes.config.router_seed)
        self.places: Counter[PrefillPlace] = Counter()
        """Decisions since start: where the prefill runs, and why."""

    def __repr__(self) -> str:
        return f"PairRouter({self.decodes!r}, {self.prefills!r})"

    def choose(self, request: RoutingRequest, *, must_be_local: bool) -> PairDecision:
        """Decide, and count the request as placed on the worker or the pair. Raises WorkerUnavailableError."""
        survey = self.decodes.survey(request)
        decision, halves = self._decide(request, survey, self.decodes.pick(survey), must_be_local, self._rng)
        self.places[decision.place] += 1
        if halves is None:
            self.decodes.place(request, decision.decode, survey)
        elif decision.prefill is not None:
            self.decodes.place(request, decision.decode, survey, prefills=False)
            self.prefills.place(request, decision.prefill, halves)
        return decision

    def explain(self, request: RoutingRequest, *, must_be_local: bool = False) -> PairDecision:
        """The decision and the pairs that were compared, without placing anything. Raises WorkerUnavailableError."""
        survey = self.decodes.survey(request)
        alone = self.decodes.explain(request)
        decision, halves = self._decide(request, survey, alone, must_be_local, copy.copy(self._rng), explains=True)
        if halves is None:
            return decision
        costs = self._costs(halves, survey)
        if costs is None:
            return decision
        return msgspec.structs.replace(decision, candidates=_candidates(costs, halves, survey), unit=costs.unit)

    def prefilled(self, request_id: str) -> None:
        """The prefill half of a pair has ended, for any reason."""
        self.prefills.finished(request_id, 0)

    def _decide(
        self,
        request: RoutingRequest,
        survey: Survey,
        alone: RoutingDecision,
        must_be_local: bool,
        rng: random.Random,
        *,
        explains: bool = False,
    ) -> tuple[PairDecision, Survey | None]:
        """``alone``: the decision without a prefill worker. The survey of the prefill half comes with a pair."""
        alone = _plain(alone)
        place = self._disagg.decide(
            prompt_length=len(request.token_ids),
            num_cached_tokens=alone.overlap_blocks * self.decodes.block_size,
            prefill_load=PrefillLoad(len(self.prefills.worker_ids), self.prefills.num_pending),
            must_be_local=must_be_local,
        )
        is_by_cost = self._disagg.is_by_cost and not must_be_local
        if place is not PrefillPlace.REMOTE and not (is_by_cost and self.prefills.worker_ids):
            return PairDecision(place, alone), None
        try:
            halves = self.prefills.survey(request)
        except WorkerUnavailableError:
            return PairDecision(PrefillPlace.LOCAL_NO_PREFILL_WORKER, alone), None
        costs = self._costs(halves, survey)
        if place is not PrefillPlace.REMOTE and (costs is None or costs.unit != "s"):
            return PairDecision(place, alone), None
        if costs is None:
            prefill = self.prefills.explain(request) if explains else self.prefills.pick(halves)
            at = survey.worker_ids.index(alone.worker_id)
            if not _can_exchange(halves.infos[halves.worker_ids.index(prefill.worker_id)], survey.infos[at]):
                return PairDecision(PrefillPlace.LOCAL_NO_PREFILL_WORKER, alone), None
            return PairDecision(place, alone, _plain(prefill)), halves
        total = costs.total
        if not np.isfinite(total).any():
            return PairDecision(PrefillPlace.LOCAL_NO_PREFILL_WORKER, alone), None
        row, column = divmod(pick_best(-total.ravel(), rng), total.shape[1])
        if is_by_cost:
            at, objectives = survey.worker_ids.index(alone.worker_id), objectives_of(self._disagg.config)
            by_cost = place_pair(halves.candidates, survey.candidates, costs, (row, column), at, objectives)
            place = place if by_cost is None or by_cost.place is None else by_cost.place
            if place is not PrefillPlace.REMOTE:
                return PairDecision(place, alone), None
        return PairDecision(place, self.decodes.decision(survey, column), self.prefills.decision(halves, row)), halves

    def _costs(self, halves: Survey, survey: Survey) -> PairCosts | None:
        """None under a policy without costs."""
        if self.decodes.config.router not in ("kv", "kv-weights"):
            return None
        pairs = [[(p, d) for d in survey.infos] for p in halves.infos]
        numbers = (
            halves.candidates,
            survey.candidates,
            _free_tokens(survey),
            np.array([[p.host == d.host for p, d in row] for row in pairs], dtype=np.bool_),
            np.array([[_can_exchange(p, d) for p, d in row] for row in pairs], dtype=np.bool_),
        )
        costs = (
            pair_seconds(*numbers, self._transfer_seconds(halves, survey))
            if self.decodes.config.router == "kv"
            else None
        )
        if costs is None:
            costs = pair_costs(*numbers, self.decodes.config.decode_weight)
        costs.prefill[~np.isfinite(halves.scores)] = math.inf
        costs.decode[~np.isfinite(survey.scores)] = math.inf
        return costs

    def _transfer_seconds(self, halves: Survey, survey: Survey) -> FloatMatrix:
        """Of a token, for each pair, as far as it has been measured."""
        times = self.prefills.transfer_times, self.decodes.transfer_times
        return pair_token_seconds(halves.worker_ids, survey.worker_ids, *times)


def _plain(decision: RoutingDecision) -> RoutingDecision:
    """Without an explanation."""
    fields = {name: getattr(decision, name) for name in RoutingDecision.__struct_fields__}
    return RoutingDecision(**fields)


def _can_exchange(prefill: WorkerInfo, decode: WorkerInfo) -> bool:
    return prefill.worker_id != decode.worker_id and prefill.kv_compatibility == decode.kv_compatibility


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
