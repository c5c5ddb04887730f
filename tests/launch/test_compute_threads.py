"""An engine computes on the thread that loaded it, so that OpenMP has one team of threads and not two."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S

from kvrelay.config import EngineConfig, MockConfig, WorkerConfig
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.request import Request
from kvrelay.engine.step import ModelOutput, SchedulerOutput
from kvrelay.engine.thread import EngineThread
from kvrelay.errors import CheckpointError
from kvrelay.executors.host_memory import HostMemory
from kvrelay.executors.mock import MockExecutor
from kvrelay.launch import worker_process
from kvrelay.launch.worker_process import load_engine

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
CONFIG = EngineConfig(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=64)
SETTINGS = WorkerConfig(model_path=Path("none"), engine_kind="mock", engine=CONFIG, mock=MockConfig(speedup_ratio=0))


class Noting(MockExecutor):
    """Knows which threads used it."""

    def __init__(self, settings: WorkerConfig) -> None:
        self.threads = [threading.get_ident()]
        super().__init__(settings.engine, settings.mock, vocab_size=100, max_model_len=256)

    def warm_up(self) -> None:
        self.threads.append(threading.get_ident())

    def execute(self, work: SchedulerOutput) -> ModelOutput:
        self.threads.append(threading.get_ident())
        return super().execute(work)


def answered(engine: EngineThread) -> None:
    """Run one request."""
    done = threading.Event()
    engine.start(lambda step: done.set() if any(o.finish_reason for o in step.outputs) else None, lambda error: None)
    engine.post(lambda core: core.add_request(Request("r", [1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))))
    assert done.wait(PATIENCE_S)


def test_one_thread_loads_warms_up_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Noting] = []

    def build(name: str, settings: WorkerConfig, memory: HostMemory) -> Noting:
        made.append(Noting(settings))
        return made[0]

    monkeypatch.setattr(worker_process, "build_executor", build)
    engine = load_engine(SETTINGS, "w")
    answered(engine)
    assert engine.close(PATIENCE_S)
    assert len(made[0].threads) > 3
    assert len(set(made[0].threads)) == 1
    assert threading.get_ident() not in made[0].threads


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "engine"]


def test_an_engine_that_never_starts_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "build_executor", lambda name, settings, memory: Noting(settings))
    engine = load_engine(SETTINGS, "w")
    assert len(engine_threads()) == 1
    assert engine.close(PATIENCE_S)
    assert engine_threads() == []


def test_a_failed_load_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, settings: WorkerConfig, memory: HostMemory) -> Noting:
        raise CheckpointError("torn")

    monkeypatch.setattr(worker_process, "build_executor", fail)
    with pytest.raises(CheckpointError, match="torn"):
        load_engine(SETTINGS, "w")


STEPS = """
import os, threading
from kvrelay import LLM, SamplingParams

def native_threads():
    python = {thread.native_id for thread in threading.enumerate()}
    return {int(name) for name in os.listdir("/proc/self/task")} - python

with LLM(dtype="float32", num_blocks=256, max_num_seqs=16, num_threads=2, device="cpu") as llm:
    before = native_threads()
    prompts = [[20 + (row * 31 + i * 7) % 400 for i in range(200)] for row in range(16)]
    llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    after = native_threads()
print(len(before), len(after - before))
"""


@linux_only
def test_steps_start_no_compute_threads() -> None:
    """Warming up has started all of them: those of the team of the thread that loaded the model."""
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    num_warm, num_started = map(int, done.stdout.split())
    assert num_warm > 0
    assert num_started == 0


RANKS = """
import os
import psutil
from kvrelay import LLM, SamplingParams
from kvrelay.executors.torch.parallel import processes

with LLM(dtype="float32", num_blocks=256, max_num_seqs=16, num_threads=4, tp=2, device="cpu") as llm:
    ranks = [child for child in psutil.Process().children() if processes.MODULE in child.cmdline()]
    pids = [rank.pid for rank in ranks]
    assert len(pids) == 2
    before = [set(os.listdir(f"/proc/{pid}/task")) for pid in pids]
    prompts = [[20 + (row * 31 + i * 7) % 400 for i in range(200)] for row in range(16)]
    llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    after = [set(os.listdir(f"/proc/{pid}/task")) for pid in pids]
print(min(map(len, before)), sum(len(later - earlier) for earlier, later in zip(before, after)))
"""


@linux_only
@pytest.mark.matrix
def test_steps_start_no_compute_threads_in_ranks() -> None:
    done = subprocess.run([sys.executable, "-c", RANKS], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    num_warm, num_started = map(int, done.stdout.split())
    assert num_warm > 1
    assert num_started == 0
