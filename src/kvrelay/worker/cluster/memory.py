"""The memory of other workers, as this worker's transfers see it: connected at first use, then planned for.

It owns the mapping between each peer's blocks and ours. It does not know hand-offs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvrelay.core.layout import BlockRun, KVLayout
from kvrelay.core.tasks import TaskSet, failure_of
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import KvrelayError, TransferError
from kvrelay.transfer.compat import mapping_for
from kvrelay.transfer.layout_mapping import LayoutMapping
from kvrelay.transfer.thread import TransferThread
from kvrelay.transfer.values import Pieces, TransferOp
from kvrelay.worker.locks import KeyedLocks

_log = logging.getLogger(__name__)


class PeerMemory:
    """Of all peers. ``load(worker_id)`` reads a peer's metadata from discovery; it raises KvrelayError. ``connect`` and
    ``forget`` run on the event loop, ``pieces`` on any thread."""

    def __init__(
        self, layout: KVLayout, transfer: TransferThread, load: Callable[[str], Awaitable[KvMetadata]]
    ) -> None:
        self._layout = layout
        self._transfer = transfer
        self._load = load
        self._mappings: dict[str, LayoutMapping] = {}
        self._connecting = KeyedLocks()
        self._tasks = TaskSet()

    async def close(self) -> None:
        """Connect to nothing more."""
        await self._tasks.close()

    def reach(self, worker_id: str, then: Callable[[KvrelayError | None], None]) -> None:
        """``connect`` in the background, then ``then(None)`` or ``then(error)``. On the event loop."""
        self._tasks.spawn(self._reach(worker_id, then))

    async def _reach(self, worker_id: str, then: Callable[[KvrelayError | None], None]) -> None:
        then(await failure_of(self.connect(worker_id), f"connecting to the memory of {worker_id}"))

    async def connect(self, worker_id: str) -> None:
        """Load and cache the peer's memory metadata, at first use. Raises KvrelayError."""
        async with self._connecting.hold(worker_id):
            if not self._transfer.has_peer(worker_id):
                metadata = await self._load(worker_id)
                self._mappings[worker_id] = mapping_for(self._layout, metadata)
                await asyncio.wrap_future(self._transfer.add_peer(metadata))

    def forget(self, worker_id: str) -> None:
        """The connection to a peer's memory is closed; the next hand-off with it loads it again."""
        self._mappings.pop(worker_id, None)

    def pieces(self, op: TransferOp, worker_id: str, here: BlockRun, there: BlockRun, block_size: int) -> Pieces | None:
        """None if ``there``, in blocks of ``block_size`` tokens, does not fit the memory that the peer has
        registered, or if that is gone."""
        mapping = self._mappings.get(worker_id)
        if mapping is None:
            return None  # its connection is gone
        if block_size != mapping.remote.block_size:
            _log.error("%s named blocks of %d tokens, and %r has others", worker_id, block_size, mapping)
            return None
        try:
            return mapping.pieces(op, here, there)
        except TransferError as exc:
            _log.error("a %s of %s's memory cannot be planned: %s", op.value, worker_id, exc)
            return None
