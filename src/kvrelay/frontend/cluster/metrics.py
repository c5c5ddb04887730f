"""The frontend's metrics, kept cheap: counting on the token path is a bisection and an addition.

prometheus-client only renders these counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.config import DisaggConfig
from kvrelay.core.events import LoadMetrics
from kvrelay.core.histogram import LATENCY_BUCKETS_S, TOKEN_BUCKETS_S, Histogram
from kvrelay.core.status import Outcome, RefusalKind, outcome_of
from kvrelay.core.vllm_metrics import OF_FRONTENDS, WithVllmNames
from kvrelay.frontend.access.admission import IN_FLIGHT
from kvrelay.frontend.cluster.seconds import Second
from kvrelay.marks.otlp import TraceExporter
from kvrelay.placement.base import PrefillPlace
from kvrelay.planner import Hold, Narrow, Start, Stop, Traffic, Widen
from kvrelay.planner.report import PlannerReport

UNKNOWN = "unknown"
"""The reason of a refusal by a worker that tells none."""
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
COMMON_STATUSES = ("200", "400", "429", "500", "503", "disconnected", "broken")
"""With the generating endpoints: answers whose series exist before the first of them."""


class Latencies(NamedTuple):
    """When first tokens came, and the gaps between tokens, of one worker's answers."""

    ttft: Histogram
    itl: Histogram

    @classmethod
    def none(cls) -> Latencies:
        return cls(Histogram(LATENCY_BUCKETS_S), Histogram(TOKEN_BUCKETS_S))

    def add(self, others: Iterable[Latencies]) -> Latencies:
        for other in others:
            self.ttft.add(other.ttft)
            self.itl.add(other.itl)
        return self


class ModelMetrics:
    """The counts of one model's sequences. ``objectives``: of requests that bring none."""

    def __init__(self, objectives: DisaggConfig) -> None:
        self._objectives = objectives
        self.by_worker: dict[str, Latencies] = {}
        self._of_gone = Latencies.none()
        """Of workers that are gone."""
        self.duration = Histogram(LATENCY_BUCKETS_S)
        self.traffic = Traffic()
        """The tokens of all answers, of failed and cancelled ones too; answers that have ended are whole ones."""
        self.num_migrations = 0
        self.num_in_time = 0
        """Whole answers within both objectives."""
        self.num_late_first = 0
        self.num_late_gaps = 0

    @property
    def latencies(self) -> Latencies:
        """Of all workers, those that are gone too."""
        return Latencies.none().add((self._of_gone, *self.by_worker.values()))

    def of_worker(self, worker_id: str) -> Latencies:
        """A sequence keeps them while it runs there, so that a token looks nothing up."""
        return self.by_worker.get(worker_id) or self.by_worker.setdefault(worker_id, Latencies.none())

    def keep_workers(self, worker_ids: Container[str]) -> None:
        """All others are gone: only their sums stay."""
        gone = [name for name in self.by_worker if name not in worker_ids]
        self._of_gone.add([self.by_worker.pop(name) for name in gone])

    def first_token(self, seconds: float, num_prompt_tokens: int, num_cached_tokens: int, worker_id: str = "") -> None:
        """``worker_id``: where it came from."""
        self.of_worker(worker_id).ttft.observe(seconds)
        self.traffic.prefilled(num_prompt_tokens, num_cached_tokens)

    def ended(self, num_output_tokens: int, duration_s: float | None) -> None:
        """``duration_s`` is None if the sequence failed or was cancelled."""
        self.traffic.num_ended_tokens += num_output_tokens
        if duration_s is not None:
            self.traffic.num_ended += 1
            self.duration.observe(duration_s)

    def judge(self, ttft_s: float, mean_gap_s: float, slo_ttft_ms: float, slo_itl_ms: float) -> None:
        """A whole answer, by its own objectives; 0: by the configured ones."""
        is_late = 1e3 * ttft_s > (slo_ttft_ms or self._objectives.slo_ttft_ms)
        is_slow = 1e3 * mean_gap_s > (slo_itl_ms or self._objectives.itl_ms)
        self.num_late_first += is_late
        self.num_late_gaps += is_slow
        self.num_in_time += not (is_late or is_slow)


class FrontendMetrics(Collector):
    """Everything that one frontend process counts."""

    def __init__(self, *, vllm_names: bool = False, objectives: DisaggConfig | None = None) -> None:
        self.objectives = objectives or DisaggConfig()
        self.requests: Counter[tuple[str, str, str]] = Counter()
        """By endpoint, status and model; the model is empty if the request ended before it was known."""
        self.refusals: Counter[tuple[str, str]] = Counter()
        """By model and reason."""
        self.rejections_of: Callable[[], Mapping[str, int]] = dict
        """Requests that this frontend's own admission control refused, by reason."""
        self.num_in_flight_of: Callable[[], int] = lambda: 0
        """Number of sequences in flight; admission control counts them."""
        self.exporter: TraceExporter | None = None
        self._models: dict[str, ModelMetrics] = {}
        self.workers_of: Callable[[], Mapping[str, int]] = dict
        """Number of connected workers per model."""
        self.fallbacks_of: Callable[[], Mapping[str, int]] = dict
        """Number of requests per model that were placed without the workers' costs."""
        self.places_of: Callable[[], Mapping[tuple[str, ...], int]] = dict
        """Number of requests of the orders auto and prefill-first, by model and place of the prefill."""
        self.loads_of: Callable[[], Sequence[tuple[str, LoadMetrics]]] = tuple
        """The workers' last samples, each with its model's name."""
        self.planners_of: Callable[[], Sequence[PlannerReport]] = tuple
        """What the planners have said last, the one that decides first."""
        self._registry = CollectorRegistry()
        self._registry.register(WithVllmNames(self, OF_FRONTENDS) if vllm_names else self)
        ProcessCollector(registry=self._registry)

    # -- counting -----------------------------------------------------------------------------------------------------

    def of(self, model: str) -> ModelMetrics:
        """The counts of a served model. A sequence keeps them, so that a token looks nothing up."""
        return self._models.get(model) or self._models.setdefault(model, ModelMetrics(self.objectives))

    def answered(self, endpoint: str, status: str, model: str = "") -> None:
        """``status`` is an HTTP status, ``disconnected``, or ``broken`` for a stream that ended with an error.
        ``model`` is a served one or empty: names that clients choose must not become series."""
        self.requests[endpoint, status, model] += 1

    def keep_workers(self, worker_ids: Container[str]) -> None:
        """All others are gone: only the sums over them stay."""
        for model in self._models.values():
            model.keep_workers(worker_ids)

    def latencies(self) -> dict[str, Latencies]:
        """By worker."""
        return {name: found for model in self._models.values() for name, found in model.by_worker.items()}

    def refused(self, model: str, kind: RefusalKind | None = None) -> None:
        """A worker has refused a request."""
        self.refusals[model, UNKNOWN if kind is None else kind.value] += 1

    def refusals_of(self, model: str) -> dict[str, int]:
        """By reason."""
        return {reason: count for (name, reason), count in self.refusals.items() if name == model}

    def counts(self) -> Second:
        """What has been counted since the start, over all models. Of requests only those that generate, which have
        ended in whatever way."""
        outcomes: Counter[Outcome] = Counter()
        for (_, outcome), count in self._outcomes().items():
            outcomes[outcome] += count
        num_limited = sum(count for reason, count in self.rejections_of().items() if reason != IN_FLIGHT)
        models, traffic = self._models.values(), self.traffic()
        latencies = Latencies.none().add(model.latencies for model in models)
        return Second(
            0,
            num_requests=outcomes.total(),
            num_failed=outcomes[Outcome.FAILED],
            num_prompt_tokens=traffic.num_prefilled_tokens,
            ttft=tuple(latencies.ttft.counts),
            itl=tuple(latencies.itl.counts),
            num_answered=outcomes[Outcome.ANSWERED],
            num_refused=outcomes[Outcome.REFUSED],
            num_limited=min(num_limited, outcomes[Outcome.REFUSED]),
            num_judged=traffic.num_ended,
            num_in_time=sum(model.num_in_time for model in models),
            num_late_first=sum(model.num_late_first for model in models),
            num_late_gaps=sum(model.num_late_gaps for model in models),
            num_cached_tokens=traffic.num_cached_tokens,
        )

    def _outcomes(self) -> Counter[tuple[str, Outcome]]:
        """Requests that generate, by model and outcome."""
        found: Counter[tuple[str, Outcome]] = Counter()
        for (endpoint, status, model), count in self.requests.items():
            if endpoint in GENERATING:
                found[model, outcome_of(status)] += count
        return found

    def traffic(self) -> Traffic:
        """What the planner asks for, over all models."""
        counted = [model.traffic for model in self._models.values()]
        return Traffic(**{name: sum(getattr(one, name) for one in counted) for name in Traffic.__struct_fields__})

    # -- rendering ----------------------------------------------------------------------------------------------------

    def render(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for name in self.workers_of():
            self.of(name)
        models = dict(self._models)
        requests = dict.fromkeys(product(GENERATING, COMMON_STATUSES, models), 0) | self.requests
        yield _family("kvrelay_requests", "HTTP requests answered.", ("endpoint", "status", "model"), requests)
        outcomes = dict.fromkeys(product(models, Outcome), 0) | self._outcomes()
        yield _family("kvrelay_request_outcomes", "Requests that generate, by outcome.", ("model", "outcome"), outcomes)
        disconnects = Counter({(name,): 0 for name in ("", *models)})
        for (_, status, name), count in self.requests.items():
            disconnects[name,] += count * (status == "disconnected")
        yield _family("kvrelay_disconnects", "Clients that left early.", ("model",), disconnects)
        refusals = dict.fromkeys(product(models, (*_REFUSALS, UNKNOWN)), 0) | self.refusals
        yield _family("kvrelay_refusals", "Requests that a worker refused.", ("model", "reason"), refusals)
        rejections = {(reason,): count for reason, count in self.rejections_of().items()}
        yield _family("kvrelay_rejections", "Requests refused before any worker got them.", ("reason",), rejections)
        places = dict.fromkeys(product(models, _PLACES), 0) | dict(self.places_of())
        yield _family(
            "kvrelay_pair_placements",
            "Orders auto and prefill-first: pairs, and why there was none.",
            ("model", "place"),
            places,
        )
        fallbacks = dict.fromkeys(models, 0) | dict(self.fallbacks_of())
        yield _by_model("kvrelay_routing_fallbacks", "Requests placed without any worker's costs.", fallbacks)
        yield _by_model(
            "kvrelay_workers", "Connected workers that take requests.", self.workers_of(), GaugeMetricFamily
        )
        yield from _load_gauges(self.loads_of())
        yield from _planner_metrics(self.planners_of())
        yield GaugeMetricFamily(
            "kvrelay_requests_in_flight", "Sequences being generated.", value=self.num_in_flight_of()
        )
        if self.exporter is not None:
            sent = {("sent",): self.exporter.num_sent, ("dropped",): self.exporter.num_dropped}
            yield _family("kvrelay_otlp_traces", "Traces of requests, by what became of them.", ("outcome",), sent)
        missed = {
            (name, objective): count
            for name, model in models.items()
            for objective, count in (("first_token", model.num_late_first), ("between_tokens", model.num_late_gaps))
        }
        yield _family("kvrelay_missed_objectives", "Whole answers beyond an objective.", ("model", "objective"), missed)
        for metric, text, number in _COUNTS:
            yield _by_model(metric, text, {name: number(model) for name, model in models.items()})
        for metric, text, histogram in _HISTOGRAMS:
            family = HistogramMetricFamily(metric, text, labels=("model",))
            for name, model_metrics in models.items():
                times = histogram(model_metrics)
                family.add_metric((name,), buckets=times.buckets(), sum_value=times.total_s)
            yield family


_Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]
_REFUSALS = tuple(kind.value for kind in RefusalKind)
_PLACES = tuple(place.value for place in PrefillPlace)
_COUNTS: tuple[tuple[str, str, Callable[[ModelMetrics], int]], ...] = (
    ("kvrelay_migrations", "Requests continued on another worker.", lambda model: model.num_migrations),
    ("kvrelay_prompt_tokens", "Tokens of prompts.", lambda model: model.traffic.num_prefilled_tokens),
    (
        "kvrelay_cached_prompt_tokens",
        "Prompt tokens found in a prefix cache.",
        lambda model: model.traffic.num_cached_tokens,
    ),
    ("kvrelay_generation_tokens", "Tokens generated.", lambda model: model.traffic.num_ended_tokens),
    ("kvrelay_answers_in_time", "Whole answers within both objectives.", lambda model: model.num_in_time),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelMetrics], Histogram]], ...] = (
    ("kvrelay_time_to_first_token_seconds", "From arrival to the first token.", lambda of: of.latencies.ttft),
    ("kvrelay_inter_token_latency_seconds", "Between two outputs of a sequence.", lambda of: of.latencies.itl),
    ("kvrelay_e2e_request_latency_seconds", "From arrival to the last token.", lambda of: of.duration),
)


def _load_gauges(loads: Sequence[tuple[str, LoadMetrics]]) -> Iterator[Metric]:
    """What the workers published last, for who scales or watches by the frontend alone. Until the next release also
    under the names of the workers' own gauges."""
    shown: tuple[tuple[str, str, Callable[[LoadMetrics], float]], ...] = (
        ("requests_running", "Requests let in, those that wait for their KV included.", lambda load: load.num_admitted),
        ("requests_waiting", "Requests that wait to be let in.", lambda load: load.num_waiting),
        ("kv_usage_ratio", "Share of the KV pool in use.", lambda load: load.cache_usage),
    )
    for name, text, value in shown:
        deprecated = f"Deprecated, gone in the next release: use kvrelay_load_{name}."
        for full_name, shown_text in ((f"kvrelay_load_{name}", text), (f"kvrelay_worker_{name}", deprecated)):
            values = {(model, load.worker_id): value(load) for model, load in loads}
            yield _family(full_name, shown_text, ("model", "worker"), values, GaugeMetricFamily)


def _planner_metrics(reports: Sequence[PlannerReport]) -> Iterator[Metric]:
    """Of the planner that decides; changes of each, or the counter would fall when another one decides."""
    yield GaugeMetricFamily("kvrelay_planners", "Planners in discovery; one decides.", value=len(reports))
    leader = reports[0] if reports else None
    action = leader.actions[0] if leader is not None and leader.actions else None
    wanted = {(kind.__name__.lower(),): isinstance(action, kind) for kind in (Widen, Narrow, Start, Stop, Hold)}
    text = "1: the action that the planner wants now."
    yield _family("kvrelay_planner_wants", text, ("action",), wanted, GaugeMetricFamily)
    lateness = action.numbers.lateness if action is not None else 0.0
    yield GaugeMetricFamily(
        "kvrelay_planner_lateness_ratio", "Expected seconds beyond the objectives, per second.", value=lateness
    )
    text = "Actions that each planner has carried out since its start."
    changes = {(report.planner_id,): report.num_changes for report in reports}
    yield _family("kvrelay_planner_changes", text, ("planner",), changes)


def _by_model(name: str, text: str, counts: Mapping[str, int], kind: _Kind = CounterMetricFamily) -> Metric:
    return _family(name, text, ("model",), {(model,): count for model, count in counts.items()}, kind)


def _family(
    name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, float], kind: _Kind = CounterMetricFamily
) -> Metric:
    """A key of ``values`` is a tuple with a value for each of the labels."""
    family = kind(name, text, labels=labels)
    for of_labels, value in values.items():
        family.add_metric(of_labels, value)
    return family
