"""Where the helpers of Numba's kernels wake up."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvrelay.executors.torch.kernels import numba_threads
from kvrelay.executors.torch.kernels.numba_kernels import NumbaKernels

CORES = os.sched_getaffinity(0)
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="one core: helpers have no other")


def helpers_of_a_new_team(kernels: NumbaKernels) -> set[int]:
    before = set(os.listdir("/proc/self/task"))
    kernels.silu_mul(torch.zeros(512, 512))
    return {int(thread) for thread in set(os.listdir("/proc/self/task")) - before}


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_threads, "_num_running", lambda: 1)


def test_after_a_rest_helpers_keep_off_the_callers_core_for_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = NumbaKernels(torch.float32, numba_threads.usable_threads(2))

    def on_a_thread_of_its_own() -> None:
        (helper,) = helpers_of_a_new_team(kernels)
        for _ in range(3):
            monkeypatch.setattr(numba_threads, "REST_S", -1.0)  # always rested
            kernels.silu_mul(torch.zeros(512, 512))
            assert len(CORES - os.sched_getaffinity(helper)) == 1
            assert os.sched_getaffinity(threading.get_native_id()) == CORES

            monkeypatch.setattr(numba_threads, "REST_S", float("inf"))  # never
            kernels.silu_mul(torch.zeros(512, 512))
            assert os.sched_getaffinity(helper) == CORES

    with ThreadPoolExecutor(1) as pool:
        pool.submit(on_a_thread_of_its_own).result()


def test_on_a_crowded_machine_the_scheduler_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = NumbaKernels(torch.float32, numba_threads.usable_threads(2))
    monkeypatch.setattr(numba_threads, "_num_running", lambda: 1 + 2 * (os.cpu_count() or 1))
    monkeypatch.setattr(numba_threads, "REST_S", -1.0)

    def on_a_thread_of_its_own() -> None:
        (helper,) = helpers_of_a_new_team(kernels)
        kernels.silu_mul(torch.zeros(512, 512))
        assert os.sched_getaffinity(helper) == CORES

    with ThreadPoolExecutor(1) as pool:
        pool.submit(on_a_thread_of_its_own).result()


def test_helpers_stay_within_the_callers_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that may use one core keeps its helpers there."""
    kernels = NumbaKernels(torch.float32, numba_threads.usable_threads(2))
    core = {min(CORES)}

    def on_one_core() -> None:
        os.sched_setaffinity(threading.get_native_id(), core)
        (helper,) = helpers_of_a_new_team(kernels)
        for rest_s in (-1.0, float("inf")):
            monkeypatch.setattr(numba_threads, "REST_S", rest_s)
            kernels.silu_mul(torch.zeros(512, 512))
            assert os.sched_getaffinity(helper) == core

    with ThreadPoolExecutor(1) as pool:
        pool.submit(on_one_core).result()
