"""Code that runs in vLLM's processes: they must not outlive the worker, however it ends, and stay on its cores.

vLLM's engine process waits for requests from a socket, so it would wait for ever, and keep the device's memory, after
its parent was killed. That holds while the model is loaded, too: an operator may interrupt a start that takes long.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import platform
import select
import shutil
import signal
import threading

from kvrelay.core.child_process import PR_SET_PDEATHSIG, WORKER_PID
from kvrelay.engines.vllm.cores import CORES, parse_cores

SCRATCH = "KVRELAY_SCRATCH"
"""The environment variable with the worker's temporary directory."""
SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18
"""Of Linux on x86-64 (asm/prctl.h, asm/fpu/types.h)."""
CPU_EXPERTS = "KVRELAY_CPU_EXPERTS"
"""The environment variable that asks for ``cpu_experts``."""


class WorkerExtension:
    """An extension of vLLM's workers, by ``worker_extension_cls``. vLLM refuses names that its workers have.

    vLLM imports it before it loads the model. By then ``cli/main.py`` has imported this module, as the first thing in a
    process that multiprocessing spawns.
    """

    def kvrelay_started(self) -> None:
        """Called once vLLM has started, on the thread that computes."""

    def kvrelay_at_rest(self) -> None:
        """Answered between two steps, so those that were given to this worker before are over; and so are their copies
        by kvrelay's connector."""
        transfer = importlib.import_module("vllm.distributed.kv_transfer")
        transfer.get_kv_transfer_group().drain()


def ask_for_tiles() -> None:
    """Ask the kernel for AMX's tiles, which a process may use only then; where there is no AMX it says no.

    vLLM 0.32's attention for bfloat16 on a CPU does not ask. Until one of torch's larger products has, it ends the
    process with SIGILL: with a first prompt of one token, or at a decode worker whose first step follows loaded KV.
    """
    if platform.machine() == "x86_64":
        ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)


def stay_on_cores() -> None:
    """This thread, and those that it starts, run on the worker's cores only, if it has named some."""
    if cores := os.environ.get(CORES):
        os.sched_setaffinity(0, parse_cores(cores))


def end_with(pid: int) -> None:
    """A thread waits for the end of ``pid``, removes what that process could not, and then kills this process. Raises
    OSError if there is no such process."""
    watched = os.pidfd_open(pid)
    threading.Thread(target=_wait, args=(watched,), name="end-with-parent", daemon=True).start()


def _wait(watched: int) -> None:
    poller = select.poll()
    poller.register(watched, select.POLLIN)
    poller.poll()
    if directory := os.environ.get(SCRATCH):
        shutil.rmtree(directory, ignore_errors=True)  # the worker was killed, or it is gone already
    os.kill(os.getpid(), signal.SIGKILL)


def _watch_worker() -> None:
    pid = os.environ.get(WORKER_PID)
    if pid is None:
        return  # imported by the worker itself
    try:
        end_with(int(pid))
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
    if os.getppid() != int(pid):
        # A rank, which is also to end with vLLM's engine process. The kernel's signal reaches one that is stopped, too.
        # (The engine process has been started by a thread of the worker that does not stay.)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Before vLLM has computing threads.
    stay_on_cores()
    # It warns of every scheduler that is not its own: that asynchronous scheduling may be off, which it is not.
    logging.getLogger("vllm.config.scheduler").addFilter(lambda record: "custom scheduler" not in str(record.msg))


ask_for_tiles()  # also in a stock server that a benchmark starts with an extension of ours
_watch_worker()
