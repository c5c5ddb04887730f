"""What a frontend counts, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from kvrelay.core.status import RefusalKind
from kvrelay.frontend.metrics import FrontendMetrics


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
    assert metrics.refusals_of("other") == {"gone": 1}


def test_own_rejections_and_pairs_are_counted_where_they_are_decided() -> None:
    metrics = FrontendMetrics()
    metrics.rejections_of = lambda: {"in_flight": 3}
    metrics.watch_places(lambda: {("m", "local_short"): 2})
    assert samples(metrics, "kvrelay_rejections") == {("in_flight",): 3.0}
    assert samples(metrics, "kvrelay_pair_placements") == {("m", "local_short"): 2.0}
