"""Processes that the tests start are forked from one that has imported torch and kvrelay already.

Imports are most of a start: 1.6 of the 1.8 seconds of CPU of a rank, 1.2 of the 1.8 of ``kvrelay serve`` with two mock
workers, and the tests start hundreds of processes. What is forked runs the same module with the same arguments, fds,
outputs and environment, and is a process and a child of its own: it can be stopped, killed and waited for, and ``ps``
shows the command line that it would have. A process that starts others has a nursery of its own, forked before its
first thread. Processes start as everywhere if a test has changed a variable that libraries read when they are imported.
Tests of the start itself fork nothing, nor do a few whole clusters (``Serve.is_real``), for what differs between two
starts of Python, like the hashes of texts, and for Python's end, which a forked process leaves out.

Where vLLM is installed the nursery has imported it, too, which takes nine seconds of CPU, and starts with the libraries
that a worker preloads for vLLM's processes. These, which ``multiprocessing`` spawns, are forked as well.

A nursery forks twice. Linux gives the orphan to the process that has asked, which is a "subreaper" for that moment.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import json
import logging
import multiprocessing.spawn
import multiprocessing.util
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

import kvrelay
from kvrelay.core import child_process
from kvrelay.executors.torch import share_openmp
from kvrelay.executors.torch.parallel import processes

RANKS: set[int] = set()
"""The pids of those that this process has started and not waited for."""
MODULES = ("kvrelay", "benchmarks", processes.MODULE)
STARTS = (
    *("kvrelay.cli.main", "kvrelay.cli.processes", "kvrelay.cli.serve", "kvrelay.executors.mock"),
    *("kvrelay.frontend.tokens.tokenizer", "kvrelay.launch.frontend_process", "kvrelay.launch.serve"),
    *("kvrelay.launch.worker_process", "kvrelay.control.nats.plane", "numpy.ma", "uvloop"),
)
TORCH = (
    *("kvrelay.executors.torch.attention.cpu", "kvrelay.executors.torch.build", "numba.core.registry"),
    *("kvrelay.executors.torch.kernels.numba_kernels", "kvrelay.executors.torch.parallel.rank_process"),
    *("kvrelay.transfer.p2p.node", "kvrelay.transfer.shm.copying"),
)
VLLM = (
    *("vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor"),
    *("vllm.v1.worker.cpu_worker", "vllm.model_executor.layers.vocab_parallel_embedding"),
    "vllm.v1.sample.ops.logprobs",
)
"""Without Numba: vLLM's processes do not start where it is imported."""
PARENTS = ("benchmarks", "serve", "agent", "--tp", "--pp", "--dp", "--ep", "vllm")
"""Words of commands that start processes."""
_LATE = (
    *("PYTEST_CURRENT_TEST", "UCX_", "NIXL_", "TORCHINDUCTOR_", "KVRELAY_"),
    *("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "ETCDCTL_", "TMPDIR", "VLLM_"),
)
"""Beginnings of variables that nothing has read before a process begins."""
_ROOM = 8000
"""For the command line of a forked process, in bytes."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)
_FAR = 500
"""File descriptors from here on are used by nothing else."""
_SPAWNED = re.compile(
    r"from multiprocessing.spawn import spawn_main; spawn_main\(tracker_fd=(\d+), pipe_handle=(\d+)\)"
)
_spawnv_passfds = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]  # of CPython's
EXIT = [1]
"""The exit code of a forked process; 1 with a traceback."""


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_LATE)}


class Forked:
    """What is used of a ``subprocess.Popen``."""

    def __init__(self, pid: int, stderr: IO[bytes] | None) -> None:
        self.pid = pid
        self.stderr = stderr
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None:
            self._reap(0)
        deadline_s = time.monotonic() + (timeout or 0.0)
        while self.poll() is None:
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self, how: int) -> int | None:
        with self._lock:
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, how)
                if ended:
                    self.returncode = os.waitstatus_to_exitcode(status)
                    RANKS.discard(self.pid)
        return self.returncode


Process = subprocess.Popen[bytes] | Forked


class Nursery:
    """The end that asks for processes, one after the other. ``asked``: the nursery's socket; None: it starts with the
    first process."""

    def __init__(self, asked: socket.socket | None = None) -> None:
        self._begun_with = _early(os.environ)
        self._socket = asked
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def popen(self, command: Sequence[str], **options: Any) -> Process:
        """Stands for ``subprocess.Popen``."""
        environment = options.get("env") or os.environ
        is_known = list(command[:2]) == [sys.executable, "-m"] and command[2] in MODULES
        is_known &= options.get("stdout") != subprocess.PIPE
        if not is_known or _early(environment) != self._begun_with:
            return subprocess.Popen(command, **options)
        prepare: partial[None] | None = options.get("preexec_fn")
        question = {
            "command": list(command),
            "parent": os.getpid(),
            "cwd": str(options.get("cwd") or os.getcwd()),
            "environment": dict(environment),
            "has_group": "process_group" in options,
            "prepare": [prepare.func.__module__, prepare.func.__qualname__, *prepare.args] if prepare else [],
        }
        errors, theirs = os.pipe() if options.get("stderr") == subprocess.PIPE else (None, None)
        outputs = [_number(options.get("stdout"), 1), _number(options.get("stderr"), 2) if theirs is None else theirs]
        try:
            pid = self._ask(question, (*outputs, *options.get("pass_fds", ())))
        finally:
            if theirs is not None:
                os.close(theirs)
        if command[2] == processes.MODULE:
            RANKS.add(pid)
        return Forked(pid, None if errors is None else open(errors, "rb"))

    def spawn(self, path: bytes, arguments: Sequence[str | bytes], fds: Sequence[int]) -> int:
        """Stands for what ``multiprocessing`` spawns with: there a child knows its fds by the numbers that we have."""
        command = [os.fsdecode(word) for word in arguments]
        if not any(map(_SPAWNED.fullmatch, command)):
            return int(_spawnv_passfds(path, arguments, fds))
        question = {
            "command": command,
            "parent": os.getpid(),
            "cwd": os.getcwd(),
            "environment": dict(os.environ),
            "has_group": False,
            "prepare": [],
            "numbers": list(fds),
        }
        return self._ask(question, (1, 2, *fds))

    def _ask(self, question: dict[str, Any], fds: Sequence[int]) -> int:
        """Raises OSError if the nursery has ended."""
        with self._lock:
            if self._socket is None:
                self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
                with theirs:
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", "tests.nursery", str(theirs.fileno()), "-" * _ROOM],
                        stdin=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **_environment_of_vllm()},
                    )
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._socket, [json.dumps(question).encode()], fds)
                pid, is_ours = self._socket.recv(64), self._socket.recv(64)
            finally:
                _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
            if not is_ours:
                raise OSError("the process that others are forked from has ended")
            return int(pid)

    def end(self) -> None:
        """The nursery ends when its socket is closed."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.wait()


def _environment_of_vllm() -> dict[str, str]:
    if importlib.util.find_spec("vllm") is None:
        return {}
    from kvrelay.engines.vllm.library import ENVIRONMENT, preloaded_libraries

    return {**ENVIRONMENT, "VLLM_LOGGING_LEVEL": "WARNING", "LD_PRELOAD": ":".join(preloaded_libraries())}


def _number(output: Any, default: int) -> int:
    if output is None:
        return default
    return int(output if isinstance(output, int) else output.fileno())


_installed: Nursery | None = None


def install() -> Nursery:
    """From now on ranks, and what ``popen`` starts, come from a nursery, which begins with the first of them."""
    global _installed
    _installed = Nursery()
    processes.subprocess = _subprocess(_installed)  # type: ignore[assignment]
    return _installed


def popen(command: Sequence[str], **options: Any) -> Process:
    """``subprocess.Popen``, from the nursery if there is one."""
    return (subprocess.Popen if _installed is None else _installed.popen)(command, **options)


def _subprocess(nursery: Nursery) -> SimpleNamespace:
    return SimpleNamespace(DEVNULL=subprocess.DEVNULL, Popen=nursery.popen)


def serve(asked: socket.socket) -> Callable[[], None]:
    """The nursery itself. It returns in what it has forked: what that shall run."""
    while True:
        message, fds, *_ = socket.recv_fds(asked, 1 << 20, 16)
        if not message:
            os._exit(0)
        middle = os.fork()
        if not middle:
            if child := os.fork():
                asked.send(str(child).encode())
                os._exit(0)
            asked.close()
            return _begin(json.loads(message), fds)
        for fd in fds:
            os.close(fd)
        os.waitpid(middle, 0)
        asked.send(b"yours")


def _begin(question: dict[str, Any], fds: Sequence[int]) -> Callable[[], None]:
    """In the new process."""
    os.environ.clear()
    os.environ.update(question["environment"])
    tempfile.tempdir = None  # asked for anew
    os.chdir(question["cwd"])
    os.dup2(fds[0], 1)
    os.dup2(fds[1], 2)
    os.close(fds[0])
    os.close(fds[1])
    while os.getppid() != question["parent"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(question["parent"], 0)
            time.sleep(0.001)
            continue
        os._exit(1)
    if question["has_group"]:
        os.setpgid(0, 0)
    if question["prepare"]:
        place, name, *values = question["prepare"]
        getattr(sys.modules[place], name)(*values)
    if numbers := question.get("numbers"):
        _renumber(fds[2:], numbers)
        _fork_nursery(numbers)
        _show(question["command"])
        return partial(_spawned, question["command"])
    _, _, module, *arguments = question["command"]
    if module == processes.MODULE:
        arguments = [arguments[0], *(str(fd) for fd in fds[2:])]
    elif {module, *arguments} & set(PARENTS):
        _fork_nursery()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [module, *arguments]
    _show([sys.executable, "-m", module, *arguments])
    return partial(_run, module)


def _renumber(fds: Sequence[int], numbers: Sequence[int]) -> None:
    far = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FAR) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(far, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _fork_nursery(not_its: Sequence[int] = ()) -> None:
    """For what this process will start. ``not_its``: fds whose other ends shall hear of this process's end."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        for fd in not_its:
            os.close(fd)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        serve(theirs)()
        sys.exit(EXIT[0])
    theirs.close()
    nursery = Nursery(ours)
    child_process.subprocess = processes.subprocess = _subprocess(nursery)  # type: ignore[assignment]
    multiprocessing.util.spawnv_passfds = nursery.spawn  # type: ignore[attr-defined]


def _show(command: Sequence[str]) -> None:
    """As the command line of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    text = b"".join(word.encode() + b"\0" for word in command)
    ctypes.memmove(begin, text[: end - begin].ljust(end - begin, b"\0"), end - begin)


def _run(module: str) -> None:
    main = sys.modules["__main__"]
    main.__spec__, main.__file__ = None, str(Path(kvrelay.__path__[0], "__main__.py"))  # as multiprocessing tells it on
    _exit_as(partial(runpy.run_module, module, run_name="__main__"))


def _spawned(command: Sequence[str]) -> None:
    (found,) = filter(None, map(_SPAWNED.fullmatch, command))
    tracker, pipe = map(int, found.groups())
    del sys.modules["kvrelay.cli.main"]  # it says what a process of vLLM imports first
    sys.argv = [command[0], "--multiprocessing-fork"]
    _exit_as(partial(multiprocessing.spawn.spawn_main, pipe_handle=pipe, tracker_fd=tracker))


def _exit_as(body: Callable[[], object]) -> None:
    try:
        body()
        EXIT[0] = 0
    except SystemExit as end:
        EXIT[0] = int(end.code or 0)
        raise


def _leave() -> None:
    """The last function at exit: what remains is to take modules apart, which takes a tenth of a second and more."""
    gc.collect()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT[0])


@contextlib.contextmanager
def _without_inductor() -> Iterator[None]:
    """What vLLM's modules compile when they are imported, a mask of token ids and ranks of logprobs, is not compiled in
    C++, which takes two ranks 20 seconds of CPU in their first step. Models are, where a test wants it."""
    setproctitle = importlib.import_module("setproctitle")
    setproctitle.getproctitle()  # it finds the command line only before another one is shown
    from vllm.platforms import current_platform

    with mock.patch.object(type(current_platform), "simple_compile_backend", "eager"):
        yield


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    atexit.register(_leave)  # first, so that it runs last
    has_vllm = importlib.util.find_spec("vllm") is not None
    if not has_vllm:
        share_openmp()
    with _without_inductor() if has_vllm else contextlib.nullcontext():
        for module in (*STARTS, *(VLLM if has_vllm else TORCH)):
            importlib.import_module(module)
    if (numba := sys.modules.get("numba.core.registry")) is not None:
        numba.cpu_target.typing_context.refresh()
        numba.cpu_target.target_context.refresh()
    importlib.import_module("kvrelay.frontend.api.openapi").documents()  # every frontend of a process has the same
    gc.collect()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread, which a fork would lack"
    serve(socket.socket(fileno=int(sys.argv[1])))()


if __name__ == "__main__":
    main()
