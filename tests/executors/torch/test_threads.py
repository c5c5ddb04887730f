"""How many threads a runner computes with, and that the log says so."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvrelay.config.settings import EngineConfig, RunnerConfig
from kvrelay.core import cores
from kvrelay.executors.torch.build import build_model_runner
from kvrelay.executors.torch.parallel.executor import threads_per_rank

ENGINE = EngineConfig(num_blocks=8, max_num_seqs=1, max_model_len=64)


@pytest.fixture
def quota(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    return lambda value: monkeypatch.setattr(cores, "cpu_quota", lambda *_: value)


@pytest.mark.parametrize(("num_threads", "level"), [(0, logging.INFO), (1, logging.INFO), (2, logging.WARNING)])
def test_a_quota_of_one_core_means_one_thread(
    checkpoint_of: Callable[[str], Path],
    quota: Callable[[float], None],
    caplog: pytest.LogCaptureFixture,
    num_threads: int,
    level: int,
) -> None:
    before = torch.get_num_threads()
    quota(1.5)
    try:
        with caplog.at_level(logging.INFO):
            build_model_runner(checkpoint_of("llama"), RunnerConfig(device="cpu", num_threads=num_threads), ENGINE)
        assert torch.get_num_threads() == max(num_threads, 1)
    finally:
        torch.set_num_threads(before)
    told = next(record for record in caplog.records if "computing with" in record.message)
    assert told.levelno == level
    assert "a CPU quota of 1.5" in told.message


@pytest.mark.parametrize(("requested", "num_ranks", "count"), [(0, 1, 1), (0, 2, 1), (8, 2, 1)])
def test_ranks_share_what_the_quota_allows(
    quota: Callable[[float], None], requested: int, num_ranks: int, count: int
) -> None:
    quota(1.0)
    assert threads_per_rank(requested, num_ranks) == count


COUNT_THREADS = """
import os, sys
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
from pathlib import Path
import torch
from kvrelay.config.settings import EngineConfig, RunnerConfig
from kvrelay.executors.torch.build import build_model_runner
from kvrelay.frontend.side_threads import NUM_THREADS
build_model_runner(Path(sys.argv[1]), RunnerConfig(device="cpu"), EngineConfig(num_blocks=8, max_model_len=64))
import numba
print(torch.get_num_threads(), numba.get_num_threads(), NUM_THREADS)
"""


def test_a_process_on_one_core_computes_with_one_thread(checkpoint_of: Callable[[str], Path]) -> None:
    """Side threads are never less than two: a long piece of work must not keep others waiting."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this process has one core itself")
    command = [sys.executable, "-c", COUNT_THREADS, str(checkpoint_of("llama"))]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() == ["1", "1", "2"]


@pytest.mark.parametrize(("limit", "count"), [("1", 1), ("2", 2), ("0", 2), ("two", 2), ("", 2)])
def test_openmps_own_limit_bounds_the_threads(
    checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, limit: str, count: int
) -> None:
    """With fewer threads than torch counts on, oneDNN's products are wrong."""
    monkeypatch.setenv("OMP_THREAD_LIMIT", limit)
    before = torch.get_num_threads()
    try:
        build_model_runner(checkpoint_of("llama"), RunnerConfig(device="cpu", num_threads=2), ENGINE)
        assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)
