"""The rank processes: a dedicated thread starts, watches, ends and reaps them.

They end with their parent. The kernel kills a child when the *thread* that started it ends, so that thread lives as
long as the ranks. It sleeps until one of them ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import msgspec

from kvrelay.errors import FatalError
from kvrelay.executors.torch.parallel.messages import Answer, RankFailed, RankReady
from kvrelay.transfer.ranks.channel import Channel
from kvrelay.transfer.ranks.messages import FromRank

MODULE = "kvrelay.executors.torch.parallel"
_REAP_PAUSE_S = 0.005


class RankProcess(msgspec.Struct, frozen=True):
    """``commands``: commands and their answers. ``side``: questions that are answered while a step runs. ``moves``:
    orders to move KV."""

    process: subprocess.Popen[bytes]
    commands: Channel[Answer]
    side: Channel[RankReady | RankFailed]
    moves: Channel[FromRank]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ending(self) -> str | None:
        """How the process ended, in words; None while it lives."""
        code: int | None = self.process.returncode
        if code is None:
            return None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class RankProcesses:
    """``count`` processes that inherit ``fds``. Raises FatalError if one cannot be started."""

    def __init__(self, count: int, fds: Sequence[int]) -> None:
        self.ranks: list[RankProcess] = []
        self._fds = tuple(fds)
        self._error: OSError | None = None
        self._started, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, args=(count,), name="ranks", daemon=True)
        self._thread.start()
        self._started.wait()
        if len(self.ranks) < count:
            self.kill()
            raise FatalError(f"cannot start a rank process: {self._error}") from self._error

    def kill(self) -> None:
        """Kill all ranks at once. Idempotent; from any thread."""
        with self._lock:
            for rank in self.ranks:
                if rank.process.returncode is None:
                    rank.process.kill()

    def kill_one(self, index: int, timeout_s: float) -> None:
        """Kill one rank, and wait until it has ended. From any thread."""
        rank = self.ranks[index]
        with self._lock:
            if rank.process.returncode is None:
                rank.process.kill()
        deadline_s = time.monotonic() + timeout_s
        while rank.ending is None and time.monotonic() < deadline_s:
            time.sleep(_REAP_PAUSE_S)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all have ended. False if they have not ended in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        for rank in self.ranks:
            rank.commands.close()
            rank.side.close()
            rank.moves.close()

    def _run(self, count: int) -> None:
        try:
            for _ in range(count):
                self.ranks.append(self._start())
        except OSError as exc:
            self._error = exc
        finally:
            self._started.set()
        self._reap()

    def _start(self) -> RankProcess:
        ours, theirs = socket.socketpair()
        our_side, their_side = socket.socketpair()
        our_moves, their_moves = socket.socketpair()
        with theirs, their_side, their_moves:
            inherited = (theirs.fileno(), their_side.fileno(), their_moves.fileno(), *self._fds)
            command = [sys.executable, "-m", MODULE, str(os.getpid()), *(str(fd) for fd in inherited)]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited)
        return RankProcess(
            process, Channel(ours, Answer), Channel(our_side, RankReady | RankFailed), Channel(our_moves, FromRank)
        )

    def _reap(self) -> None:
        poller = select.poll()
        alive: dict[int, RankProcess] = {}
        for rank in self.ranks:
            fd = os.pidfd_open(rank.pid)
            alive[fd] = rank
            poller.register(fd, select.POLLIN)
        while alive:
            for fd, _ in poller.poll():
                # Under the lock, so that no signal goes to a pid that may have been reused.
                with self._lock:
                    alive.pop(fd).process.wait()
                poller.unregister(fd)
                os.close(fd)


def end_with_parent(parent_pid: int) -> None:
    """In the child: ask the kernel to kill it when its parent ends. End it now if the parent has ended already."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent_pid:
        os._exit(1)
