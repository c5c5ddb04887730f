"""The engine's benchmark, free and bound by a grammar."""

from __future__ import annotations

from kvrelay.bench.parts.engine import BatchLoad, run_structured_benchmark
from kvrelay.config import EngineConfig, RunnerConfig
from kvrelay.data import bundled_checkpoint_path


def test_free_and_bound_answers_have_the_same_length() -> None:
    """A pass of another length than asked for raises."""
    runner, engine = RunnerConfig(dtype="float32"), EngineConfig(num_blocks=64, max_num_waiting=2, kv_watermark=0)
    report = run_structured_benchmark(bundled_checkpoint_path(), runner, engine, BatchLoad(2, 8, 24), 1)
    assert report["cost_min"] == report["cost"] == report["cost_max"] < 1
    assert report["bound_tokens_per_s"] > 0
