"""The benchmark runs and reports what it was asked for; its figures are nobody's test."""

from __future__ import annotations

import importlib.util

import pytest

from kvrelay.bench.transfer import run_transfer_benchmark, transfer_text
from kvrelay.config import TransferConfig
from kvrelay.errors import TransferError


@pytest.mark.parametrize("transport", ["nixl", "shm"])
def test_every_size_is_measured_in_both_directions(transport: str) -> None:
    if transport == "nixl" and importlib.util.find_spec("nixl_cu13") is None:
        pytest.skip("NIXL is not installed")
    config = TransferConfig(transport=transport)
    result = run_transfer_benchmark(config, piece_bytes=(4096, 65536), total_bytes=1 << 20, num_rounds=2)
    assert result["transport"] == transport
    labels = ("op", "placement", "piece_bytes", "num_pieces", "total_bytes")
    assert [tuple(row[label] for label in labels) for row in result["rows"]] == [
        (op, placement, size, (1 << 20) // size, 1 << 20)
        for op in ("write", "read")
        for placement in ("ordered", "scattered")
        for size in (4096, 65536)
    ]
    assert all(row["bytes_per_s"] == row["total_bytes"] / row["seconds"] for row in result["rows"])
    assert all(row["of_memcpy"] > 0 for row in result["rows"])
    assert "of memcpy" in transfer_text(result)


def test_pieces_larger_than_the_total_are_refused() -> None:
    with pytest.raises(TransferError):
        run_transfer_benchmark(piece_bytes=(4096,), total_bytes=1024)
