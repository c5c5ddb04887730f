"""The threads on which Numba's kernels run: how many, and on which cores they wake up.

Kernels run on the calling thread and on OpenMP's helpers of that thread, which sleep when it has been idle. Linux often
wakes a helper on the core of the thread that wakes it and leaves both there for tens of milliseconds, though another
core is free: a prefill of 55 instead of 31 ms. So the first kernel after a rest, unless the machine is crowded, begins
with helpers that may use any core but the caller's; from the second kernel on, the scheduler may move them again.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from contextlib import suppress
from importlib import import_module
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import njit, prange, types

from kvrelay.executors.torch.kernels.numba_math import OPTIONS

REST_S = 0.002
"""Without a kernel for so long, helpers may sleep."""
_CROWD = 2
"""With more running threads than so many for each core, a helper could wait long for the core that it is sent to. The
first kernel meets the threads that have brought it its work: up to two for each core are no crowd."""
_libc = ctypes.CDLL(None)
_CAN_PLACE = all(hasattr(_libc, name) for name in ("gettid", "sched_getcpu")) and os.path.exists("/proc/loadavg")
_LOAD = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC) if _CAN_PLACE else -1
"""Kept open: on a busy machine a rest comes before every kernel."""
_NUM_CORES = os.cpu_count() or 1
_gettid = types.ExternalFunction("gettid", types.int32())


def usable_threads(num_threads: int) -> int:
    """How many threads Numba's kernels may use: all of them on OpenMP, which several engines of one process can share.

    Without OpenMP's library it is one: Numba's own pool aborts the process when two threads enter it.
    """
    try:
        import_module("numba.np.ufunc.omppool")
    except ImportError:
        return 1
    numba.config.THREADING_LAYER = "omp"
    numba.get_num_threads()  # sets up the threads
    return min(num_threads, int(numba.config.NUMBA_NUM_THREADS))


class _Team(threading.local):
    """The calling thread and its helpers."""

    def __init__(self) -> None:
        self._num_threads = 0
        self._helpers: list[int] = []
        self._last_s = 0.0
        self._are_placed = False

    def use(self, num_threads: int) -> None:
        if self._num_threads != num_threads:
            numba.set_num_threads(num_threads)
            self._num_threads = num_threads
        if num_threads == 1 or not _CAN_PLACE:
            return
        now_s = time.monotonic()
        if now_s - self._last_s > REST_S:
            self._place(num_threads)
        elif self._are_placed:
            self._allow(os.sched_getaffinity(0))
            self._are_placed = False
        self._last_s = now_s

    def _place(self, num_threads: int) -> None:
        if len(self._helpers) != num_threads - 1 or not all(map(_is_ours, self._helpers)):
            numbers = np.zeros(num_threads, dtype=np.int32)
            _note_threads(numbers, num_threads)
            self._helpers = [int(number) for number in numbers if number != threading.get_native_id()]
        others = os.sched_getaffinity(0) - {_libc.sched_getcpu()}
        if others and _num_running() <= _CROWD * _NUM_CORES:
            self._allow(others)
            self._are_placed = True

    def _allow(self, cores: set[int]) -> None:
        for helper in self._helpers:
            with suppress(OSError):  # a sandbox may forbid it: the helper runs where it runs
                os.sched_setaffinity(helper, cores)


def _num_running() -> int:
    """Threads of this machine that run or wait for a core."""
    return int(os.pread(_LOAD, 64, 0).split()[3].partition(b"/")[0])


def _is_ours(thread: int) -> bool:
    """False if OpenMP has ended it."""
    return os.path.exists(f"/proc/self/task/{thread}")


_team = _Team()


def use_threads(num_threads: int) -> int:
    """The next kernel, called from this thread, runs on this many threads; with 1 Numba's wakes no other thread."""
    _team.use(num_threads)
    return num_threads


@njit(cache=True, parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _note_threads(numbers: npt.NDArray[np.int32], num_threads: Any) -> None:
    for t in prange(num_threads):
        numbers[t] = _gettid()
