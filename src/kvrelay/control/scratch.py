"""Temporary directories that do not outlive their owners for long.

A process that is killed leaves its directory behind; the next process of the same kind removes it. A live owner holds a
lock on a file inside, which the kernel releases when the owner ends, however it ends. Directories without that file, or
of another user, are left alone.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from kvrelay.errors import ConfigError

_log = logging.getLogger(__name__)

LOCK_NAME = "owner.lock"
GONE = ".gone"
"""The end of a directory's name while it is removed."""


class ScratchDirectory:
    """A new directory below the system's temporary one; its name begins with ``prefix``. ``remove`` deletes it. Raises
    ConfigError if there can be none."""

    def __init__(self, prefix: str) -> None:
        try:
            _remove_abandoned(prefix)
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            self._lock = _locked(self.path)
        except OSError as exc:
            raise ConfigError(f"no temporary directory can be made ({exc}): set TMPDIR to a writable one") from exc

    def remove(self) -> None:
        """Idempotent."""
        _remove(self.path)
        self._lock.close()


def _locked(directory: Path) -> IO[bytes]:
    """The lock file gets its final name once it is locked, so no other process finds it free."""
    hidden = directory / f"{LOCK_NAME}.new"
    lock = hidden.open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    hidden.rename(directory / LOCK_NAME)
    return lock


def _remove_abandoned(prefix: str) -> None:
    for directory in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            if _is_ours(directory) and (directory.suffix == GONE or _is_abandoned(directory / LOCK_NAME)):
                _remove(directory)
        except OSError as exc:
            _log.debug("%s is left alone: %s", directory, exc)


def _remove(directory: Path) -> None:
    """Under a name that tells, whatever is left of it, that it has no owner: this process may be killed meanwhile."""
    gone = directory.with_suffix(GONE)
    with suppress(OSError):
        directory.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _is_ours(directory: Path) -> bool:
    """Whether it is a directory of this user. A link does not count: another user may have made it."""
    found = directory.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _is_abandoned(lock_path: Path) -> bool:
    """Whether no process holds the lock. Raises OSError if there is no lock file."""
    with lock_path.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
