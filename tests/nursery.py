"""Ranks of the executors that a process of tests builds are forked from one process that has imported torch already.

A rank's start takes 1.8 seconds of CPU, 1.6 of them to import torch and Numba, and the tests start a hundred ranks.
What is forked runs the same module with the same arguments, fds, outputs and environment, and is a process of its own:
it can be stopped, killed and waited for. Ranks of ``kvrelay`` processes start as everywhere, and so do ranks if a test
has changed a variable that libraries read when they are imported.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kvrelay.executors.torch.parallel import processes

RANKS: set[int] = set()
"""The pids of those that have not been waited for."""
_LATE = ("PYTEST_CURRENT_TEST", "UCX_", "NIXL_", "TORCHINDUCTOR_")
"""Beginnings of variables that nothing has read before a rank begins."""


def install() -> Nursery:
    """From now on ranks come from a nursery, which begins with the first of them."""
    nursery = Nursery()
    processes.subprocess = SimpleNamespace(DEVNULL=subprocess.DEVNULL, Popen=nursery.start)  # type: ignore[assignment]
    return nursery


def _early() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_LATE)}


class Nursery:
    """The tests' end: asks for ranks, one question after the other."""

    def __init__(self) -> None:
        self._early = _early()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes]
        self._lock = threading.Lock()

    def start(self, command: Sequence[str], *, stdin: int, pass_fds: Sequence[int]) -> Any:
        """Stands for ``subprocess.Popen`` in ``RankProcesses``."""
        if _early() != self._early:
            return subprocess.Popen(command, stdin=stdin, pass_fds=pass_fds)
        return Forked(self, self.ask({"cwd": os.getcwd(), "environment": dict(os.environ)}, (1, 2, *pass_fds)))

    def ask(self, question: dict[str, Any], fds: Sequence[int] = ()) -> int:
        """Raises OSError if the nursery has ended."""
        with self._lock:
            if self._socket is None:
                self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
                with theirs:
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", "tests.nursery", str(theirs.fileno())],
                        stdin=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                    )
            socket.send_fds(self._socket, [json.dumps(question).encode()], fds)
            if not (answer := self._socket.recv(64)):
                raise OSError("the process that ranks come from has ended")
            return int(answer)

    def end(self) -> None:
        """The nursery ends when its socket is closed, and its ranks with it."""
        if self._socket is not None:
            self._socket.close()
            self._process.wait()


class Forked:
    """What ``RankProcesses`` uses of a ``subprocess.Popen``. Its pid is its own until it has been waited for."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid
        self.returncode: int | None = None
        RANKS.add(pid)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        RANKS.discard(self.pid)
        try:
            self.returncode = self._nursery.ask({"wait": self.pid})
        except OSError:
            self.returncode = -signal.SIGKILL  # by the kernel, when the nursery ended
        return self.returncode


def serve(asked: socket.socket) -> None:
    """The nursery itself."""
    while True:
        message, fds, *_ = socket.recv_fds(asked, 1 << 20, 16)
        if not message:
            return
        question = json.loads(message)
        if "wait" in question:
            answer = os.waitstatus_to_exitcode(os.waitpid(question["wait"], 0)[1])
        elif (answer := os.fork()) == 0:
            asked.close()
            _become_rank(question, *fds)
        for fd in fds:
            os.close(fd)
        asked.send(str(answer).encode())


def _become_rank(place: dict[str, Any], stdout: int, stderr: int, *fds: int) -> None:
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)
        os.chdir(place["cwd"])
        os.environ.clear()
        os.environ.update(place["environment"])
        sys.argv = [processes.MODULE, str(os.getppid()), *(str(fd) for fd in fds)]
        runpy.run_module(processes.MODULE, run_name="__main__")
    except BaseException:  # noqa: BLE001 - the process's outermost frame
        traceback.print_exc()
    finally:
        os._exit(1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from kvrelay.executors.torch import share_openmp

    share_openmp()
    from numba.core.registry import cpu_target

    import kvrelay.executors.torch.kernels.numba_kernels
    import kvrelay.executors.torch.parallel.rank_process  # noqa: F401

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    gc.collect()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread, which a fork would lack"
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
