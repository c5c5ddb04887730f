"""The KV data plane's contract: one-sided reads and writes between registered memory of two workers.

A transport owns connections between memories, posting, completion and notifications. It gets offsets and lengths
(Pieces); it does not know requests, schedulers or prefixes.

Protocol, per worker:
  1. ``register(region)`` once, after the pool is allocated; the blob it returns goes to discovery (KvMetadata.agent).
  2. ``add_peer(metadata)`` at the first hand-off with a peer. Raises IncompatiblePeerError for other KV.
  3. ``post(...)`` any number of reads and writes; the peer's engine takes no part. A ``notify`` payload arrives at the
     peer after all bytes of that write are visible there.
  4. ``poll()`` completes posts and collects notifications. Both sides must poll while a hand-off is open, or whenever
     one of ``wake_fds`` is readable.
  5. ``remove_peer(id)`` tears the connection down: after it returns, no post of the peer can touch our memory through
     this connection, and our pending posts to the peer have failed.
  6. ``bar(id)`` when a peer's lease has ended, repeated until it returns True. Only then does the end of the lease
     count: blocks that the peer may touch are reused after its fence. ``admit(id)`` when the peer has a lease again.
All methods of a Transport are called from one thread, the transfer thread (``TransferThread``); on one host a post
blocks that thread for the whole copy.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Self

import msgspec

from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.layout import MemoryRegion
from kvrelay.core.window import MemoryWindow, RemoteKey
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import FatalError, TransferError
from kvrelay.transfer.compat import check_pool
from kvrelay.transfer.pieces import check_post
from kvrelay.transfer.stats import P2pCounters
from kvrelay.transfer.values import Pieces, TransferOp


class Agent(msgspec.Struct, frozen=True):
    """What a peer has to know of a worker's pool: ``KvMetadata.agent`` as msgpack."""

    worker_id: str
    num_bytes: int

    @classmethod
    def of(cls, metadata: KvMetadata) -> Self:
        """Raises TransferError for one that is not of this kind, or another worker's."""
        agent = None
        with suppress(*UNREADABLE):
            agent = msgspec.msgpack.decode(metadata.agent, type=cls)
        if agent is None or (agent.worker_id, agent.num_bytes) != (metadata.worker_id, metadata.num_bytes):
            raise TransferError(f"the metadata of worker {metadata.worker_id} is damaged", peer=metadata.worker_id)
        return agent


class PostEnd(msgspec.Struct, frozen=True):
    """The end of a post. ``error`` is None if every byte arrived. ``is_refused``: the peer has refused it, for want of
    room or of a window; the connection is good, and other posts go on."""

    handle: int
    error: str | None
    is_refused: bool = False


class Post(msgspec.Struct, eq=False, tag=True):
    """One call of ``Transport.post``."""

    handle: int
    op: TransferOp
    worker_id: str
    pieces: Pieces
    notify: bytes | None
    key: RemoteKey | None


class Transport(ABC):
    """One worker's end of the data plane: the contract, and what all transports share.

    Each has its own ``_open`` (our pool becomes reachable; returns the blob), ``_connect`` and ``_disconnect`` (a peer,
    as an object with ``num_bytes``), ``_begin`` (a post that has been checked) and ``poll``.
    """

    name: str
    has_bar = False
    """Whether ``bar`` knows more than True. Then the end of a lease must wait for it."""
    has_windows = False
    """Whether this process puts peers' bytes into place, within windows. Else ``open_window`` has nothing to do."""
    late_s = 0.0
    """For how long bytes of a write that has failed may still land in the peer's memory."""
    wake_fds: tuple[int, ...] = ()
    """Once registered: file descriptors of which one is readable when ``poll`` has work to do. Empty: one must ask.
    Valid until ``close``."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._region: MemoryRegion | None = None
        self._peers: dict[str, Any] = {}
        self._ended: list[PostEnd] = []
        """Posts that have ended and that ``poll`` has not told of."""
        self._last_handle = 0
        self.fence: Callable[[], float] = _never
        """Until when posts are allowed, by the monotonic clock. Its user checks it before each post; a transport whose
        other processes post passes it on to them."""

    def __repr__(self) -> str:
        peers, posts = len(self._peers), self.num_pending
        return f"<{type(self).__name__} {self._worker_id}: {peers} peers, {posts} posts in flight>"

    def register(self, region: MemoryRegion) -> bytes:
        """Raises FatalError if this pool cannot be reached by others."""
        if self._region is not None:
            raise FatalError(f"worker {self._worker_id} has registered its KV pool already")
        agent = self._open(region)
        self._region = region
        return agent

    def add_peer(self, metadata: KvMetadata) -> None:
        """Raises IncompatiblePeerError for a pool that cannot exist, TransferError if the peer cannot be reached."""
        check_pool(metadata)
        self.remove_peer(metadata.worker_id)
        self._peers[metadata.worker_id] = self._connect(metadata)

    def remove_peer(self, worker_id: str) -> None:
        peer = self._peers.pop(worker_id, None)
        if peer is not None:
            self._disconnect(worker_id, peer)

    def has_peer(self, worker_id: str) -> bool:
        return worker_id in self._peers

    def post(
        self, op: TransferOp, worker_id: str, pieces: Pieces, notify: bytes | None = None, key: RemoteKey | None = None
    ) -> int:
        """Start moving; returns a handle that a PostEnd will name exactly once. Raises TransferError.

        No pieces are allowed with ``notify``: then only the payload is delivered. ``key`` is that of the peer's
        window; a transport without a WindowTable has no use for it.
        """
        peer, region = self._peers.get(worker_id), self._region
        if peer is None or region is None:
            raise TransferError(f"worker {worker_id} is not connected", peer=worker_id)
        check_post(pieces, region.num_bytes, peer.num_bytes, worker_id, notify)
        self._last_handle += 1
        self._begin(Post(self._last_handle, op, worker_id, pieces, notify, key), peer)
        return self._last_handle

    def forward(self, post: Post) -> int:
        """``post`` here, as what a transport that is made of others was asked for: the handle is of this one."""
        return self.post(post.op, post.worker_id, post.pieces, post.notify, post.key)

    @abstractmethod
    def poll(self) -> tuple[list[PostEnd], list[bytes]]:
        """The posts that have ended, and the payloads of peers, each after its write. They are untrusted."""

    @property
    @abstractmethod
    def num_pending(self) -> int:
        """Number of posts that have not completed."""

    def bar(self, worker_id: str) -> bool:
        """Keep a worker whose lease has ended from our memory, whether it is connected or not.

        True: it is not in the middle of a copy, and cannot begin one before ``admit``. False: it may be in the middle
        of one, perhaps stopped; ask again. A transport that cannot know returns True; its module says which late copies
        remain possible.
        """
        return True

    def admit(self, worker_id: str) -> None:  # noqa: B027 - most have nothing to do
        """Undo ``bar``."""

    def open_window(self, window: MemoryWindow) -> None:  # noqa: B027
        """The peer may touch these blocks. From any thread."""

    def close_window(self, handoff: str, loan: int) -> None:  # noqa: B027
        """The blocks of ``loan`` are touched no more. Waits for a copy that is under way: milliseconds. From any
        thread."""

    def learn(self, worker_id: str, public_key: str) -> None:  # noqa: B027
        """A worker has registered: who proves to hold this key is that worker. Empty: no one is. From any thread."""

    def p2p_counters(self) -> P2pCounters | None:
        """What only the peer-to-peer transport counts. From any thread."""
        return None

    def check_integrity(self) -> None:  # noqa: B027
        """Raises IntegrityError if memory of the transport's own is lost or used twice. From any thread."""

    def close(self) -> None:
        """Idempotent."""
        for worker_id in list(self._peers):
            self.remove_peer(worker_id)

    @abstractmethod
    def _open(self, region: MemoryRegion) -> bytes: ...

    @abstractmethod
    def _connect(self, metadata: KvMetadata) -> Any: ...

    def _disconnect(self, worker_id: str, peer: Any) -> None:  # noqa: B027
        """Fail the posts to it. It is no longer in ``_peers``."""

    @abstractmethod
    def _begin(self, post: Post, peer: Any) -> None: ...

    def _fail(self, handles: Iterable[int], error: str) -> None:
        self._ended += [PostEnd(handle, error) for handle in handles]

    def _take_ended(self) -> list[PostEnd]:
        ended, self._ended = self._ended, []
        return ended


def _never() -> float:
    return math.inf
