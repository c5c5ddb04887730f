"""A worker's numbers as Prometheus metrics. Nothing is counted here: a scrape reads the worker's own counts.

Each series has the label ``model``. Counts that the worker keeps in a dataclass become metrics by their fields' names,
so that a new one appears by itself: ``num_granted`` of the hand-off ledger is
``kvrelay_worker_handoffs_granted_total``. This module does not know how they are fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvrelay.config import WorkerRole
from kvrelay.core.histogram import Histogram
from kvrelay.core.status import RefusalKind
from kvrelay.core.step_cost import CostSource, StepCost
from kvrelay.core.tier_stats import TierStats
from kvrelay.core.vllm_metrics import OF_WORKERS, WithVllmNames
from kvrelay.engine.stats import EngineStats, HoldingStats, SessionStats
from kvrelay.handoff.base import EndReason, RefusalReason
from kvrelay.handoff.decode_state import DecodeCounters
from kvrelay.handoff.prefill_state import PrefillCounters
from kvrelay.placement.base import PrefillPlace
from kvrelay.transfer.stats import P2pCounters, TransferStats
from kvrelay.transfer.values import TransferOp
from kvrelay.worker.reporting.stats import DecodeStats, RemoteCostStats, by_reason

PREFIX = "kvrelay_worker_"
R = TypeVar("R", EndReason, RefusalReason)
_Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]
# A series must not appear with its first event: the rate of that event would be lost.
_PLACES = {place.value: 0 for place in PrefillPlace}
_REFUSALS = {kind.value: 0 for kind in RefusalKind}


class WorkerStats(msgspec.Struct, frozen=True):
    """A snapshot of a worker. ``is_ready``: in discovery, by local knowledge, and not leaving. ``dp_group``: the
    data-parallel group in which it is rank ``dp_rank``; empty: none."""

    worker_id: str
    model: str
    engine_kind: str
    role: WorkerRole
    epoch: int
    is_ready: bool
    engine: EngineStats
    decode: DecodeStats
    prefill: PrefillCounters
    transfer: TransferStats
    num_open_handoffs: int = 0
    num_grants: int = 0
    handoffs: DecodeCounters = msgspec.field(default_factory=DecodeCounters)
    remote: RemoteCostStats = msgspec.field(default_factory=RemoteCostStats)
    refusals: Mapping[RefusalKind, int] = {}
    """Refused requests by reason."""
    num_unleased_entries: int = 0
    transfer_cost_error: float = 0.0
    """Mean relative error of the published transfer costs."""
    transfer_durations: Mapping[TransferOp, Histogram] = {}
    prefixes: TierStats | None = None
    """Of other workers' prefixes, if they are read."""
    dp_group: str = ""
    dp_rank: int = 0
    claim_times: Histogram = msgspec.field(default_factory=Histogram)
    """From sending a prefill away to its grant."""


class WorkerMetrics(Collector):
    """Renders the current result of ``stats``, and Prometheus's standard metrics of the process."""

    def __init__(self, stats: Callable[[], WorkerStats], *, vllm_names: bool = False) -> None:
        self._stats = stats
        self._registry = CollectorRegistry()
        self._registry.register(WithVllmNames(self, OF_WORKERS) if vllm_names else self)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for family in _families(stats):
            for sample in family.samples:
                sample.labels.setdefault("model", stats.model)
            yield family
        yield from _deprecated_costs(stats)


def _families(stats: WorkerStats) -> Iterator[Metric]:
    yield _info(stats)
    yield _gauge("ready", "1 while the worker is in discovery and not leaving.", stats.is_ready)
    yield from _engine_gauges(stats.engine)
    yield _gauge("handoffs_waiting", "Requests that wait for a remote prefill.", stats.num_open_handoffs)
    yield _gauge("grants_open", "Permissions to touch our blocks that peers hold.", stats.num_grants)
    yield _counter(
        "discovery_entries_without_lease", "Entries ignored since no lease ends them.", stats.num_unleased_entries
    )
    yield from _engine_counters(stats.engine)
    yield from _times(stats)
    yield from _transfers(stats.transfer)
    if stats.transfer.p2p is not None:
        yield from _p2p(stats.transfer.p2p)
    if stats.engine.holding is not None:
        yield from _holding(stats.engine.holding)
    if stats.engine.sessions is not None:
        yield from _sessions(stats.engine.sessions)
    if stats.engine.tiers is not None:
        yield from _tiers(stats.engine.tiers, "kv_tier")
    if stats.prefixes is not None:
        yield from _tiers(stats.prefixes, "kv_fetch")
    yield _by_label("placements", "Where prefills ran, and why.", "place", _PLACES | stats.decode.places)
    yield _by_label(
        "refusals",
        "Requests of frontends that were refused.",
        "reason",
        _REFUSALS | {kind.value: count for kind, count in dict(stats.refusals).items()},
    )
    yield _by_reason(
        "claims_refused", "Claims of prefill workers that were refused.", RefusalReason, stats.handoffs.refusals
    )
    yield _by_reason("recomputed", "Remote prefills that were computed here instead.", EndReason, stats.handoffs.ends)
    yield _by_reason("prefills_ended", "Prefills for decode workers without success.", EndReason, stats.prefill.ends)
    yield from _counts("handoffs", "Hand-offs of this decode worker", stats.handoffs)
    yield from _counts("decode", "Decode side", stats.decode)
    yield from _cost_models(stats.engine, stats.remote, stats.transfer_cost_error, "cost_model", "cost_model")
    yield _cost_source(stats.engine)
    yield from _cost_decisions(stats.remote)
    yield from _counts("prefill", "Prefill side", stats.prefill)


def _info(stats: WorkerStats) -> Metric:
    value = {
        "worker_id": stats.worker_id,
        "model": stats.model,
        "engine": stats.engine_kind,
        "role": stats.role.value,
        "epoch": str(stats.epoch),
        "dp_group": stats.dp_group,
        "dp_rank": str(stats.dp_rank),
    }
    return InfoMetricFamily(PREFIX.rstrip("_"), "Who this worker is, and what it does now.", value=value)


def _engine_gauges(engine: EngineStats) -> Iterator[Metric]:
    load = engine.load
    yield _gauge("requests_running", "Requests let in, those that wait for a transfer included.", load.num_admitted)
    yield _gauge("requests_waiting", "Requests that wait to be let in.", load.num_waiting)
    yield _gauge("kv_blocks", "Blocks of the KV pool.", load.num_blocks)
    yield _gauge("kv_blocks_in_use", "Blocks held or quarantined, not only cached.", load.num_blocks_in_use)
    yield _gauge(
        "kv_blocks_quarantined", "Blocks lent to hand-offs: a peer may write to them.", engine.num_blocks_quarantined
    )
    yield _gauge("kv_usage_ratio", "Share of the KV pool in use.", load.cache_usage)
    yield _gauge("kv_demand_ratio", "What requests hold or wait for, over the pool.", load.kv_demand)


def _engine_counters(engine: EngineStats) -> Iterator[Metric]:
    yield _counter(
        "prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache.", engine.num_queried_tokens
    )
    yield _counter("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.", engine.num_hit_tokens)
    yield _counter("prefill_tokens", "Prompt tokens computed here.", engine.tokens.num_prefilled)
    yield _counter("generation_tokens", "Tokens sampled here.", engine.tokens.num_generated)
    yield _counter("steps", "Forward passes.", engine.tokens.num_steps)
    yield _counter("preemptions", "Requests whose blocks were taken.", engine.num_preemptions)
    if (drafts := engine.drafts) is not None:
        yield _counter("spec_decode_drafts", "Times that tokens were drafted.", drafts.num_drafts)
        yield _counter("spec_decode_draft_tokens", "Tokens drafted.", drafts.num_draft_tokens)
        yield _counter("spec_decode_accepted_tokens", "Tokens drafted and accepted.", drafts.num_accepted_tokens)
        per_step = (engine.load.step_cost or StepCost()).tokens_per_step
        yield _gauge("tokens_per_step", "Tokens that an answer gets from a step, by the latest steps.", per_step)


def _times(stats: WorkerStats) -> Iterator[Metric]:
    times = stats.engine.times
    yield _histogram("queue_seconds", "Each wait for admission.", times.queue)
    yield _histogram("prefill_seconds", "From admission to the first token of a prefill here.", times.prefill)
    yield _histogram("handoff_seconds", "Decode side: from sending a prefill away to its KV.", times.handoff)
    yield _histogram(
        "handoff_queue_seconds", "Decode side: from queueing a prefill to its grant; not pairs.", stats.claim_times
    )
    yield _histogram("held_seconds", "Decode side: how long KV that has come waits for the pool.", times.held)
    yield _histogram(
        "sending_seconds", "Prefill side: how long a computed prefill keeps the pool's blocks.", times.sending
    )
    yield _histogram("step_seconds", "Steps with a forward pass.", times.step)
    family = HistogramMetricFamily(
        PREFIX + "transfer_duration_seconds", "Reads and writes of peers' KV, from submission to end.", labels=("op",)
    )
    for op, histogram in stats.transfer_durations.items():
        family.add_metric((op.value,), histogram.buckets(), histogram.total_s)
    yield family


def _deprecated_costs(stats: WorkerStats) -> Iterator[Metric]:
    """The names of the last release, whose label ``model`` is the cost model. To be removed in the next one."""
    for family in _cost_models(stats.engine, stats.remote, stats.transfer_cost_error, "cost", "model"):
        name = family.name + ("_total" if family.type == "counter" else "")
        family.documentation = f"Deprecated, gone in the next release: use {name.replace('_cost_', '_cost_model_', 1)}."
        yield family


def _cost_models(
    engine: EngineStats, remote: RemoteCostStats, transfer_error: float, group: str, label: str
) -> Iterator[Metric]:
    """What the fitted models hold, and how wrong they were lately."""
    coefficients = {
        (model, name.removesuffix("_s")): value
        for model, cost in (("step", engine.load.step_cost or StepCost()), ("remote", remote.cost))
        for name, value in msgspec.structs.asdict(cost).items()
        if name.endswith("_s")
    }
    yield _labelled(f"{group}_seconds", "Fitted cost.", (label, "coefficient"), coefficients, GaugeMetricFamily)
    errors = {"step": engine.step_cost_error, "remote": remote.error, "transfer": transfer_error}
    text = "Mean of |measured - predicted| / measured."
    yield _by_label(f"{group}_error_ratio", text, label, errors, GaugeMetricFamily)
    samples = {"step": engine.num_step_samples, "remote": remote.num_samples}
    yield _by_label(f"{group}_samples", "Measured times.", label, samples)
    rejected = {"step": engine.num_step_samples_rejected, "remote": remote.num_rejected}
    yield _by_label(f"{group}_samples_rejected", "Impossible times.", label, rejected)


def _cost_source(engine: EngineStats) -> Metric:
    sources = {source.value: source is engine.load.step_cost_source for source in CostSource}
    return _by_label("step_cost_source", "Where the cost of a step comes from.", "source", sources, GaugeMetricFamily)


def _cost_decisions(remote: RemoteCostStats) -> Iterator[Metric]:
    yield _counter("cost_fallbacks", "Decisions by threshold, since costs were not sound.", remote.num_fallbacks)
    yield _counter("cost_trials", "Prefills that went the dearer way, so that it is measured.", remote.num_trials)


def _transfers(transfer: TransferStats) -> Iterator[Metric]:
    """Summed over peers: workers join and leave, and each would be a time series."""
    yield _gauge("transfers_unfinished", "Reads and writes under way.", transfer.num_unfinished)
    fields = {
        "transfers": ("num_transfers", "Ended reads and writes of peers' KV."),
        "transfer_errors": ("num_errors", "Reads and writes that failed."),
        "transfer_bytes": ("num_bytes", "KV that arrived."),
        "transfer_pieces": ("num_pieces", "Runs of adjacent bytes (descriptors) that arrived."),
        "transfer_seconds": ("seconds", "From submission to end, waiting included."),
    }
    for name, (field, text) in fields.items():
        counts = {op.value: sum(getattr(peer, field) for peer in transfer.peers if peer.op is op) for op in TransferOp}
        yield _by_label(name, text, "op", counts)


def _p2p(counters: P2pCounters) -> Iterator[Metric]:
    """Metrics of the peer-to-peer transport only."""
    yield _gauge("p2p_communicators", "Communicators that exist.", counters.pairs)
    yield _gauge("p2p_buffer_used_bytes", "Buffer taken by KV under way.", counters.buffer_used_bytes)
    yield _gauge("p2p_pool_used_bytes", "Memory pool taken by KV under way.", counters.pool_used_bytes)
    for field, value in msgspec.structs.asdict(counters).items():
        if field.startswith("num_"):
            name = field.removeprefix("num_")
            yield _counter(f"p2p_{name}", f"Transport p2p: {name.replace('_', ' ')}.", value)


def _sessions(sessions: SessionStats) -> Iterator[Metric]:
    counts = sessions.counts
    yield _gauge("sessions_paused", "Answers whose session may continue.", sessions.num_paused)
    yield _counter("session_pauses", "Answers after which a session may continue.", counts.num_begun)
    yield _counter("session_returns", "Prompts that continued a session.", counts.num_returned)
    yield _counter("session_returns_incomplete", "Of these, some of whose KV was evicted.", counts.num_missed)
    yield _counter("sessions_gone", "Sessions that seem not to continue.", counts.num_gone)
    yield _counter("sessions_forgotten", "Pauses that were too many to remember.", counts.num_forgotten)
    tokens = sessions.tokens_by_place
    yield _by_label("session_tokens", "What returning sessions repeated, by place.", "place", tokens)
    yield _counter("session_saved_seconds", "What computing the found tokens would have taken.", counts.saved_s)


def _holding(holding: HoldingStats) -> Iterator[Metric]:
    yield _gauge("kv_holding_blocks", "Blocks of the holding area.", holding.num_blocks)
    yield _gauge("kv_holding_blocks_in_use", "Of these, held or quarantined.", holding.num_blocks_in_use)
    yield _gauge(
        "kv_holding_blocks_spilled", "Blocks of host memory with KV that was there.", holding.num_blocks_spilled
    )
    yield _gauge("kv_holding_arriving", "Requests whose KV will come to the holding area.", holding.num_arriving)
    yield _counter("kv_held", "Prefills whose KV was in the holding area.", holding.num_held)
    yield _counter("kv_holding_spilled", "Of these, prefills whose KV went to host memory.", holding.num_spilled)
    yield _counter("kv_holding_full", "Computed prefills that kept blocks of the pool: no room.", holding.num_full)


def _tiers(tiers: TierStats, group: str) -> Iterator[Metric]:
    """KV beyond the pool: decisions, then each store by its medium (``host``, ``disk``; ``peer``)."""
    counts = tiers.counts
    yield _counter(f"{group}_hits", "Prompts whose stored KV was loaded.", counts.num_hits)
    yield _counter(f"{group}_hit_blocks", "Blocks that were loaded and have proved themselves.", counts.num_hit_blocks)
    yield _counter(f"{group}_not_worth", "Prompts whose stored KV is computed as fast.", counts.num_not_worth)
    yield _counter(f"{group}_failed_loads", "Loads after which the rest was computed.", counts.num_failed_loads)
    yield _counter(f"{group}_saved_seconds", "Computing that loads have saved, by estimate.", max(counts.saved_s, 0.0))
    yield _counter(f"{group}_lost_seconds", "Time of failed loads.", counts.lost_s)
    yield _gauge(f"{group}_queued_blocks", "Evicted blocks that wait to be written.", tiers.num_queued)
    numbers = {
        "loaded_blocks": ("num_loaded", "Blocks read."),
        "loaded_bytes": ("loaded_bytes", "Bytes read."),
        "load_seconds": ("load_s", "Time of reads."),
        "stored_blocks": ("num_stored", "Blocks written."),
    }
    for name, (field, text) in numbers.items():
        counted = {medium: getattr(store, field) for medium, store in tiers.stores.items()}
        yield _by_label(f"{group}_{name}", text, "medium", counted)
    for name, text in (("misses", "Reads that failed."), ("drops", "Evicted blocks that were not written.")):
        stores = [(medium, dict(getattr(store, name))) for medium, store in tiers.stores.items()]
        reasons = {(medium, reason): count for medium, found in stores for reason, count in found.items()}
        yield _labelled(f"{group}_{name}", text, ("medium", "reason"), reasons)


def _counts(group: str, title: str, counts: DecodeStats | PrefillCounters | DecodeCounters) -> Iterator[Metric]:
    """A counter for each field that is a number."""
    for field, value in msgspec.structs.asdict(counts).items():
        if isinstance(value, int):
            name = field.removeprefix("num_")
            yield _counter(f"{group}_{name}", f"{title}: {name.replace('_', ' ')}.", value)


def _by_reason(name: str, text: str, reasons: type[R], counts: Mapping[R, int]) -> Metric:
    return _by_label(name, text, "reason", by_reason({**dict.fromkeys(reasons, 0), **counts}))


def _by_label(
    name: str, text: str, label: str, values: Mapping[str, float], kind: _Kind = CounterMetricFamily
) -> Metric:
    return _labelled(name, text, (label,), {(of_label,): value for of_label, value in dict(values).items()}, kind)


def _labelled(
    name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, float], kind: _Kind = CounterMetricFamily
) -> Metric:
    """A key of ``values`` is a tuple with a value for each of the labels."""
    family = kind(PREFIX + name, text, labels=labels)
    for of_labels, value in values.items():
        family.add_metric(of_labels, value)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(PREFIX + name, text, histogram.buckets(), histogram.total_s)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)
