"""The router: which worker gets a request, by load and prefixes, under one policy.

It owns the registered workers of one model, the load table, and the index (only under a policy that looks at prefixes).
It does not know HTTP, sockets or the control plane: the frontend calls ``add_worker``, ``apply_events`` and so on when
discovery or the event bus reports something. Everything is synchronous and runs on the frontend's event loop.
"""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import Collection, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvrelay.config import RouterConfig
from kvrelay.core.clock import Clock
from kvrelay.core.events import STALE_AFTER_S, AllBlocksCleared, BlockRemoved, KvEventBatch, LoadCost, LoadMetrics
from kvrelay.core.handoff import PrefixHolder
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import ConfigError, WorkerUnavailableError
from kvrelay.placement.seconds import Candidates, CostColumns, FloatColumn, Loads
from kvrelay.router.approximate import ApproximateIndexer
from kvrelay.router.base import (
    CandidateScore,
    IndexState,
    ReplayRequester,
    RouterStage,
    RoutingDecision,
    RoutingExplanation,
    RoutingRequest,
    Survey,
)
from kvrelay.router.beyond import Lender, Lenders, peer_loads, tier_loads
from kvrelay.router.costs import TransferTimes, WorkerCosts
from kvrelay.router.indexer import KvIndexer
from kvrelay.router.knowledge import Indexer
from kvrelay.router.load import LoadTable, Stalls
from kvrelay.router.overlap import WorkerGroup
from kvrelay.router.policies import KvPolicy, Policy, build_policy

_log = logging.getLogger(__name__)

ANTICIPATION_S = 10.0
MAX_CACHED_GROUPS = 1024
WORST_COST = 1e300
FIRST_OUTPUT, OUTPUT_SHARE = 128.0, 0.02
"""Tokens expected of an answer at first, and the weight of the latest answer in their mean."""

_RowIndices = npt.NDArray[np.intp]


class Router:
    """Routes the requests of one model; workers are named by ``WorkerInfo.worker_id`` and have KV blocks of
    ``block_size`` tokens.

    With ``request_replay`` the router asks a worker for events that it missed; without it, policies that look at
    prefixes learn only from events from now on. Raises ConfigError for a block size below 1.
    """

    def __init__(
        self,
        config: RouterConfig,
        block_size: int,
        clock: Clock,
        stage: RouterStage = RouterStage.REQUEST,
        request_replay: ReplayRequester | None = None,
    ) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {block_size}", param="block_size")
        self.block_size = block_size
        """Tokens per block in the index and in decisions."""
        self.clock = clock
        self._stage = stage
        self._request_replay = request_replay
        self.indexer = Indexer()
        """What the router knows of each worker's prefixes."""
        self._anticipated: ApproximateIndexer | None = None
        self._rows_of: dict[WorkerGroup, _RowIndices] = {}
        self._lenders: Lenders | None = None
        self._leaving: dict[str, tuple[WorkerInfo, float]] = {}
        """Workers that take no requests any more, and until when they lend what they hold."""
        self._can_read = False
        """Whether any worker may read from another one."""
        self._load_costs: dict[str, dict[str, LoadCost]] = {}
        """By worker and medium."""
        self._workers: dict[str, WorkerInfo] = {}
        self._lacking: dict[str, tuple[str, ...]] = {}
        """By adapter, the workers that do not have it."""
        self._load = LoadTable(block_size, clock)
        self._costs = WorkerCosts(clock, STALE_AFTER_S)
        self.transfer_times = TransferTimes(clock)
        self.avoided: dict[str, tuple[str, ...]] = {}
        """By decode worker, the prefill workers whose KV it declines for now."""
        self._mean_output = FIRST_OUTPUT
        self.num_fallbacks = 0
        """Requests that were placed by weights, because no worker's costs were known."""
        self._stalls = Stalls()
        self._rng = random.Random(config.router_seed)
        self.configure(config)

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """The workers that compete for requests."""
        return tuple(self._load.worker_ids)

    def configure(self, config: RouterConfig) -> None:
        """Change policy or weights, from the next decision on; load and placements are kept.

        The index exists only while the policy looks at prefixes: after a change to such a policy the router asks every
        worker what it holds.
        """
        self.config = config
        self._policy = build_policy(config)
        if not (self._policy.anticipates and config.kv_events):
            self._anticipated = None
        elif self._anticipated is None:
            self._anticipated = ApproximateIndexer(ANTICIPATION_S, self.clock)
        if not self._policy.uses_overlap:
            self.indexer = Indexer()
        elif not config.kv_events:
            if not isinstance(self.indexer, ApproximateIndexer):
                self.indexer = ApproximateIndexer(config.approximate_ttl_s, self.clock)
            self.indexer.ttl_s = config.approximate_ttl_s
        elif not isinstance(self.indexer, KvIndexer):
            self.indexer = KvIndexer(self.block_size, self.clock, self._request_replay)
            for info in filter(self._stage.admits, self._workers.values()):
                self.indexer.follow(info)

    # -- workers ------------------------------------------------------------------------------------------------------

    def add_worker(self, info: WorkerInfo) -> None:
        """Add a worker that appeared in discovery or registered again with another epoch."""
        known = self._workers.get(info.worker_id)
        if known is not None and info.epoch < known.epoch:
            return
        self._workers[info.worker_id] = info
        self._leaving.pop(info.worker_id, None)
        self._rows_of.clear()
        self._lacking.clear()
        self._lenders = None
        self._costs.changed()
        if self._stage.admits(info):
            self._load.add_worker(info.worker_id)
            if known is None or not self._stage.admits(known):
                self.indexer.follow(info)
        else:
            self._load.remove_worker(info.worker_id)
            self._forget_prefixes(info.worker_id)

    def remove_worker(self, worker_id: str, lends_for_s: float = 0.0) -> None:
        """It competes no more. ``lends_for_s``: how long others may still read what it holds."""
        info = self._workers.pop(worker_id, None)
        self._load.remove_worker(worker_id)
        self._costs.forget(worker_id)
        self.transfer_times.forget(worker_id)
        self.avoided.pop(worker_id, None)
        self._stalls.forget(worker_id)
        self._load_costs.pop(worker_id, None)
        self._rows_of.clear()
        self._lacking.clear()
        self._lenders = None
        if info is not None and info.reads_prefixes and lends_for_s:
            self._leaving[worker_id] = info, self.clock.now() + lends_for_s
        elif worker_id not in self._leaving:
            self._forget_prefixes(worker_id)

    def leaving(self, sequence: Sequence[int]) -> list[Lender]:
        """What the workers that leave hold of this prompt."""
        if not self._leaving:
            return []
        for worker_id in [name for name, (_, until_s) in self._leaving.items() if until_s <= self.clock.now()]:
            del self._leaving[worker_id]
            self._forget_prefixes(worker_id)
        held = self.indexer.find_holders(sequence) if sequence else ()
        return [
            Lender(self._leaving[name][0], depth) for depth, at in held for name in at.names if name in self._leaving
        ]

    def _forget_prefixes(self, worker_id: str) -> None:
        self.indexer.remove_worker(worker_id)
        if self._anticipated is not None:
            self._anticipated.remove_worker(worker_id)

    # -- requests -----------------------------------------------------------------------------------------------------

    def choose(self, request: RoutingRequest) -> RoutingDecision:
        """Pick a worker and count the request as placed there. Raises WorkerUnavailableError if there is none."""
        survey = self.survey(request)
        decision = self.pick(survey)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("request %s: %s", request.request_id, self._explanation(decision, survey))
        self.place(request, decision, survey)
        return decision

    def survey(self, request: RoutingRequest, policy: Policy | None = None, lenders: Sequence[Lender] = ()) -> Survey:
        """What a decision is made of, under the router's policy or another one. ``lenders``: whom these workers may
        read from, too. Valid until the next call of any method. Raises WorkerUnavailableError."""
        sequence = self._sequence(request)
        candidates, holders = self._candidates(request, sequence, (*lenders, *self.leaving(sequence)))
        exclude = (*request.exclude, *self._without(request.adapter)) if request.adapter else request.exclude
        scores = self._scores(policy or self._policy, candidates, exclude)
        return Survey(self._load.worker_ids, self._workers, candidates, scores, sequence, holders)

    def _without(self, adapter: str) -> tuple[str, ...]:
        """The workers that cannot compute with it."""
        found = self._lacking.get(adapter)
        if found is None:
            workers = self._workers.values()
            lacking = (each.worker_id for each in workers if adapter not in (each.adapter, *each.adapters))
            found = self._lacking[adapter] = tuple(lacking)
        return found

    def pick(self, survey: Survey) -> RoutingDecision:
        """The policy's choice; nothing is placed."""
        return self.decision(survey, self._policy.pick(survey.scores, self._rng))

    @property
    def sample_ages_s(self) -> FloatColumn:
        """Seconds since each worker's last load sample, in row order."""
        return self._load.sample_ages_s

    @property
    def num_pending(self) -> int:
        """Requests that wait on all workers together: placed here and not finished, or published as waiting."""
        return self._load.num_pending

    def explain(self, request: RoutingRequest) -> RoutingExplanation:
        """The decision and its reasons, without placing the request.

        The decision uses copies of the policy and the random generator, so that turns and draws stay as they are.
        Raises WorkerUnavailableError if no worker can take the request.
        """
        policy, rng = copy.copy(self._policy), copy.copy(self._rng)
        survey = self.survey(request, policy)
        return self._explanation(self.decision(survey, policy.pick(survey.scores, rng)), survey)

    def _sequence(self, request: RoutingRequest) -> tuple[int, ...]:
        """The prompt's sequence hashes; empty if the policy does not use them."""
        if not self._policy.uses_overlap:
            return ()
        if request.sequence_hashes is not None:
            return request.sequence_hashes
        return compute_sequence_hashes(
            request.token_ids, self.block_size, lora=request.adapter or None, salt=request.cache_salt
        )

    def _candidates(
        self, request: RoutingRequest, sequence: tuple[int, ...], lenders: Sequence[Lender]
    ) -> tuple[Candidates, Sequence[PrefixHolder | None]]:
        num_output = min(request.max_tokens or math.inf, self._mean_output)
        costs = self._costs.columns(self._load.worker_ids) if self._policy.uses_costs else None
        num_tokens, held = len(request.token_ids), self._held(sequence)
        overlaps = self._overlaps(sequence, held)
        loads, holders = self._loads(sequence, held, overlaps, costs, lenders)
        columns = self._load.columns()
        return Candidates(num_tokens, self.block_size, overlaps, columns, costs, num_output, loads), holders

    def _loads(
        self,
        sequence: tuple[int, ...],
        held: FloatColumn,
        overlaps: FloatColumn,
        costs: CostColumns | None,
        lenders: Sequence[Lender],
    ) -> tuple[Loads | None, Sequence[PrefixHolder | None]]:
        """What each worker would load rather than compute, and from which other worker. By seconds if the steps' costs
        are known; else the worker decides alone whether it reads what another one has."""
        tiers = self.indexer.tiers
        if not sequence or tiers is None:
            return None, ()
        ids, size, loads = self._load.worker_ids, self.block_size, None
        if tiers.held and costs is not None:
            loads = tier_loads(ids, sequence, overlaps, size, tiers, self._load_costs).worth(costs)
        if self._lenders is None:
            self._lenders = Lenders.of([self._workers[worker_id] for worker_id in ids])
            self._can_read = self._lenders.are_any
        is_held = self._can_read and bool(np.count_nonzero(held))
        if not is_held and not lenders:
            return loads, ()
        rows, depths = self._lenders.holders(held) if is_held else ([-1] * len(ids), np.zeros(len(ids)))
        names = [ids[row] if row >= 0 else "" for row in rows]
        for lender in lenders:
            for at, worker_id in enumerate(ids):
                if lender.num_blocks > depths[at] and lender.lends_to(self._workers[worker_id]):
                    names[at], depths[at] = lender.info.worker_id, lender.num_blocks
        if not np.count_nonzero(depths):
            return loads, ()
        # The prompt's last token is computed in any case.
        reached = overlaps * size if loads is None else overlaps * size + loads.tokens
        read = peer_loads(ids, reached, depths, size, self._load_costs)
        if costs is not None:
            read = read.worth(costs)
            loads = read if loads is None else loads.then(read)
        holders = [
            PrefixHolder(name, int(depth) * size) if name and tokens > 0 else None
            for name, depth, tokens in zip(names, depths, read.tokens.tolist())
        ]
        return loads, holders

    def _scores(self, policy: Policy, candidates: Candidates, exclude: Collection[str]) -> FloatColumn:
        """The policy's scores, ``-inf`` for excluded and avoided workers.

        Raises WorkerUnavailableError if all workers are excluded.
        """
        excluded = [row for row in map(self._load.row, set(exclude)) if row is not None] if exclude else []
        if len(excluded) >= len(candidates):
            raise WorkerUnavailableError("no worker can take the request")
        scores = policy.scores(candidates)
        if not math.isfinite(np.add.reduce(scores)):
            # Numbers that workers publish may overflow in a product. Such a worker is the last choice, but it is one.
            np.nan_to_num(scores, copy=False, nan=-WORST_COST, posinf=-WORST_COST, neginf=-WORST_COST)
        excluded += self._stalls.avoidable(self.config.stall_after_s, self._load.row, excluded, len(candidates))
        if excluded:
            scores[excluded] = -math.inf
        return scores

    def decision(self, survey: Survey, row: int) -> RoutingDecision:
        """The decision for the worker in that row of the survey."""
        overlap, loads = int(survey.candidates.overlap_blocks[row]), survey.candidates.loads
        return RoutingDecision(
            worker_id=survey.worker_ids[row],
            policy=self.config.router,
            hit_rate=overlap * self.block_size / survey.candidates.prompt_tokens if overlap else 0.0,
            overlap_blocks=overlap,
            load_blocks=0 if loads is None else int(loads.tokens[row]) // self.block_size,
            holder=survey.holders[row] if survey.holders else None,
        )

    def _explanation(self, decision: RoutingDecision, survey: Survey) -> RoutingExplanation:
        """The decision with every candidate's numbers, in row order. Made only on demand: for many workers this takes
        longer than the decision."""
        candidates = survey.candidates
        records = map(
            CandidateScore,
            survey.worker_ids,
            survey.scores.tolist(),
            _counts(candidates.overlap_blocks),
            candidates.load.cache_usage.tolist(),
            _counts(candidates.load.num_waiting),
            _counts(candidates.load.prefill_tokens),
            _counts(candidates.load.context_tokens),
            *self._seconds(candidates),
        )
        possible = tuple(record for record in records if record.score > -math.inf)
        return RoutingExplanation(**msgspec.structs.asdict(decision), candidates=possible)

    def _seconds(self, candidates: Candidates) -> list[list[float]]:
        """The columns of the cost in seconds, if that is what decides."""
        seconds = self._policy.seconds(candidates) if isinstance(self._policy, KvPolicy) else None
        if seconds is None:
            return []
        columns = [seconds.first_token, seconds.lost_prefix, seconds.decode]
        return [column.tolist() for column in (columns if seconds.load is None else [*columns, seconds.load])]

    def place(
        self, request: RoutingRequest, decision: RoutingDecision, survey: Survey, *, prefills: bool = True
    ) -> None:
        """Count the request as placed on the chosen worker, and its prompt as cached there soon. ``prefills``: whether
        the worker computes the prompt, too."""
        num_tokens = len(request.token_ids)
        self.num_fallbacks += self._policy.uses_costs and survey.candidates.costs is None
        num_held = (decision.overlap_blocks + decision.load_blocks) * self.block_size
        cached = min(num_held, num_tokens) if prefills else num_tokens
        sequence = survey.sequence
        self._load.place(request.request_id, decision.worker_id, num_tokens - cached, num_tokens)
        if self._workers[decision.worker_id].block_size != self.block_size:
            return
        # What another worker prefills is held here later than the next request may come: only events tell.
        self.indexer.place(decision.worker_id, sequence)
        if prefills and self._anticipated is not None:
            self._anticipated.place(decision.worker_id, sequence)

    def first_token(self, request_id: str) -> None:
        """The prefill of a placed request is done."""
        self._load.prefilled(request_id)

    def finished(self, request_id: str, num_output_tokens: int) -> None:
        """A placed request has left its worker, for any reason."""
        if self._load.finish(request_id) is not None and num_output_tokens > 0:
            self._mean_output += OUTPUT_SHARE * (num_output_tokens - self._mean_output)

    def _held(self, sequence: tuple[int, ...]) -> FloatColumn:
        """Per worker the leading blocks that it holds, in the load table's row order."""
        held = np.zeros(len(self._load.worker_ids))
        if sequence:
            # Depths grow, so a worker's last depth is the one that stays.
            for depth, group in self.indexer.find_holders(sequence):
                held[self._rows(group)] = depth
        return held

    def _overlaps(self, sequence: tuple[int, ...], held: FloatColumn) -> FloatColumn:
        """With those that it is about to hold."""
        anticipated = self._anticipated.find_holders(sequence) if sequence and self._anticipated is not None else ()
        if not anticipated:
            return held
        overlaps = held.copy()
        for depth, group in anticipated:
            rows = self._rows(group)
            overlaps[rows] = np.maximum(overlaps[rows], depth)
        return overlaps

    def _rows(self, group: WorkerGroup) -> _RowIndices:
        """The rows of the competing workers among them in the load table."""
        rows = self._rows_of.get(group)
        if rows is None:
            if len(self._rows_of) >= MAX_CACHED_GROUPS:
                self._rows_of.clear()
            found = [row for row in map(self._load.row, group.names) if row is not None]
            rows = self._rows_of[group] = np.array(found, dtype=np.intp)
        return rows

    # -- what workers publish -----------------------------------------------------------------------------------------

    def apply_events(self, batch: KvEventBatch) -> None:
        """Feed the index; does nothing under a policy without one."""
        self.indexer.apply(batch)
        if self._anticipated is not None:
            for event in batch.events:
                if isinstance(event, BlockRemoved) and event.medium is None:
                    self._anticipated.remove(batch.worker_id, event.block_hashes)
                elif isinstance(event, AllBlocksCleared):
                    self._anticipated.remove_worker(batch.worker_id)

    def apply_replay(self, worker_id: str, reply: bytes) -> None:
        """Apply the worker's answer to a replay request. A malformed one is counted and dropped."""
        self.indexer.apply_replay(worker_id, reply)

    def apply_metrics(self, metrics: LoadMetrics) -> None:
        if self._load.apply_metrics(metrics):
            self._stalls.heard(metrics.worker_id, metrics.step_age_s)
            self._costs.heard(metrics.worker_id, metrics.step_cost)
            self.transfer_times.heard(metrics.worker_id, metrics.transfer_costs)
            self.avoided[metrics.worker_id] = metrics.avoided
            self._load_costs[metrics.worker_id] = {cost.medium: cost for cost in metrics.load_costs}
        self.indexer.heard(metrics.worker_id)

    # -- diagnosis ----------------------------------------------------------------------------------------------------

    def index_state(self, worker_id: str) -> IndexState:
        return self.indexer.index_state(worker_id)

    def indexed_blocks(self, worker_id: str) -> list[int]:
        """Sequence hashes of the blocks that the worker holds, according to its events.

        For diagnosis: the time is proportional to the size of the whole index.
        """
        return self.indexer.indexed_blocks(worker_id)

    def __repr__(self) -> str:
        return f"Router({self.config.router}, {self._load!r}, {self.indexer!r})"


def _counts(column: FloatColumn) -> list[int]:
    counts: list[int] = column.astype(np.int64).tolist()
    return counts
