"""Starting a child process that leads a process group in our session, and does not outlive us.

So Ctrl-C reaches only us, and we end the child in order. It stays in our session because Linux may share the CPUs
between sessions first (autogroup): a frontend in a session of its own has waited for a CPU as long as a prefill in
another session took.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import IO

PR_SET_PDEATHSIG = 1
WORKER_PID = "KVRELAY_WORKER_PID"
"""The environment variable by which vLLM's processes know the worker that has started them."""


def start_child_process(
    command: Sequence[str],
    *,
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
    environment: Mapping[str, str] | None = None,
    pass_fds: Collection[int] = (),
    death_signal: int = signal.SIGKILL,
) -> subprocess.Popen[bytes]:
    """Start ``command`` without input; None for the outputs and the environment: ours.

    On Linux the kernel sends the child ``death_signal`` when the *thread* that called this has ended. Raises OSError.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        pass_fds=pass_fds,
        process_group=0,
        preexec_fn=partial(_prepare, death_signal),  # noqa: PLW1509 - two system calls
    )


def _prepare(death_signal: int) -> None:
    """In the child, before its program begins."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, death_signal)
    # It may write to the terminal though it is not in the foreground: under `stty tostop` that would stop it.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
