"""The benchmark: it measures what it says, prints tables and JSON, and refuses bad input. No figure is judged."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.router import POLICIES, measure_peer, router
from benchmarks.router_speed import measure_growth
from click.testing import CliRunner

from kvrelay.errors import InvalidInputError

FAST = ["--num-workers", "4", "--blocks-per-worker", "1024", "--repeats", "10"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    lines = [
        {"timestamp": 100 * at, "input_length": 1536, "output_length": 4, "hash_ids": [0, at % 3 + 1, 10 + at]}
        for at in range(30)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_json(trace: Path) -> None:
    options = [*FAST, "--max-blocks", "10000", "--trace", str(trace), "--trace-workers", "2", "--json"]
    done = CliRunner().invoke(router, options, catch_exceptions=False)
    report = json.loads(done.stdout)
    assert platform.python_version() in report["machine"]
    assert report["versions"]["numpy"] == np.__version__
    assert report["repeats"] == 10
    assert report["speed"]["num_workers"] == 4
    assert report["speed"]["hash_8192_list"]["p50_us"] > 0
    assert [rates["blocks_per_event"] for rates in report["speed"]["events"]] == [8, 512]
    assert [(row["num_workers"], row["num_blocks"] // 1000) for row in report["growth"]][-1] == (64, 9)
    (replay,) = report["replays"]
    assert [result["policy"] for result in replay["results"]] == list(POLICIES)
    assert replay["infinite_hit_ratio"] == pytest.approx((29 + 27) / 90)
    assert report["peer"] is None


def test_tables(trace: Path) -> None:
    options = [*FAST, "--no-growth", "--trace", str(trace), "--trace-limit", "5"]
    done = CliRunner().invoke(router, options, catch_exceptions=False, env={"COLUMNS": "160"})
    for text in (
        "10 calls a figure",
        "hash 8,192 tokens, a list",
        "events of 512 blocks, a second: removed",
        "power-of-two",
        "small: 16",
    ):
        assert text in done.stdout
    assert "growth" not in done.stdout


def test_a_row_of_growth_has_the_size_it_names() -> None:
    row = measure_growth(8, 5000, 10)
    assert row["num_blocks"] == 512 * (5000 // 512)
    assert row["memory_mib"] > 0.1


@pytest.mark.parametrize(
    "options", [["--trace", "/nowhere/trace.jsonl"], ["--time-scale", "0"], ["--time-scale", "nan"]]
)
def test_bad_input_is_refused(options: list[str]) -> None:
    with pytest.raises(InvalidInputError):
        CliRunner().invoke(router, [*FAST, "--no-growth", *options], catch_exceptions=False)


def test_a_python_without_the_peer_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="No module named 'dynamo'"):
        measure_peer(Path(sys.executable), 2, 1024, 10)
    with pytest.raises(InvalidInputError, match="cannot be measured"):
        measure_peer(tmp_path / "python", 2, 1024, 10)
