"""The benchmark runs and reports what it was asked for; its figures are nobody's test."""

from __future__ import annotations

import importlib.util

import pytest

from kvrelay.bench.parts.transfer import run_transfer_benchmark
from kvrelay.errors import TransferError


@pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="NIXL is not installed")
def test_every_size_is_measured_in_both_directions() -> None:
    result = run_transfer_benchmark(piece_bytes=(4096, 65536), total_bytes=1 << 20, num_rounds=2)
    assert [(row.op, row.piece_bytes, row.num_pieces, row.total_bytes) for row in result.rows] == [
        ("write", 4096, 256, 1 << 20),
        ("write", 65536, 16, 1 << 20),
        ("read", 4096, 256, 1 << 20),
        ("read", 65536, 16, 1 << 20),
    ]
    assert all(row.bytes_per_s == row.total_bytes / row.seconds for row in result.rows)


def test_pieces_larger_than_the_total_are_refused() -> None:
    with pytest.raises(TransferError):
        run_transfer_benchmark(piece_bytes=(4096,), total_bytes=1024)
