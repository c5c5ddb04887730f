"""Wake-ups are timed between real processes."""

from __future__ import annotations

from benchmarks.dp_wake import measure_wakes


def test_every_way_wakes_another_process() -> None:
    found = measure_wakes(3, 0.001)
    assert list(found) == ["eventfd", "shm", "rpc"]
    for each in found.values():
        assert 0 < each["p50_ms"] <= each["p90_ms"] <= each["p99_ms"]
