"""Processes that outlive the tests that started them, found by a mark in their environment, which they all inherit.

Parents do not tell: who loses his own is adopted by init. vLLM's engine process writes its title over its environment,
so an orphan of that name in this directory counts, too.
"""

from __future__ import annotations

import contextlib
import os
import time

import psutil

MARK = "KVRELAY_SUITE"
GRACE_S = 10.0
"""What was told to end gets so long: nobody has to wait for a helper of a helper."""


def end_all() -> list[str]:
    """Wait for what is ending, kill the rest by pid; gives the command lines of the latter."""
    deadline = time.monotonic() + GRACE_S
    while (left := _marked()) and time.monotonic() < deadline:
        time.sleep(0.1)
    found = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            found.append(f"{process.pid} {' '.join(process.cmdline())[:300]}")
            process.kill()
    return found


def _marked() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_ours = process.environ().get(MARK) == os.environ[MARK] or _is_lost_vllm(process)
            is_ours &= not _is_own_tracker(process)
            if is_ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _is_lost_vllm(process: psutil.Process) -> bool:
    return process.name().startswith("VLLM::") and process.ppid() == 1 and process.cwd() == os.getcwd()


def _is_own_tracker(process: psutil.Process) -> bool:
    """Of this process's ``multiprocessing``: it ends when this process does."""
    return process.ppid() == os.getpid() and "multiprocessing.resource_tracker" in " ".join(process.cmdline())
