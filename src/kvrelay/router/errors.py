"""What can go wrong with an index of prefixes (mission, section 5)."""

from __future__ import annotations

from kvrelay.errors import KvrelayError, RetryElsewhereError


class ParentNotFoundError(KvrelayError):
    """A stored event hangs below a block that its worker does not hold: events were lost. Ask for a dump."""

    def __init__(self, worker_id: str, parent_hash: int) -> None:
        super().__init__(f"worker {worker_id} stored a block below {parent_hash:#018x}, which it does not hold")
        self.worker_id = worker_id
        self.parent_hash = parent_hash


class IndexerOfflineError(RetryElsewhereError):
    """The indexer has been closed."""


class RequestDroppedError(RetryElsewhereError):
    """The indexer refused a look-up that is larger than it answers."""
