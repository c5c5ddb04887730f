"""The frontend's metrics, kept cheap: counting on the token path is a bisection and an addition.

prometheus-client only renders these counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.core.events import LoadMetrics
from kvrelay.core.status import RefusalKind

LATENCY_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
UNKNOWN = "unknown"
"""The reason of a refusal by a worker that tells none."""
TOKEN_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Histogram:
    """Counts per bucket and the sum, in seconds."""

    __slots__ = ("_bounds", "counts", "total_s")

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds = tuple(bounds_s)
        self.counts = [0] * (len(self._bounds) + 1)
        self.total_s = 0.0

    def observe(self, value_s: float) -> None:
        self.counts[bisect_left(self._bounds, value_s)] += 1
        self.total_s += value_s

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, as Prometheus expects them."""
        running, rows = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self.counts):
            running += count
            rows.append((bound, float(running)))
        return rows


class FrontendMetrics(Collector):
    """Everything that one frontend process counts."""

    def __init__(self) -> None:
        self.ttft = Histogram(LATENCY_BUCKETS_S)
        self.itl = Histogram(TOKEN_BUCKETS_S)
        self.duration = Histogram(LATENCY_BUCKETS_S)
        self.requests: Counter[tuple[str, str]] = Counter()
        self.migrations: Counter[str] = Counter()
        self.refusals: Counter[tuple[str, str]] = Counter()
        """By model and reason."""
        self.rejections_of: Callable[[], Mapping[str, int]] = dict
        """Requests that this frontend's own admission control refused, by reason."""
        self.num_in_flight_of: Callable[[], int] = lambda: 0
        """Number of sequences in flight; admission control counts them."""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_disconnects = 0
        self._workers: Callable[[], Mapping[str, int]] = dict
        self._fallbacks: Callable[[], Mapping[str, int]] = dict
        self._places: Callable[[], Mapping[tuple[str, ...], int]] = dict
        self._loads: Callable[[], Sequence[tuple[str, LoadMetrics]]] = tuple
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def watch_workers(self, count_by_model: Callable[[], Mapping[str, int]]) -> None:
        """Source of the number of connected workers per model."""
        self._workers = count_by_model

    def watch_loads(self, loads: Callable[[], Sequence[tuple[str, LoadMetrics]]]) -> None:
        """Where the workers' last samples come from, each with its model's name."""
        self._loads = loads

    def watch_fallbacks(self, count_by_model: Callable[[], Mapping[str, int]]) -> None:
        """Source of the number of requests per model that were placed without the workers' costs."""
        self._fallbacks = count_by_model

    def watch_places(self, count: Callable[[], Mapping[tuple[str, ...], int]]) -> None:
        """Source of the number of prefill-first requests by model and place of the prefill."""
        self._places = count

    # -- counting -----------------------------------------------------------------------------------------------------

    def first_token(self, seconds: float, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        self.ttft.observe(seconds)
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens

    def sequence_ended(self, num_output_tokens: int, duration_s: float | None) -> None:
        """``duration_s`` is None if the sequence failed or was cancelled."""
        self.num_output_tokens += num_output_tokens
        if duration_s is not None:
            self.duration.observe(duration_s)

    def answered(self, endpoint: str, status: str) -> None:
        """``status`` is an HTTP status, ``disconnected``, or ``broken`` for a stream that ended with an error."""
        self.requests[endpoint, status] += 1
        if status == "disconnected":
            self.num_disconnects += 1

    def migrated(self, model: str) -> None:
        self.migrations[model] += 1

    def refused(self, model: str, kind: RefusalKind | None = None) -> None:
        """A worker has refused a request."""
        self.refusals[model, UNKNOWN if kind is None else kind.value] += 1

    def refusals_of(self, model: str) -> dict[str, int]:
        """By reason."""
        return {reason: count for (name, reason), count in self.refusals.items() if name == model}

    # -- rendering ----------------------------------------------------------------------------------------------------

    def render(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield _by_labels("kvrelay_requests", "HTTP requests answered.", ("endpoint", "status"), self.requests)
        yield _by_model("kvrelay_migrations", "Requests continued on another worker.", self.migrations)
        yield _by_labels("kvrelay_refusals", "Requests that a worker refused.", ("model", "reason"), self.refusals)
        rejections = {(reason,): count for reason, count in self.rejections_of().items()}
        yield _by_labels("kvrelay_rejections", "Requests refused before any worker got them.", ("reason",), rejections)
        yield _by_labels(
            "kvrelay_pair_placements",
            "Prefill-first: pairs, and why there was none.",
            ("model", "place"),
            self._places(),
        )
        yield _by_model(
            "kvrelay_routing_fallbacks", "Requests placed by weights: no worker's costs were known.", self._fallbacks()
        )
        workers = GaugeMetricFamily("kvrelay_workers", "Connected workers that take requests.", labels=("model",))
        for model, count in self._workers().items():
            workers.add_metric((model,), count)
        yield workers
        yield from _load_gauges(self._loads())
        yield GaugeMetricFamily(
            "kvrelay_requests_in_flight", "Sequences being generated.", value=self.num_in_flight_of()
        )
        yield CounterMetricFamily("kvrelay_prompt_tokens", "Tokens of prompts.", value=self.num_prompt_tokens)
        yield CounterMetricFamily(
            "kvrelay_cached_prompt_tokens", "Prompt tokens found in a prefix cache.", value=self.num_cached_tokens
        )
        yield CounterMetricFamily("kvrelay_generation_tokens", "Tokens generated.", value=self.num_output_tokens)
        yield CounterMetricFamily("kvrelay_disconnects", "Clients that left early.", value=self.num_disconnects)
        yield _histogram("kvrelay_time_to_first_token_seconds", "From arrival to the first token.", self.ttft)
        yield _histogram("kvrelay_inter_token_latency_seconds", "Between two outputs of a sequence.", self.itl)
        yield _histogram("kvrelay_e2e_request_latency_seconds", "From arrival to the last token.", self.duration)


def _load_gauges(loads: Sequence[tuple[str, LoadMetrics]]) -> Iterator[Metric]:
    """What the workers published last, for who scales or watches by the frontend alone."""
    shown: tuple[tuple[str, str, Callable[[LoadMetrics], float]], ...] = (
        ("kvrelay_worker_requests_running", "Sequences that run.", lambda load: load.request_active_slots),
        ("kvrelay_worker_requests_waiting", "Requests that wait.", lambda load: load.num_requests_waiting),
        ("kvrelay_worker_kv_usage_ratio", "Share of the KV pool in use.", lambda load: load.gpu_cache_usage_perc),
    )
    for name, text, value in shown:
        family = GaugeMetricFamily(name, text, labels=("model", "worker"))
        for model, load in loads:
            family.add_metric((model, load.worker_id), value(load))
        yield family


def _by_model(name: str, text: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    return _by_labels(name, text, ("model",), {(model,): count for model, count in counts.items()})


def _by_labels(name: str, text: str, labels: tuple[str, ...], counts: Mapping[Any, int]) -> CounterMetricFamily:
    """A key of ``counts`` is a tuple with a value for each of the labels."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts.items():
        family.add_metric(values, count)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text)
    family.add_metric((), buckets=histogram.buckets(), sum_value=histogram.total_s)
    return family
