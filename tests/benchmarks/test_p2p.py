"""The comparison runs and reports what it was asked for; its figures are nobody's test."""

from __future__ import annotations

from benchmarks.p2p import RAW, p2p_text, run_p2p_benchmark
from benchmarks.p2p_peers import peers_text, run_peers_benchmark

from kvrelay.config import TransferConfig


def test_contenders_take_turns_at_every_size() -> None:
    result = run_p2p_benchmark(
        TransferConfig(), contenders=("PUT_ASYNC", "GET", RAW), sizes=(16384, 65536), total_bytes=1 << 20, num_rounds=2
    )
    assert [(row.contender, row.piece_bytes) for row in result.rows] == [
        (name, size) for size in (16384, 65536) for name in ("PUT_ASYNC", "GET", RAW)
    ]
    assert all(row.bytes_per_s > 0 and row.alone_s > 0 for row in result.rows)
    assert all(row.of_raw == 1.0 for row in result.rows if row.contender == RAW)
    assert "of raw gloo" in p2p_text(result)


def test_peers_cost_threads_and_descriptors_as_long_as_they_are_connected() -> None:
    none, one, three = run_peers_benchmark((0, 1, 3))
    assert one.num_threads > none.num_threads
    assert three.num_threads - one.num_threads == 2 * (one.num_threads - none.num_threads)
    assert three.num_descriptors > one.num_descriptors > none.num_descriptors
    assert one.contact_s > 0
    assert "descriptors" in peers_text([none, one, three])
