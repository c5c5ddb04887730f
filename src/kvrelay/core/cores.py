"""The cores that this process may use: its affinity, the CPU quota of its control groups, and how its threads share
them with others.

More threads than the quota pays for are worse than fewer: all of them stand still for the rest of each period of 100 ms
once the quota is spent.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from kvrelay.core.control_groups import group_directories


def allowed_cores() -> list[int]:
    """By affinity: what ``taskset``, a cpuset or a container manager has left."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def cpu_quota(root: Path = Path("/")) -> float:
    """The least quota, in cores, of the control groups that hold this process; infinite without one."""
    quotas = [math.inf]
    for place, is_v1 in group_directories("cpu", root):
        # No quota: the file is absent, or says "max", or -1 in version 1.
        with suppress(OSError, ValueError, ZeroDivisionError):
            if is_v1:
                quota, period = ((place / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            else:
                quota, period = (place / "cpu.max").read_text().split()
            if int(quota) > 0:
                quotas.append(int(quota) / int(period))
    return min(quotas)


def usable_cores(root: Path = Path("/")) -> list[int]:
    """As many of the allowed cores as the quota pays for in full, and at least one."""
    cores = allowed_cores()
    return cores[: max(1, math.floor(min(len(cores), cpu_quota(root))))]


def openmp_limit() -> float:
    """The most threads that OpenMP starts (OMP_THREAD_LIMIT), infinite without a limit. oneDNN leaves parts of a
    product unwritten if it gets fewer threads than it counts on."""
    limit = os.environ.get("OMP_THREAD_LIMIT", "").strip()
    return int(limit) if limit.isdecimal() and int(limit) else math.inf


def compute_threads(requested: int) -> int:
    """Of this process: as many as ``requested``, 0: one for each usable core, and no more than OpenMP starts."""
    return int(min(requested or len(usable_cores()), openmp_limit()))


def threads_each(num_workers: int) -> int:
    """Compute threads of each of ``num_workers`` that share the usable cores."""
    return max(1, len(usable_cores()) // num_workers)


def set_niceness(added: int) -> None:
    """Of the calling thread alone, ``added`` to that of the process; at most 19. On Linux, where
    ``may_change_niceness``."""
    of_process = os.getpriority(os.PRIO_PROCESS, os.getpid())
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, of_process + added))


def may_change_niceness() -> bool:
    """Whether a thread may become nice and also take that back, for which the system wants CAP_SYS_NICE or a limit
    (RLIMIT_NICE) that allows it."""

    def tried() -> bool:
        try:
            set_niceness(1)
            set_niceness(0)
        except OSError:
            return False
        return True

    if sys.platform != "linux":
        return False
    with ThreadPoolExecutor(1) as pool:  # a thread that may stay nice
        return pool.submit(tried).result()


def describe_cores(root: Path = Path("/")) -> str:
    """Where the number of usable cores comes from, for the log."""
    quota = cpu_quota(root)
    limit = "" if math.isinf(quota) else f", a CPU quota of {quota:g}"
    limit += "" if math.isinf(openmp_limit()) else f", OMP_THREAD_LIMIT {openmp_limit()}"
    return f"{len(usable_cores(root))} usable cores ({os.cpu_count()} here, {len(allowed_cores())} by affinity{limit})"
