"""Which request may copy from or to a staging block, for a vLLM that answers over HTTP and may act late.

    worker     grants a block under a random ticket ── revokes it ── waits until no copy is under way: the block is free
    connector  locks ── is the ticket still that of the block? ── copies ── confirms ── unlocks

A closed connection does not say whether vLLM still copies. But after ``revoke`` no copy under the old ticket begins,
and when ``is_quiet`` then answers yes, none is under way. A connector that is stopped in the middle keeps the lock for
as long as it may wake; one that is killed loses it. No clock is involved.

The file holds two arrays of ``num_blocks`` numbers: the ticket of each block, and that of the last confirmed copy.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from kvrelay.engines.connector.locks import is_locked, try_lock, unlock
from kvrelay.errors import ConfigError

_ITEM_BYTES = 8
_MAX_TICKET = 2**53 - 1
"""JSON readers keep numbers up to this one exactly."""


class TicketTable:
    """One process's view of the table at ``path``. ``create``: make the file, which must not exist.

    Raises ConfigError for a file that cannot be used.
    """

    def __init__(self, path: Path, num_blocks: int, *, create: bool = False) -> None:
        self._path = path
        num_bytes = 2 * num_blocks * _ITEM_BYTES
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        try:
            self._fd = os.open(path, flags, 0o600)
            if create:
                os.ftruncate(self._fd, num_bytes)
            elif os.fstat(self._fd).st_size != num_bytes:
                raise ConfigError(f"{path} is no ticket table of {num_blocks} blocks")
            tables = np.frombuffer(mmap.mmap(self._fd, num_bytes), dtype=np.uint64).reshape(2, num_blocks)
        except OSError as exc:
            raise ConfigError(f"the ticket table {path} cannot be used: {exc.strerror}") from exc
        self._tickets, self._confirmed = tables

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            os.close(self._fd)

    # -- worker -------------------------------------------------------------------------------------------------------

    def grant(self, block_ids: Sequence[int]) -> int:
        """A new ticket for these blocks."""
        ticket = 1 + secrets.randbelow(_MAX_TICKET)
        self._tickets[list(block_ids)] = ticket
        return ticket

    def revoke(self, block_ids: Sequence[int]) -> None:
        self._tickets[list(block_ids)] = 0

    def is_quiet(self) -> bool:
        """Whether no connector copies now."""
        return not is_locked(self._fd)

    def is_confirmed(self, block_ids: Sequence[int], ticket: int) -> bool:
        """Whether all of these blocks were copied under this ticket."""
        return bool((self._confirmed[list(block_ids)] == ticket).all())

    # -- connector ----------------------------------------------------------------------------------------------------

    @contextmanager
    def copying(self, block_ids: Sequence[int], ticket: int) -> Iterator[bool]:
        """While it is entered these blocks may be copied, if it gives True. They count as copied at its end."""
        chosen = list(block_ids)
        # Never refused: the worker asks for the lock, and does not take it.
        try_lock(self._fd, is_shared=True)
        try:
            may_copy = ticket != 0 and bool((self._tickets[chosen] == ticket).all())
            yield may_copy
            if may_copy:
                self._confirmed[chosen] = ticket
        finally:
            unlock(self._fd)
