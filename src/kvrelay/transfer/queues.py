"""The unfinished transfers by peer: which may be posted next, which have ended, which fail with a broken connection.

    accept ──> waiting ──post_due──> posts at the transport ──complete──> on_end(transfer, error)
                  └──────── disconnect, deadline, fence ────────────────────^

This module keeps the promises of ``TransferThread`` about order, groups, deadlines and the fence. It has no thread and
no lock: the transfer thread makes all calls except ``knows`` and ``withdraw``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from kvrelay.core.clock import Clock
from kvrelay.core.latest import Latest
from kvrelay.core.layout import MemoryRegion
from kvrelay.core.window import RemoteKey
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import RecomputeError, TransferError
from kvrelay.transfer.base import PostEnd, Transport
from kvrelay.transfer.compat import check_compatible
from kvrelay.transfer.pieces import check_bounds
from kvrelay.transfer.values import Pieces, TransferOp

OnDone = Callable[[str | None], None]

MAX_POSTS_PER_PEER = 8
MAX_FAILED_GROUPS = 4096


class Transfer(msgspec.Struct, eq=False):
    """A submitted transfer. ``parts`` are not posted yet; ``in_flight`` posts have not ended."""

    op: TransferOp
    worker_id: str
    pieces: Pieces
    notify: bytes | None
    on_done: OnDone
    group: str | None
    term: int
    submitted_s: float
    deadline_s: float
    parts: deque[Pieces]
    in_flight: int = 0
    key: RemoteKey | None = None
    error: str | None = None
    """Why the peer has refused a part; the parts in flight are awaited."""


class _PeerQueue:
    """Queue and posts of one peer."""

    def __init__(self) -> None:
        self.waiting: deque[Transfer] = deque()
        self.posts: dict[int, Transfer] = {}

    @property
    def transfers(self) -> list[Transfer]:
        """All unfinished transfers, in order, each once."""
        return list(dict.fromkeys([*self.posts.values(), *self.waiting]))


class TransferQueues(msgspec.Struct, eq=False):
    """Drives a Transport. ``fence()``: the time on ``clock`` until which posts are allowed. ``on_end(transfer, error)``
    runs once for each transfer that ``accept`` got."""

    _transport: Transport
    _clock: Clock
    _fence: Callable[[], float]
    _on_end: Callable[[Transfer, str | None], None]
    _region: MemoryRegion | None = None
    _kv_compatibility: str = ""
    _known: dict[str, KvMetadata] = {}
    _peers: dict[str, _PeerQueue] = {}
    _owners: dict[int, Transfer] = {}
    _failed_groups: Latest[str, str] = msgspec.field(default_factory=lambda: Latest(MAX_FAILED_GROUPS))
    term: int = 0
    """Transfers of an earlier term are no longer posted."""

    def __repr__(self) -> str:
        return f"TransferQueues({self._transport.name}, {len(self._known)} peers, {len(self._peers)} busy)"

    @property
    def is_idle(self) -> bool:
        return not self._peers

    def knows(self, worker_id: str) -> bool:
        """Whether the peer was added and not forgotten. From any thread."""
        return worker_id in self._known

    def withdraw(self) -> None:
        """Post none of the transfers submitted until now. From any thread, one call at a time."""
        self.term += 1

    def register(self, region: MemoryRegion, kv_compatibility: str) -> bytes:
        """Register our memory, once, and what every peer must share with us. Raises FatalError."""
        agent = self._transport.register(region)
        self._region = region
        self._kv_compatibility = kv_compatibility
        return agent

    def connect(self, metadata: KvMetadata) -> None:
        """Connect. Raises IncompatiblePeerError, or TransferError if the peer cannot be reached."""
        if self._region is None:
            raise TransferError("the KV pool is not registered yet", peer=metadata.worker_id)
        check_compatible(metadata, transport=self._transport.name, kv_compatibility=self._kv_compatibility)
        self._disconnect(metadata.worker_id, f"worker {metadata.worker_id} was added anew")
        self._transport.add_peer(metadata)
        self._known[metadata.worker_id] = metadata

    def accept(self, transfer: Transfer) -> None:
        """Queue the transfer after the earlier ones; a transfer that cannot be posted at all ends at once."""
        if transfer.term != self.term:
            self._finish(transfer, "withdrawn before it was begun")
            return
        remote, region = self._known.get(transfer.worker_id), self._region
        if remote is None or region is None:
            self._finish(transfer, f"worker {transfer.worker_id} is not connected")
            return
        try:
            # Check all pieces before the first part moves.
            check_bounds(transfer.pieces, region.num_bytes, remote.num_bytes, transfer.worker_id)
        except TransferError as exc:
            self._finish(transfer, exc.message)
            return
        self._peers.setdefault(transfer.worker_id, _PeerQueue()).waiting.append(transfer)

    def post_due(self) -> None:
        """Fail transfers that are past their deadline, then post all that may be posted."""
        self._expire()
        for worker_id, peer in list(self._peers.items()):
            # Posting to one peer may disconnect another.
            if self._peers.get(worker_id) is peer:
                self._pump(worker_id, peer)

    def complete(self, completion: PostEnd) -> None:
        """A post has ended."""
        transfer = self._owners.pop(completion.handle, None)
        if transfer is None:
            return  # failed already, with its connection
        peer = self._peers[transfer.worker_id]
        del peer.posts[completion.handle]
        transfer.in_flight -= 1
        error = completion.error
        if error is None and transfer.op is TransferOp.READ and self._clock.now() >= self._fence():
            # This process may have been stopped in the middle of the copy, and the peer have reused what it read.
            error = "the lease ran out during a read, so its bytes may be another request's"
        if error is not None and completion.is_refused:
            self._refused(peer, transfer, error)
        elif error is not None:
            if not peer.waiting or peer.waiting[0] is not transfer:
                peer.waiting.appendleft(transfer)
            self._disconnect(transfer.worker_id, error)
            return
        if transfer.in_flight == 0 and not transfer.parts:
            self._finish(transfer, transfer.error)
        if not peer.waiting and not peer.posts:
            self._peers.pop(transfer.worker_id, None)

    @staticmethod
    def _refused(peer: _PeerQueue, transfer: Transfer, error: str) -> None:
        """The connection is good: only this transfer fails, when its parts in flight have ended."""
        transfer.error = transfer.error or error
        transfer.parts.clear()
        if transfer in peer.waiting:
            peer.waiting.remove(transfer)

    def forget(self, worker_id: str) -> None:
        """Tear the connection down, fail its unfinished transfers, forget the peer."""
        self._known.pop(worker_id, None)
        self._disconnect(worker_id, f"worker {worker_id} was removed")

    def disconnect_all(self, error: str) -> None:
        """Tear every connection down and fail all unfinished transfers."""
        for worker_id in list(self._peers):
            self._disconnect(worker_id, error)

    def _pump(self, worker_id: str, peer: _PeerQueue) -> None:
        """Post all that may be posted to one peer."""
        while peer.waiting and len(peer.posts) < MAX_POSTS_PER_PEER:
            transfer = peer.waiting[0]
            earlier_error = None if transfer.group is None else self._failed_groups.get(transfer.group)
            if earlier_error is not None:
                peer.waiting.popleft()
                self._finish(transfer, earlier_error)
                continue
            if transfer.term != self.term:
                self.disconnect_all("withdrawn")
                return
            if self._clock.now() >= min(transfer.deadline_s, self._fence()):
                self._expire()
                return
            notify = transfer.notify if len(transfer.parts) == 1 else None
            if (notify is not None and peer.posts) or not self._post(worker_id, peer, transfer, notify):
                return
            if not transfer.parts:
                peer.waiting.popleft()
        if not peer.posts:
            self._peers.pop(worker_id, None)

    def _post(self, worker_id: str, peer: _PeerQueue, transfer: Transfer, notify: bytes | None) -> bool:
        try:
            if not self._transport.has_peer(worker_id):
                self._transport.add_peer(self._known[worker_id])
            handle = self._transport.post(transfer.op, worker_id, transfer.parts[0], notify, transfer.key)
        except RecomputeError as exc:
            self._disconnect(worker_id, exc.message)
            return False
        transfer.parts.popleft()
        self._owners[handle] = peer.posts[handle] = transfer
        transfer.in_flight += 1
        return True

    def _expire(self) -> None:
        """Fail transfers past their deadline, or all of them past the fence. If one was posted, its connection is torn
        down."""
        now = self._clock.now()
        if self._peers and now >= self._fence():
            self.disconnect_all("the lease has run out, so nothing may be written any more")
            return
        for worker_id, peer in list(self._peers.items()):
            late = [transfer for transfer in peer.transfers if now >= transfer.deadline_s]
            if any(transfer.in_flight for transfer in late):
                self._disconnect(worker_id, f"a transfer with worker {worker_id} ran past its deadline")
                continue
            for transfer in late:
                peer.waiting.remove(transfer)
                self._finish(transfer, f"a transfer with worker {worker_id} was not begun before its deadline")

    def _disconnect(self, worker_id: str, error: str) -> None:
        """Tear the connection down, then fail all transfers posted or queued on it."""
        if self._transport.has_peer(worker_id):
            self._transport.remove_peer(worker_id)
        peer = self._peers.pop(worker_id, None)
        if peer is None:
            return
        transfers = peer.transfers
        for handle in peer.posts:
            self._owners.pop(handle, None)
        # Other references to this object must find nothing in it to post.
        peer.posts.clear()
        peer.waiting.clear()
        for transfer in transfers:
            self._finish(transfer, error)

    def _finish(self, transfer: Transfer, error: str | None) -> None:
        if error is not None and transfer.group is not None:
            self._failed_groups.setdefault(transfer.group, error)
        self._on_end(transfer, error)
