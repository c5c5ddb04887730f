"""Compiles Numba's kernels once per machine, also if many workers start at the same time.

Numba caches compiled kernels on disk, but does not prevent several processes from compiling the same kernels at once,
which takes each of them many seconds. Here the first process compiles; the others wait and then find everything in the
cache. This module knows nothing of the kernels: everything compiled within ``compile_once`` is compiled in turn.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from numba.core.event import Listener, install_listener

_log = logging.getLogger(__name__)

LOCK_NAME = "kvrelay-compiling.lock"
MAX_WAIT_S = 120.0
POLL_INTERVAL_S = 0.05


@contextmanager
def compile_once(
    cache: Path, max_wait_s: float = MAX_WAIT_S, sleep: Callable[[float], None] = time.sleep
) -> Iterator[None]:
    """Compile kernels that are cached in the directory ``cache`` while no other process does.

    A later process waits at most ``max_wait_s``, then continues in parallel with the others that waited: nothing should
    be left to compile. The lock is the kernel's (flock): it ends with the process that holds it.
    """
    with _lock_file(cache) as lock:
        if lock is not None and not _try_lock(lock, fcntl.LOCK_EX):
            _wait_for_share(lock, max_wait_s, sleep)
        with install_listener("numba:compile", _Announcement()):
            yield


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


def _wait_for_share(lock: IO[bytes], max_wait_s: float, sleep: Callable[[float], None]) -> None:
    deadline_s = time.monotonic() + max_wait_s
    while not _try_lock(lock, fcntl.LOCK_SH) and time.monotonic() < deadline_s:
        sleep(POLL_INTERVAL_S)


class _Announcement(Listener):  # type: ignore[misc]
    """Logs once why a start takes so long."""

    def __init__(self) -> None:
        self._is_made = False

    def on_start(self, event: Any) -> None:
        if not self._is_made:
            self._is_made = True
            _log.warning("compiling kernels for this machine, once: about 15 s")

    def on_end(self, event: Any) -> None:
        pass
