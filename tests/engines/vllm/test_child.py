"""vLLM's processes end with the worker, even if that one is killed, and also while they load the model."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.patience import PATIENCE_S, until

from kvrelay.core.child_process import WORKER_PID
from kvrelay.engines.vllm.child import SCRATCH
from kvrelay.engines.vllm.cores import CORES

CHILD = [sys.executable, "-c", "import time, kvrelay.engines.vllm.child; print('.', flush=True); time.sleep(600)"]
"""vLLM's processes import this module before they load the model."""


def test_a_process_ends_with_the_worker_that_its_environment_names(tmp_path: Path) -> None:
    """And removes its temporary directory, which a killed worker cannot."""
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    directory = tmp_path / "kvrelay-vllm-1"
    directory.mkdir()
    (directory / "events").touch()
    env = {**os.environ, WORKER_PID: str(worker.pid), SCRATCH: str(directory)}
    try:
        with subprocess.Popen(CHILD, stdout=subprocess.PIPE, env=env) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b".\n"
            assert child.poll() is None
            assert directory.exists()
            worker.kill()
            worker.wait()
            assert child.wait(PATIENCE_S) == -9
            assert not directory.exists()
    finally:
        worker.kill()
        worker.wait()
    # One whose worker has ended before ends at once.
    late = subprocess.run(CHILD, capture_output=True, env=env, check=False, timeout=PATIENCE_S)
    assert (late.returncode, late.stdout) == (-9, b"")


def test_a_process_that_multiprocessing_spawns_ends_with_the_worker_before_it_imports_anything_else() -> None:
    """vLLM's own imports take many seconds."""
    worker = f"""
import multiprocessing, os, runpy, time
import kvrelay.cli.main
def main():
    os.environ[{WORKER_PID!r}] = str(os.getpid())
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.start()
    print(child.pid, flush=True)
    time.sleep(600)
kvrelay.cli.main.main = main
runpy.run_module("kvrelay", run_name="__main__", alter_sys=True)
"""
    with subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.kill()
    try:
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    finally:
        with suppress(psutil.NoSuchProcess):
            child.kill()


def test_all_threads_of_a_process_stay_on_the_cores_that_its_environment_names() -> None:
    code = (
        "import os, threading, kvrelay.engines.vllm.child\n"
        "thread = threading.Thread(target=lambda: print(os.sched_getaffinity(0)))\n"
        "print(os.sched_getaffinity(0)); thread.start(); thread.join()"
    )
    core = max(os.sched_getaffinity(0))
    env = {**os.environ, WORKER_PID: str(os.getpid()), CORES: str(core)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, check=False, timeout=PATIENCE_S)
    assert done.stdout.decode() == f"{{{core}}}\n" * 2, done.stderr


def test_a_stopped_rank_ends_with_the_engine_process() -> None:
    rank = (
        "import os, signal, kvrelay.engines.vllm.child\n"
        "print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    )
    engine = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    env = {**os.environ, WORKER_PID: str(os.getpid())}
    with subprocess.Popen([sys.executable, "-c", engine], stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        stopped = psutil.Process(int(process.stdout.readline()))
        until(lambda: stopped.status() == psutil.STATUS_STOPPED)
        process.kill()
    until(lambda: not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE)


def test_a_process_may_use_the_tiles_of_amx_where_there_are_any() -> None:
    code = (
        "import ctypes, kvrelay.engines.vllm.child as child\n"
        "may = ctypes.c_uint64()\n"
        "get_xcomp_perm = 0x1022\n"
        "assert ctypes.CDLL(None).syscall(child.SYS_ARCH_PRCTL, get_xcomp_perm, ctypes.byref(may)) == 0\n"
        "print(may.value >> child.XFEATURE_XTILEDATA & 1)"
    )
    has_tiles = "amx_tile" in Path("/proc/cpuinfo").read_text()
    if platform.machine() != "x86_64" or not has_tiles:
        pytest.skip("no AMX")
    env = {**os.environ, WORKER_PID: str(os.getpid())}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, check=False, timeout=PATIENCE_S)
    assert done.stdout == b"1\n", done.stderr
