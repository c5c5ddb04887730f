"""Where the helpers of Numba's kernels wake up."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvrelay.executors.torch.kernels import numba_threads
from kvrelay.executors.torch.kernels.numba_kernels import NumbaKernels

CORES = os.sched_getaffinity(0)
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="one core: helpers have no other")


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_threads, "_num_running", lambda: 1)


def with_a_new_team(work: Callable[[Callable[[], None], int], None], cores: set[int] = CORES) -> None:
    """``work(kernel, helper)`` on a new thread, which may use ``cores``: a kernel to run there, and its one helper."""
    kernels = NumbaKernels(torch.float32, numba_threads.usable_threads(2))

    def kernel() -> None:
        kernels.silu_mul(torch.zeros(512, 512))

    def on_a_thread_of_its_own() -> None:
        os.sched_setaffinity(threading.get_native_id(), cores)
        before = set(os.listdir("/proc/self/task"))
        kernel()
        (helper,) = set(os.listdir("/proc/self/task")) - before
        work(kernel, int(helper))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(on_a_thread_of_its_own).result()


def test_after_a_rest_helpers_keep_off_the_callers_core_for_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(kernel: Callable[[], None], helper: int) -> None:
        for _ in range(3):
            monkeypatch.setattr(numba_threads, "REST_S", -1.0)  # always rested
            kernel()
            assert len(CORES - os.sched_getaffinity(helper)) == 1
            assert os.sched_getaffinity(threading.get_native_id()) == CORES

            monkeypatch.setattr(numba_threads, "REST_S", float("inf"))  # never
            kernel()
            assert os.sched_getaffinity(helper) == CORES

    with_a_new_team(work)


def test_on_a_crowded_machine_the_scheduler_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_threads, "_num_running", lambda: 1 + 2 * (os.cpu_count() or 1))
    monkeypatch.setattr(numba_threads, "REST_S", -1.0)

    def work(kernel: Callable[[], None], helper: int) -> None:
        kernel()
        assert os.sched_getaffinity(helper) == CORES

    with_a_new_team(work)


def test_helpers_stay_within_the_callers_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that may use one core keeps its helpers there."""
    core = {min(CORES)}

    def work(kernel: Callable[[], None], helper: int) -> None:
        for rest_s in (-1.0, float("inf")):
            monkeypatch.setattr(numba_threads, "REST_S", rest_s)
            kernel()
            assert os.sched_getaffinity(helper) == core

    with_a_new_team(work, core)
