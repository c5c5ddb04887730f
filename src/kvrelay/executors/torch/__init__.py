"""Runs a step on a device: models, kernels, attention, sampling. The door is ``build_executor``.

Torch is imported when an executor is built, not before.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from kvrelay.config import WorkerConfig
from kvrelay.config.settings import EngineConfig, GroupConfig, RunnerConfig
from kvrelay.engine.step import Executor
from kvrelay.executors.host_memory import ANYWHERE, HostMemory

__all__ = ["HostMemory", "build_executor", "from_settings"]

# Waiting OpenMP threads must sleep, not spin: workers share cores with each other and with the frontend, and spinning
# threads slow each other down thirtyfold. A few microseconds of spinning bridge the gap between two kernels of a step
# (a fifth more tokens with two threads). Torch's and Numba's libraries read this setting once, when they are loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def share_openmp() -> None:
    """Load the OpenMP library of Numba's kernels, before torch, which then uses the same.

    After torch, which brings one of its own, there would be two: two teams of threads on the same cores, and a step of
    one sequence takes 1.7 times as long. Too late in a program that has imported torch already.
    """
    if "torch" not in sys.modules:
        with suppress(ImportError):
            import_module("numba.np.ufunc.omppool")


# oneDNN generates the code of a matrix product anew for every number of rows, 0.4 MB each, and keeps 1024 of them: in
# its own cache and, counted apart, in torch's. 256 are the numbers of rows of about 50 batches. Generating one again
# takes half a millisecond. Both libraries read the setting once, when torch is imported.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
os.environ.setdefault("LRU_CACHE_CAPACITY", "256")


def build_executor(
    model_dir: Path,
    runner: RunnerConfig,
    engine: EngineConfig,
    memory: HostMemory = ANYWHERE,
    group: GroupConfig | None = None,
    holding_bytes: int = 0,
    spill_bytes: int = 0,
) -> Executor:
    """Load the checkpoint in ``model_dir`` and allocate its KV pool: in this process, or in rank processes if
    ``runner.tp`` or ``runner.pp`` is above 1, or with ``group.ep``.

    Raises CheckpointError, UnsupportedModelError or ConfigError, each with one line that names the cause.
    """
    share_openmp()
    if runner.num_ranks > 1 or (group is not None and group.ep):
        from kvrelay.executors.torch.parallel.executor import ParallelExecutor

        return ParallelExecutor(model_dir, runner, engine, memory, group, holding_bytes)
    from kvrelay.executors.torch.build import build_model_runner

    return build_model_runner(
        model_dir, runner, engine, allocate=memory.allocate, holding_bytes=holding_bytes, spill_bytes=spill_bytes
    )


def from_settings(settings: WorkerConfig, memory: HostMemory) -> Executor:
    """The registry's builder of engine ``torch``. Raises what ``build_executor`` raises."""
    return build_executor(
        settings.model_path,
        settings.runner,
        settings.engine,
        memory,
        settings.group,
        settings.holding_bytes,
        settings.spill_bytes,
    )
