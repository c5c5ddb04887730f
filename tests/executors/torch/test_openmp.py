"""One OpenMP library per process: with torch's beside Numba's there would be two teams of threads on the same cores."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIBRARIES = """
print(len({line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}))
"""
ENGINE = """
from pathlib import Path
from kvrelay.config import EngineConfig, RunnerConfig
from kvrelay.data import bundled_checkpoint_path
from kvrelay.executors.torch import build_executor
engine = EngineConfig(num_blocks=8, max_num_seqs=1)
build_executor(bundled_checkpoint_path(), RunnerConfig(device="cpu"), engine).shutdown()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_torch_and_numba_share_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENGINE + LIBRARIES], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1"]
