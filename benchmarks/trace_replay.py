"""Replays a request trace through the real router over simulated workers, in virtual time.

It owns a simulated worker (an LRU prefix cache, one prefill at a time, decodes beside it) and the event loop. It does
not know HTTP, engines or real time: a replay of one hour takes seconds, and the same trace always gives the same
figures.

``kvrelay simulate`` runs engines as well: fifteen times the CPU, and the scheduler's changes move its figures. Here
only the router is under test.

The router works in blocks here: a block of the trace is one token to the router, so a prompt is its list of hash ids.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from kvrelay.bench.formats import TraceRecord, read_mooncake
from kvrelay.bench.prefixes.blocks import hit_ratios, leading_hits
from kvrelay.config import RouterConfig, WorkerRole
from kvrelay.core.clock import ManualClock
from kvrelay.core.event_log import KvEventLog
from kvrelay.core.events import BlockRemoved, BlockStored, KvEvent, LoadMetrics
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.core.step_cost import StepCost
from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import InvalidInputError
from kvrelay.router.base import RoutingRequest
from kvrelay.router.router import Router

TRACE_BLOCK_TOKENS = 512


class WorkerModel(msgspec.Struct, frozen=True):
    """A simulated worker: the size of its cache, and how fast it is."""

    cache_blocks: int = 2500
    prefill_tokens_per_s: float = 8000.0
    inter_token_s: float = 0.02

    @property
    def step_cost(self) -> StepCost:
        """What it publishes; a token of a prompt is a block here."""
        per_block_s = TRACE_BLOCK_TOKENS / self.prefill_tokens_per_s
        return StepCost(self.inter_token_s, 0.0, per_block_s, 0.0, 0.0, 0.0)


class ReplayResult(msgspec.Struct, frozen=True):
    """One policy over one trace. Ratios of blocks; imbalance is max over mean of the workers' sums.

    ``work_imbalance`` counts computed tokens (uncached prefill and output), ``token_imbalance`` all tokens of prompts
    and answers. Times in seconds, of the simulated workers.
    """

    policy: str
    num_requests: int
    hit_ratio: float
    estimated_hit_ratio: float
    token_imbalance: float
    work_imbalance: float
    mean_ttft_s: float
    p50_ttft_s: float
    p99_ttft_s: float


def read_trace(path: Path, limit: int | None = None) -> list[TraceRecord]:
    """The requests of a trace in Mooncake's format, by time. Raises InvalidInputError that names file and line."""
    requests = list(itertools.islice(read_mooncake(path), limit))
    if any(
        not request.hash_ids or not 0 <= min(request.hash_ids) <= max(request.hash_ids) < 2**32 for request in requests
    ):
        raise InvalidInputError(f"{path}: hash_ids must be one or more unsigned 32-bit integers")
    return sorted(requests, key=lambda request: request.timestamp_s)


def infinite_hit_ratio(requests: Sequence[TraceRecord]) -> float:
    """The share of prefix blocks that one unbounded cache would have found."""
    return hit_ratios([request.hash_ids for request in requests], ())[0].hit_ratio


class _SimulatedWorker:
    """An LRU cache of sequence hashes and one prefill at a time, in the order of arrival."""

    def __init__(self, name: str, model: WorkerModel) -> None:
        self.name = name
        self.log = KvEventLog(name, 0, capacity=16)
        self.tokens = 0
        self.work = 0
        self._model = model
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._free_at = 0.0
        self._starts: deque[float] = deque()
        self._active_blocks = 0

    def accept(self, request: TraceRecord, sequence: tuple[int, ...], now: float) -> tuple[int, float, list[KvEvent]]:
        """Queue the prefill: (blocks found in the cache, when the first token comes, cache events).

        The cache is looked up and filled at once, because earlier prefills in the queue will have been computed when
        this one starts. The caller publishes the events with the first token.
        """
        hits = leading_hits(sequence, self._cache)
        for block in reversed(sequence):  # so that the end of a prefix is evicted before its beginning
            self._cache[block] = None
            self._cache.move_to_end(block)
        events: list[KvEvent] = []
        if hits < len(sequence):
            events.append(BlockStored(sequence[hits - 1] if hits else None, sequence[hits:], 1))
        evicted = [self._cache.popitem(last=False)[0] for _ in range(len(self._cache) - self._model.cache_blocks)]
        if evicted:
            events.append(BlockRemoved(tuple(evicted)))
        computed = max(request.input_len - hits * TRACE_BLOCK_TOKENS, 1)
        start = max(now, self._free_at)
        self._free_at = start + computed / self._model.prefill_tokens_per_s
        self._starts.append(start)
        self._active_blocks += len(sequence)
        self.tokens += request.input_len + request.output_len
        self.work += computed + request.output_len
        return hits, self._free_at, events

    def release(self, num_blocks: int) -> None:
        self._active_blocks -= num_blocks

    def metrics(self, now: float) -> LoadMetrics:
        while self._starts and self._starts[0] <= now:
            self._starts.popleft()
        load = simulated_load(self.name, self._active_blocks, self._model.cache_blocks, len(self._starts))
        return msgspec.structs.replace(load, step_cost=self._model.step_cost)


@dataclass(frozen=True, slots=True, order=True)
class _Due:
    """A first token (with its cache events), or an end (``num_released`` blocks are no longer active)."""

    at_s: float
    number: int
    worker: _SimulatedWorker = field(compare=False)
    num_released: int = 0
    events: tuple[KvEvent, ...] = field(default=(), compare=False)


class _Replay:
    """One run: arrivals from the trace, first tokens and ends from the workers, in order of virtual time."""

    def __init__(self, config: RouterConfig, num_workers: int, model: WorkerModel, metrics_interval_s: float) -> None:
        self._clock = ManualClock()
        self._router = Router(config, 1, self._clock)
        self._model = model
        self._metrics_interval_s = metrics_interval_s
        self._next_metrics_s = 0.0
        self._workers = {name: _SimulatedWorker(name, model) for name in (f"w{at:02d}" for at in range(num_workers))}
        self._due: list[_Due] = []
        self._hits = self._blocks = self._estimated = 0
        self._ttft_s: list[float] = []
        for name in self._workers:
            self._router.add_worker(simulated_worker_info(name, 1))

    def run(self, requests: Sequence[TraceRecord], time_scale: float) -> ReplayResult:
        for number, request in enumerate(requests):
            self._advance(request.timestamp_s / time_scale)
            self._arrive(number, request)
        tokens = [worker.tokens for worker in self._workers.values()]
        work = [worker.work for worker in self._workers.values()]
        return ReplayResult(
            policy=self._router.config.router,
            num_requests=len(requests),
            hit_ratio=self._hits / self._blocks,
            estimated_hit_ratio=self._estimated / self._blocks,
            token_imbalance=max(tokens) * len(tokens) / sum(tokens),
            work_imbalance=max(work) * len(work) / sum(work),
            mean_ttft_s=float(np.mean(self._ttft_s)),
            p50_ttft_s=float(np.percentile(self._ttft_s, 50)),
            p99_ttft_s=float(np.percentile(self._ttft_s, 99)),
        )

    def _arrive(self, number: int, request: TraceRecord) -> None:
        now, request_id = self._clock.now(), f"r{number}"
        decision = self._router.choose(RoutingRequest(request_id, request.hash_ids, request.output_len))
        worker = self._workers[decision.worker_id]
        sequence = compute_sequence_hashes(request.hash_ids, 1)
        hits, first_token_s, events = worker.accept(request, sequence, now)
        self._hits += hits
        self._estimated += decision.overlap_blocks
        self._blocks += len(sequence)
        self._ttft_s.append(first_token_s - now)
        end_s = first_token_s + request.output_len * self._model.inter_token_s
        heapq.heappush(self._due, _Due(first_token_s, number, worker, events=tuple(events)))
        heapq.heappush(self._due, _Due(end_s, number, worker, num_released=len(sequence)))

    def _advance(self, now: float) -> None:
        """Process everything that is due by ``now``, including load samples."""
        while self._due and self._due[0].at_s <= now:
            due = heapq.heappop(self._due)
            self._sample(due.at_s)
            self._clock.advance(max(0.0, due.at_s - self._clock.now()))
            if due.num_released:
                self._router.finished(f"r{due.number}", 0)
                due.worker.release(due.num_released)
            else:
                self._router.first_token(f"r{due.number}")
                if due.events:
                    self._router.apply_events(due.worker.log.append(due.events))
        self._sample(now)
        self._clock.advance(max(0.0, now - self._clock.now()))

    def _sample(self, now: float) -> None:
        if now >= self._next_metrics_s:
            self._next_metrics_s = now + self._metrics_interval_s
            for worker in self._workers.values():
                self._router.apply_metrics(worker.metrics(now))


def simulated_worker_info(name: str, block_size: int) -> WorkerInfo:
    """The discovery entry of a simulated worker."""
    return WorkerInfo(
        worker_id=name,
        epoch=0,
        role=WorkerRole.BOTH,
        model="simulated",
        model_path="",
        address="",
        max_model_len=1 << 20,
        block_size=block_size,
        num_blocks=0,
        vocab_size=1 << 32,
        kv_compatibility="",
    )


def simulated_load(name: str, active_blocks: int = 0, total_blocks: int = 1, num_waiting: int = 0) -> LoadMetrics:
    """A load sample of a simulated worker."""
    return LoadMetrics(
        worker_id=name,
        num_admitted=0,
        num_slots=256,
        num_blocks_in_use=active_blocks,
        num_blocks=total_blocks,
        num_waiting=num_waiting,
        cache_usage=min(1.0, active_blocks / total_blocks),
        prefix_hit_rate=0.0,
    )


def replay_trace(
    requests: Sequence[TraceRecord],
    config: RouterConfig,
    *,
    num_workers: int = 16,
    model: WorkerModel | None = None,
    time_scale: float = 1.0,
    metrics_interval_s: float = 0.05,
) -> ReplayResult:
    """Replay under one policy. ``time_scale`` 2 makes the trace arrive twice as fast."""
    return _Replay(config, num_workers, model or WorkerModel(), metrics_interval_s).run(requests, time_scale)
