"""What a frontend counts, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from kvrelay.core.status import RefusalKind
from kvrelay.frontend.cluster.metrics import FrontendMetrics
from kvrelay.placement.base import PrefillPlace
from kvrelay.planner.report import PlannerReport


def samples(metrics: FrontendMetrics, family: str) -> dict[tuple[str, ...], float]:
    """A counter's values by its labels' values."""
    text = metrics.render().decode()
    found = next(each for each in text_string_to_metric_families(text) if each.name == family)
    return {tuple(sample.labels.values()): sample.value for sample in found.samples if sample.name.endswith("_total")}


def test_refusals_of_workers_are_counted_by_model_and_reason() -> None:
    metrics = FrontendMetrics()
    for kind in (*RefusalKind, RefusalKind.KV_FULL, None):
        metrics.refused("m", kind)
    metrics.refused("other", RefusalKind.GONE)
    expected = {("m", kind.value): 1.0 for kind in RefusalKind}
    expected |= {("m", "kv_full"): 2.0, ("m", "unknown"): 1.0, ("other", "gone"): 1.0}
    assert samples(metrics, "kvrelay_refusals") == expected
    metrics.workers_of = lambda: {"m": 1}
    assert samples(metrics, "kvrelay_refusals") == expected
    assert metrics.refusals_of("other") == {"gone": 1}


def test_outcomes_are_counted_by_model() -> None:
    metrics = FrontendMetrics()
    for status in ("200", "200", "429", "404", "503", "broken", "disconnected"):
        metrics.answered("/v1/completions", status, "m")
    metrics.answered("/v1/messages", "429")
    metrics.answered("/tokenize", "200", "m")
    assert samples(metrics, "kvrelay_request_outcomes") == {
        ("m", "answered"): 2.0,
        ("m", "refused"): 1.0,
        ("m", "invalid"): 1.0,
        ("m", "failed"): 2.0,
        ("m", "disconnected"): 1.0,
        ("", "refused"): 1.0,
    }


def test_own_rejections_and_pairs_are_counted_where_they_are_decided() -> None:
    metrics = FrontendMetrics()
    metrics.rejections_of = lambda: {"in_flight": 3}
    metrics.places_of = lambda: {("m", "local_short"): 2}
    metrics.workers_of = lambda: {}
    assert samples(metrics, "kvrelay_rejections") == {("in_flight",): 3.0}
    assert samples(metrics, "kvrelay_pair_placements") == {("m", "local_short"): 2.0}


def test_changes_are_counted_for_each_planner_whichever_decides() -> None:
    """A counter of the one that decides would fall when another one takes over."""
    first, second = (
        PlannerReport(planner_id=name, host="h", pid=1, started_unix=1.0, mode="act", num_changes=count)
        for name, count in (("a", 7), ("b", 0))
    )
    metrics = FrontendMetrics()
    for reports in ([first, second], [second, first]):
        metrics.planners_of = lambda reports=reports: reports  # type: ignore[misc]
        assert samples(metrics, "kvrelay_planner_changes") == {("a",): 7.0, ("b",): 0.0}


def test_what_vllm_tells_too_has_its_name_and_labels_on_request() -> None:
    metrics = FrontendMetrics(vllm_names=True)
    counts = metrics.of("m")
    counts.first_token(0.1, 5, 2)
    counts.of_worker("w").itl.observe(0.01)
    counts.ended(3, 0.2)
    text = metrics.render().decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    labels = {"model_name": "m", "engine": "0"}
    for name, value in (("prompt_tokens", 5.0), ("prompt_tokens_cached", 2.0), ("generation_tokens", 3.0)):
        (sample,) = found[f"vllm:{name}"].samples
        assert (sample.name, sample.labels, sample.value) == (f"vllm:{name}_total", labels, value)
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        ours, theirs = found[f"kvrelay_{name}"], found[f"vllm:{name}"]
        assert theirs.type == "histogram"
        assert [sample.value for sample in theirs.samples] == [sample.value for sample in ours.samples]
        assert all(sample.labels.items() >= labels.items() for sample in theirs.samples)
    assert "vllm:" not in FrontendMetrics().render().decode()


def test_every_series_of_a_served_model_exists_before_its_first_event() -> None:
    metrics = FrontendMetrics()
    metrics.workers_of = lambda: {"m": 1}

    def series() -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        families = text_string_to_metric_families(metrics.render().decode())
        found = (sample for family in families for sample in family.samples if family.name.startswith("kvrelay_"))
        return {(sample.name, tuple(sorted(sample.labels.items()))) for sample in found}

    before = series()
    for endpoint in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        for status in ("200", "400", "429", "500", "503", "disconnected", "broken"):
            metrics.answered(endpoint, status, "m")
    for kind in (*RefusalKind, None):
        metrics.refused("m", kind)
    counts = metrics.of("m")
    counts.first_token(0.1, 5, 2)
    counts.of_worker("w").itl.observe(0.01)
    counts.ended(3, 0.2)
    counts.judge(9.0, 9.0, 0.0, 0.0)
    counts.num_migrations += 1
    metrics.fallbacks_of = lambda: {"m": 1}
    metrics.places_of = lambda: {("m", place.value): 1 for place in PrefillPlace}
    assert series() == before
    assert all(dict(labels).get("model") == "m" for name, labels in before if "_bucket" in name or "_tokens" in name)


def test_models_are_counted_apart() -> None:
    metrics = FrontendMetrics()
    metrics.of("a").first_token(0.1, 5, 2)
    metrics.of("b").first_token(0.1, 7, 0)
    assert samples(metrics, "kvrelay_prompt_tokens") == {("a",): 5.0, ("b",): 7.0}
    metrics.answered("/v1/completions", "disconnected", "a")
    metrics.answered("http", "404")
    assert samples(metrics, "kvrelay_disconnects") == {("",): 0.0, ("a",): 1.0, ("b",): 0.0}
