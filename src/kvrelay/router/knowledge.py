"""What a router knows of its workers' prefixes: the contract of its indexers, and the one that knows nothing."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.core.events import KvEventBatch
from kvrelay.core.workers import WorkerInfo
from kvrelay.router.base import IndexState
from kvrelay.router.beyond import TierTable
from kvrelay.router.overlap import WorkerGroup


class Indexer:
    """Knows nothing and learns nothing: for policies that do not look at prefixes. Others override what they hear."""

    tiers: TierTable | None = None
    """Blocks beyond the workers' pools; None if they are not known."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def find_holders(self, sequence: Sequence[int]) -> list[tuple[int, WorkerGroup]]:
        """Numbers of leading blocks, ascending, and the workers that hold them."""
        return []

    def place(self, worker_id: str, sequence: tuple[int, ...]) -> None:
        """A prompt with these sequence hashes was sent to the worker."""

    def follow(self, info: WorkerInfo) -> None:
        """The worker competes for requests from now on. Idempotent."""

    def remove_worker(self, worker_id: str) -> None:
        """Forget the worker."""

    def apply(self, batch: KvEventBatch) -> None:
        """A worker has published events."""

    def apply_replay(self, worker_id: str, frame: bytes) -> None:
        """A worker has answered a request for a replay."""

    def heard(self, worker_id: str) -> None:
        """The worker is alive."""

    def index_state(self, worker_id: str) -> IndexState:
        return IndexState.NONE

    def indexed_blocks(self, worker_id: str) -> list[int]:
        """The blocks that the worker holds, according to its events. It looks through the whole index."""
        return []
