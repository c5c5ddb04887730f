"""Wake-ups are timed between real processes."""

from __future__ import annotations

from benchmarks.dp_wake import measure_wakes


def test_both_carriers_wake_another_process() -> None:
    for carrier in ("rpc", "shm"):
        found = measure_wakes(carrier, 3, 0.001)
        assert 0 < found["p50_ms"] <= found["p99_ms"]
