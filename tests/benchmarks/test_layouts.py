"""Unlike layouts over a transport: every case is measured; its figures are no test."""

from __future__ import annotations

import importlib.util

import pytest
from benchmarks.layouts import run_layouts_benchmark

from kvrelay.config import TransferConfig


@pytest.mark.parametrize("transport", ["nixl", "shm"])
def test_every_pair_of_layouts_is_measured(transport: str) -> None:
    if transport == "nixl" and importlib.util.find_spec("nixl_cu13") is None:
        pytest.skip("NIXL is not installed")
    rows = run_layouts_benchmark(TransferConfig(transport=transport), 1 << 20, 2)
    assert len({(row["op"], row["case"], row["model"]) for row in rows}) == len(rows) == 24
    for row in rows:
        saves = transport == "nixl" and row["num_staged_descriptors"] < row["num_descriptors"]
        assert (row["staged_gb_per_s"] is not None) == saves
        assert row["num_descriptors"] == 1 or row["case"] not in ("contiguous", "PP 2->1")
