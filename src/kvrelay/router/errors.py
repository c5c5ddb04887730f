"""The errors of an index of prefixes."""

from __future__ import annotations

from kvrelay.errors import KvrelayError, RetryElsewhereError


class ParentNotFoundError(KvrelayError):
    """The parent in a stored event is a block that the worker does not hold: events were lost. Ask for a dump."""

    def __init__(self, worker_id: str, parent_hash: int) -> None:
        super().__init__(f"worker {worker_id} stored a block below {parent_hash:#018x}, which it does not hold")
        self.worker_id = worker_id
        self.parent_hash = parent_hash


class IndexerOfflineError(RetryElsewhereError):
    """The indexer has been closed."""


class RequestDroppedError(RetryElsewhereError):
    """The indexer refused a look-up above its size limit."""
