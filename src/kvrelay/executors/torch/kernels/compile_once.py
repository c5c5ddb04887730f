"""Compiles Numba's kernels once per machine, also if many workers start at the same time.

Numba caches compiled kernels on disk, but does not prevent several processes from compiling the same kernels at once,
which takes each of them many seconds. Here the first process that misses a kernel in the cache compiles. Others that
miss one wait, however long it takes, and then find everything in the cache: the first process touches the lock's file
for every function that it compiles. If the cache has everything, no process waits for another. This module knows
nothing of the kernels: everything compiled within ``compile_once`` is compiled in turn.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from numba.core.event import Listener, install_listener

_log = logging.getLogger(__name__)

LOCK_NAME = "kvrelay-compiling.lock"
MAX_SILENCE_S = 120.0
"""A function takes seconds even on a busy machine; after this time the compiling process has been stopped."""
POLL_INTERVAL_S = 0.05
REPORT_INTERVAL_S = 30.0


def compile_once(
    work: Callable[[], None],
    cache: Path,
    max_silence_s: float = MAX_SILENCE_S,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Run ``work``. Its kernels, cached in the directory ``cache``, are compiled while no other process compiles.

    If another process compiles, ``work`` is broken off at the first missing kernel and runs again, from its beginning,
    when the other has finished or has compiled nothing for ``max_silence_s``. Then nothing should be left to compile;
    what is, is compiled in parallel with others that waited. The lock is the kernel's (flock): it ends with its holder.
    """
    with _lock_file(cache) as lock:
        turn = _Turn(lock, now)
        try:
            with install_listener("numba:compile", turn):
                work()
        except _TakenError:
            assert lock is not None
            _wait_for_share(lock, max_silence_s, sleep, now)
            turn.is_ours = True
            with install_listener("numba:compile", turn):
                work()
        turn.end()


@contextmanager
def _lock_file(cache: Path) -> Iterator[IO[bytes] | None]:
    """None if there can be no lock: a start without turns is better than no start."""
    try:
        file = (cache / LOCK_NAME).open("ab")
    except OSError as exc:
        _log.debug("compiling without a lock: %s", exc)
        yield None
        return
    with file:
        yield file


def _try_lock(lock: IO[bytes], kind: int) -> bool:
    """False while another process holds it. A file system without locks grants it to every process."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as exc:
        _log.debug("compiling without a lock: %s", exc)
    return True


def _wait_for_share(
    lock: IO[bytes], max_silence_s: float, sleep: Callable[[float], None], now: Callable[[], float]
) -> None:
    began_s = progress_s = reported_s = now()
    progress = os.fstat(lock.fileno()).st_mtime_ns
    while not _try_lock(lock, fcntl.LOCK_SH):
        current, now_s = os.fstat(lock.fileno()).st_mtime_ns, now()
        if current != progress:
            progress, progress_s = current, now_s
        elif now_s - progress_s >= max_silence_s:
            _log.warning("the process that compiles kernels makes no progress: compiling them here")
            return
        if now_s - reported_s >= REPORT_INTERVAL_S:
            reported_s = now_s
            _log.warning("another process compiles kernels for this machine: waited %.0f s so far", now_s - began_s)
        sleep(POLL_INTERVAL_S)


class _TakenError(Exception):
    """Another process compiles. Raised through Numba, where a compilation would begin."""


class _Turn(Listener):  # type: ignore[misc]
    """Takes the lock when the first function is about to be compiled. Logs once why a start takes so long, and how long
    it took. Shows progress to waiting processes."""

    def __init__(self, lock: IO[bytes] | None, now: Callable[[], float]) -> None:
        self._lock = lock
        self._now = now
        self._began_s: float | None = None
        self.is_ours = lock is None
        """We may compile."""
        self._thread = threading.get_ident()

    def on_start(self, event: Any) -> None:
        if threading.get_ident() != self._thread:
            return  # Numba tells every listener of the process
        if not self.is_ours and self._lock is not None and not _try_lock(self._lock, fcntl.LOCK_EX):
            raise _TakenError
        self.is_ours = True
        if self._began_s is None:
            self._began_s = self._now()
            _log.warning("compiling kernels for this machine, once: about 15 s, longer on a busy machine")
        if self._lock is not None:
            with suppress(OSError):
                os.utime(self._lock.fileno())

    def on_end(self, event: Any) -> None:
        pass

    def end(self) -> None:
        if self._began_s is not None:
            _log.warning("compiled kernels in %.0f s", self._now() - self._began_s)
