"""The file of API keys, followed while the process runs, so that a key is revoked without a restart.

Once a second its inode, size and times are checked, which works on every file system and through the symbolic links
that orchestrators swap. A file that cannot be read, or is malformed, changes nothing: a half-written file must neither
lock clients out nor admit new ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from kvrelay.errors import ConfigError
from kvrelay.http.api_keys import ApiKeys, read_keys_file

_log = logging.getLogger(__name__)


POLL_INTERVAL_S = 1.0

FileState = tuple[int, int, int, int]
NEVER_SEEN: FileState = (-1, -1, -1, -1)


class KeysFile:
    """One file of keys, and the ``keys`` that follow it."""

    def __init__(self, path: Path, keys: ApiKeys, on_change: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._keys = keys
        self._on_change = on_change
        # Not the file's current state: the file may have changed since ``keys`` were read.
        self._seen: FileState | None = NEVER_SEEN

    def poll(self) -> None:
        """Load the file if it has changed; an error in it is logged once."""
        state = _state_of(self._path)
        if state == self._seen:
            return
        # A write between this check and the read changes the state again, which the next poll sees.
        self._seen = state
        try:
            changes = self._keys.replace_file(read_keys_file(self._path))
        except ConfigError as exc:
            _log.error("%s; the API keys stay unchanged", exc.message)
            return
        if changes:
            # A warning, because it changes who may use the service.
            _log.warning("loaded changed API keys from %s: %s", self._path, changes)
            self._on_change()


def _state_of(path: Path) -> FileState | None:
    """The attributes that reveal a change of the file, including the time of its last status change, for contents that
    keep size and time. None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@asynccontextmanager
async def following(keys_file: str, keys: ApiKeys, on_change: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
    """While this context is open, ``keys`` follow ``keys_file`` (none: nothing to follow). ``on_change`` runs after
    each change."""
    if not keys_file:
        yield
        return
    task = asyncio.create_task(_poll(KeysFile(Path(keys_file), keys, on_change)))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _poll(file: KeysFile) -> None:
    while True:
        await asyncio.sleep(POLL_INTERVAL_S)
        file.poll()
