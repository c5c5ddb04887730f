"""Runs a step on a device: models, kernels, attention, sampling. The door is ``build_executor``.

Torch lives here and is imported when an executor is built, not before.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.config.settings import EngineConfig, RunnerConfig
from kvrelay.engine.base import Executor
from kvrelay.runner.parallel import ParallelRank

if TYPE_CHECKING:
    from collections.abc import MutableMapping

__all__ = ["ParallelRank", "build_executor"]


def build_executor(
    model_dir: Path, runner: RunnerConfig, engine: EngineConfig, *, rank: ParallelRank | None = None
) -> Executor:
    """Load the checkpoint in ``model_dir`` and allocate its KV pool; ``rank`` is this process's part of the model.

    Raises CheckpointError, UnsupportedModelError or ConfigError, each with one line that names the culprit.
    """
    if "torch" not in sys.modules:
        _let_threads_sleep(os.environ)
    from kvrelay.runner.build import build_model_runner

    return build_model_runner(model_dir, runner, engine, rank or ParallelRank())


def _let_threads_sleep(environment: MutableMapping[str, str]) -> None:
    """OpenMP threads that wait shall sleep, not spin: workers share cores with each other and with the frontend.

    The OpenMP libraries of torch and Numba read this when they are loaded, and only from the environment.
    """
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
