"""The engine's benchmark, free and bound by a grammar."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.engine_turns import (
    run_obeying_benchmark,
    run_ranks_benchmark,
    run_read_benchmark,
    run_structured_benchmark,
)

from kvrelay.bench.engine import BatchLoad
from kvrelay.config import EngineConfig, RunnerConfig
from kvrelay.data import bundled_checkpoint_path
from kvrelay.errors import ConfigError
from kvrelay.executors.torch.checkpoints.architectures import size_of
from kvrelay.executors.torch.checkpoints.make_model import make_model


def test_free_and_bound_answers_have_the_same_length() -> None:
    """A pass of another length than asked for raises."""
    runner, engine = RunnerConfig(dtype="float32"), EngineConfig(num_blocks=64, max_num_waiting=2, kv_watermark=0)
    report = run_structured_benchmark(bundled_checkpoint_path(), runner, engine, BatchLoad(2, 8, 24), 1)
    assert report["cost_min"] == report["cost"] == report["cost_max"] < 1
    assert report["bound_tokens_per_s"] > 0


def test_answers_that_obey_their_grammar_are_as_long_as_free_ones() -> None:
    runner, engine = RunnerConfig(dtype="float32"), EngineConfig(num_blocks=64)
    report = run_obeying_benchmark(bundled_checkpoint_path(), runner, engine, BatchLoad(2, 8, 24), 1)
    assert report["cost_min"] == report["cost"] == report["cost_max"] > -1
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


ONE_THREAD, SMALL_POOL = RunnerConfig(num_threads=1), EngineConfig(num_blocks=16)


def test_steps_beside_a_read_of_the_weights() -> None:
    """The checkpoint's head is its embedding, so a step reads every tensor."""
    path = bundled_checkpoint_path()
    report = run_read_benchmark(path, ONE_THREAD, SMALL_POOL, BatchLoad(7, 8, 4), 1)
    assert report["weights_bytes"] == tensor_bytes(path)
    assert report["ratio_min"] == report["ratio"] == report["step_bytes_per_s"] / report["read_bytes_per_s"] > 0
    assert report["num_prompts"] == 1


def test_a_step_does_not_read_an_embedding_that_is_not_the_head(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", "tiny")
    sizes = size_of("llama", "tiny")
    # In float32 weights of bfloat16 are read as such, by kernels that other tests need, too: compiling them takes 12 s.
    runner = RunnerConfig(num_threads=1, dtype="float32")
    report = run_read_benchmark(tmp_path, runner, SMALL_POOL, BatchLoad(1, 8, 2), 1)
    assert report["weights_bytes"] == tensor_bytes(tmp_path) - sizes.vocab * sizes.hidden * 2


def test_a_step_does_not_read_every_expert(tmp_path: Path) -> None:
    make_model(tmp_path, "mixtral", "tiny")
    with pytest.raises(ConfigError, match="without experts"):
        run_read_benchmark(tmp_path, ONE_THREAD, SMALL_POOL, BatchLoad(1, 8, 2), 1)


def tensor_bytes(path: Path) -> int:
    """What the checkpoint's file holds after its header."""
    file = path / "model.safetensors"
    return file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little")


def test_an_answer_of_one_token_has_no_steps_to_time() -> None:
    with pytest.raises(ConfigError, match="after the first token"):
        run_read_benchmark(bundled_checkpoint_path(), RunnerConfig(), EngineConfig(), BatchLoad(1, 8, 1), 1)
