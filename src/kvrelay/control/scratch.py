"""Temporary directories that do not outlive their owners for long.

A process that is killed leaves its directory behind; the next one of the same kind removes it. That an owner lives is
told by a lock on a file inside, which the kernel releases when the owner ends, however it ends. What lacks that file,
or belongs to another user, is left alone.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import IO

_log = logging.getLogger(__name__)

LOCK_NAME = "owner.lock"


class ScratchDirectory:
    """A new directory below the system's temporary one, whose name begins with ``prefix``, until ``remove``."""

    def __init__(self, prefix: str) -> None:
        _remove_abandoned(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock = _locked(self.path)

    def remove(self) -> None:
        """Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _locked(directory: Path) -> IO[bytes]:
    """The lock file appears under its name when it is locked, so nobody finds it free before."""
    hidden = directory / f"{LOCK_NAME}.new"
    lock = hidden.open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    hidden.rename(directory / LOCK_NAME)
    return lock


def _remove_abandoned(prefix: str) -> None:
    for directory in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            if _is_ours(directory) and _is_abandoned(directory / LOCK_NAME):
                shutil.rmtree(directory, ignore_errors=True)
        except OSError as exc:
            _log.debug("%s is left alone: %s", directory, exc)


def _is_ours(directory: Path) -> bool:
    """Not a link either: another user may have made it."""
    found = directory.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _is_abandoned(lock_path: Path) -> bool:
    """Whether nobody holds the lock. Raises OSError where there is none."""
    with lock_path.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
