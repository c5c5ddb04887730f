"""The engine's benchmark, free and bound by a grammar."""

from __future__ import annotations

import pytest
from benchmarks.engine_turns import run_ranks_benchmark, run_structured_benchmark

from kvrelay.bench.engine import BatchLoad
from kvrelay.config import EngineConfig, RunnerConfig
from kvrelay.data import bundled_checkpoint_path
from kvrelay.errors import ConfigError


def test_free_and_bound_answers_have_the_same_length() -> None:
    """A pass of another length than asked for raises."""
    runner, engine = RunnerConfig(dtype="float32"), EngineConfig(num_blocks=64, max_num_waiting=2, kv_watermark=0)
    report = run_structured_benchmark(bundled_checkpoint_path(), runner, engine, BatchLoad(2, 8, 24), 1)
    assert report["cost_min"] == report["cost"] == report["cost_max"] < 1
    assert report["bound_tokens_per_s"] > 0


@pytest.mark.matrix
def test_ranks_beside_one_process() -> None:
    runner = RunnerConfig(dtype="float32", device="cpu", tp=2, num_threads=2, rank_timeout_s=60.0)
    engine = EngineConfig(num_blocks=64, max_num_waiting=2, kv_watermark=0)
    report = run_ranks_benchmark(bundled_checkpoint_path(), runner, engine, BatchLoad(2, 8, 4), 1)
    assert report["ratio_min"] == report["ratio"] == report["ratio_max"] > 0
    assert report["ranks_tokens_per_s"] > 0 < report["one_process_tokens_per_s"]


def test_one_rank_cannot_be_compared_with_itself() -> None:
    with pytest.raises(ConfigError, match="give --tp or --pp"):
        run_ranks_benchmark(bundled_checkpoint_path(), RunnerConfig(), EngineConfig(), BatchLoad(2, 8, 4), 1)
