"""Executors of several ranks over the tiny checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvrelay.config.settings import EngineConfig, RunnerConfig
from kvrelay.executors.torch.parallel.executor import ParallelExecutor

TIMEOUT_S = 60.0
"""Of a rank without progress: for a busy machine. Tests of hangs choose their own."""


def start(model: Path, tp: int, pp: int, *, timeout_s: float = TIMEOUT_S, **engine: int) -> ParallelExecutor:
    settings = {"num_blocks": 256, "max_model_len": 512, "max_num_seqs": 8} | engine
    runner = RunnerConfig(dtype="float32", device="cpu", tp=tp, pp=pp, rank_timeout_s=timeout_s)
    return ParallelExecutor(model, runner, EngineConfig(**settings))


@pytest.fixture
def start_ranks() -> Iterator[Callable[..., ParallelExecutor]]:
    """As ``start``; they are shut down after the test."""
    started: list[ParallelExecutor] = []

    def make(*arguments: object, **settings: object) -> ParallelExecutor:
        started.append(start(*arguments, **settings))  # type: ignore[arg-type]
        return started[-1]

    yield make
    for executor in started:
        executor.shutdown()
