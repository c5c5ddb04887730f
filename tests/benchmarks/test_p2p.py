"""The comparison runs and reports what it was asked for; its figures are nobody's test."""

from __future__ import annotations

import pytest
from benchmarks.p2p import RAW, run_p2p_benchmark
from benchmarks.p2p_peers import run_peers_benchmark

from benchmarks import p2p, p2p_peers
from kvrelay.bench.report.table import results_table
from kvrelay.config import TransferConfig

pytestmark = pytest.mark.matrix  # each end is a process that imports torch


def test_contenders_take_turns_at_every_size() -> None:
    rows = run_p2p_benchmark(
        TransferConfig(), contenders=("GET", RAW), sizes=(16384, 65536), total_bytes=1 << 20, num_rounds=2
    )
    assert [(row["contender"], row["piece_bytes"]) for row in rows] == [
        (name, size) for size in (16384, 65536) for name in ("GET", RAW)
    ]
    assert all(row["gb_per_s"] > 0 and row["alone_us"] > 0 for row in rows)
    assert "of raw gloo" in results_table(rows, p2p.COLUMNS)
    assert all(row["of_raw"] == 1.0 for row in rows if row["contender"] == RAW)


def test_peers_cost_threads_and_descriptors_as_long_as_they_are_connected() -> None:
    rows = run_peers_benchmark((0, 1, 3))
    for name in ("num_threads", "num_descriptors"):
        counts = [row[name] for row in rows]
        assert counts == sorted(set(counts)), "each peer costs some; a thread of the start may still be ending"
    assert rows[1]["contact_s"] > 0
    assert results_table(rows, p2p_peers.COLUMNS).splitlines()[-1].startswith("3 ")
