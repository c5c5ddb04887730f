"""Transport within one process: memory copies between registered pools, with faults on request. For tests.

It owns the fabric, which stands in for the network and is shared by several transports, and the injected faults. It
does not know processes, sockets or devices; memory is ordinary memory. Bytes move when the poster polls, not when it
posts, so that tests can provoke late writes.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from dataclasses import dataclass, field

from kvrelay.core.layout import MemoryRegion
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import TransferError
from kvrelay.transfer.base import Notification, OneSided, PostEnd
from kvrelay.transfer.compat import check_pool
from kvrelay.transfer.pieces import check_post
from kvrelay.transfer.values import GrantRef, Int64Array, Pieces, TransferOp


@dataclass(slots=True)
class LoopbackFaults:
    """The faults of one fabric; may be changed at any time.

    ``delay_polls``: number of the poster's polls before a post ends. ``fail_next``: number of next posts that fail
    without moving a byte. ``drop_next``: number of next posts that never end. ``corrupt_next``: number of next posts
    with bytes that end well, but with a flipped bit. ``reorder``: posts end in random order.
    """

    delay_polls: int = 0
    fail_next: int = 0
    drop_next: int = 0
    corrupt_next: int = 0
    reorder: bool = False


@dataclass(slots=True)
class LoopbackPost:
    handle: int
    op: TransferOp
    worker_id: str
    pieces: Pieces
    notify: bytes | None
    polls_left: int
    fails: bool
    dropped: bool


@dataclass(slots=True)
class _End:
    """One worker's side of the fabric."""

    region: MemoryRegion
    inbox: deque[bytes] = field(default_factory=deque)
    connected: set[str] = field(default_factory=set)


class LoopbackFabric:
    """The registry that transports of one test share. Thread-safe."""

    def __init__(self, faults: LoopbackFaults | None = None, seed: int = 0) -> None:
        self.faults = faults or LoopbackFaults()
        self.lock = threading.RLock()
        self.random = random.Random(seed)
        self.ends: dict[str, _End] = {}

    def kill(self, worker_id: str) -> None:
        """Simulate the death of the worker's process: posts to it fail, its memory is never touched again."""
        with self.lock:
            self.ends.pop(worker_id, None)
            for end in self.ends.values():
                end.connected.discard(worker_id)


class LoopbackTransport(OneSided):
    """One worker's end. Contract: ``transfer.base.Transport``."""

    name = "loopback"
    has_bar = False

    def __init__(self, fabric: LoopbackFabric, worker_id: str) -> None:
        self._fabric = fabric
        self._worker_id = worker_id
        self._peers: dict[str, KvMetadata] = {}
        self.posts: list[LoopbackPost] = []
        """In flight."""
        self._failed: list[PostEnd] = []
        self._next_handle = 0

    def __repr__(self) -> str:
        return f"<LoopbackTransport {self._worker_id}: {len(self._peers)} peers, {len(self.posts)} posts in flight>"

    def register(self, region: MemoryRegion) -> bytes:
        with self._fabric.lock:
            if self._worker_id in self._fabric.ends:
                raise TransferError(f"worker {self._worker_id} has already registered its pool")
            self._fabric.ends[self._worker_id] = _End(region)
        return self._worker_id.encode()

    def add_peer(self, metadata: KvMetadata) -> None:
        check_pool(metadata)
        with self._fabric.lock:
            end = self._fabric.ends.get(metadata.worker_id)
            if end is None or metadata.agent != metadata.worker_id.encode():
                raise TransferError(f"worker {metadata.worker_id} cannot be reached", peer=metadata.worker_id)
            self._own_end().connected.add(metadata.worker_id)
            end.connected.add(self._worker_id)
        self._peers[metadata.worker_id] = metadata

    def remove_peer(self, worker_id: str) -> None:
        with self._fabric.lock:
            for end_id, other in ((self._worker_id, worker_id), (worker_id, self._worker_id)):
                end = self._fabric.ends.get(end_id)
                if end is not None:
                    end.connected.discard(other)
        self._peers.pop(worker_id, None)
        gone = [post for post in self.posts if post.worker_id == worker_id]
        self.posts = [post for post in self.posts if post.worker_id != worker_id]
        self._failed += [PostEnd(post.handle, f"worker {worker_id} was disconnected") for post in gone]

    def has_peer(self, worker_id: str) -> bool:
        return worker_id in self._peers

    def post(
        self,
        op: TransferOp,
        worker_id: str,
        pieces: Pieces,
        notify: bytes | None = None,
        grant: GrantRef | None = None,
    ) -> int:
        peer = self._peers.get(worker_id)
        if peer is None:
            raise TransferError(f"worker {worker_id} is not connected", peer=worker_id)
        with self._fabric.lock:
            check_post(pieces, self._own_end().region.num_bytes, peer.num_bytes, worker_id, notify)
            faults = self._fabric.faults
            fails, dropped = faults.fail_next > 0, faults.fail_next <= 0 < faults.drop_next
            faults.fail_next -= fails
            faults.drop_next -= dropped
            handle = self._next_handle
            self._next_handle += 1
            self.posts.append(LoopbackPost(handle, op, worker_id, pieces, notify, faults.delay_polls, fails, dropped))
        return handle

    def poll(self) -> tuple[list[PostEnd], list[Notification]]:
        completions, self._failed = self._failed, []
        with self._fabric.lock:
            for post in self.posts:
                post.polls_left -= 1
            due = [post for post in self.posts if post.polls_left < 0 and not post.dropped]
            if self._fabric.faults.reorder:
                self._fabric.random.shuffle(due)
            completions += [PostEnd(post.handle, self.perform(post)) for post in due]
            ended = {completion.handle for completion in completions}
            self.posts = [post for post in self.posts if post.handle not in ended]
            own = self._fabric.ends.get(self._worker_id)
            notifications = [Notification(payload) for payload in own.inbox] if own else []
            if own:
                own.inbox.clear()
        return completions, notifications

    @property
    def num_pending(self) -> int:
        return len(self.posts) + len(self._failed)

    def bar(self, worker_id: str) -> bool:
        return True

    def admit(self, worker_id: str) -> None:
        pass

    def close(self) -> None:
        for worker_id in list(self._peers):
            self.remove_peer(worker_id)
        self._fabric.kill(self._worker_id)

    def _own_end(self) -> _End:
        end = self._fabric.ends.get(self._worker_id)
        if end is None:
            raise TransferError(f"worker {self._worker_id} has not registered its pool")
        return end

    def perform(self, post: LoopbackPost) -> str | None:
        """Move the bytes of a post that is due; why not, if not. The fabric is locked. A test may wrap it."""
        end = self._fabric.ends.get(post.worker_id)
        own = self._fabric.ends.get(self._worker_id)
        if end is None or own is None or self._worker_id not in end.connected:
            return f"worker {post.worker_id} is gone"
        if post.fails:
            return "injected failure"
        for local, remote, length in zip(
            post.pieces.local_offsets.tolist(),
            post.pieces.remote_offsets.tolist(),
            post.pieces.lengths.tolist(),
            strict=True,
        ):
            here, there = own.region.address + local, end.region.address + remote
            if post.op is TransferOp.WRITE:
                ctypes.memmove(there, here, length)
            else:
                ctypes.memmove(here, there, length)
        if self._fabric.faults.corrupt_next and post.pieces.num_pieces:
            self._fabric.faults.corrupt_next -= 1
            if post.op is TransferOp.WRITE:
                self._flip_bit(end.region, post.pieces.remote_offsets, post.pieces.lengths)
            else:
                self._flip_bit(own.region, post.pieces.local_offsets, post.pieces.lengths)
        if post.notify is not None:
            end.inbox.append(post.notify)
        return None

    def _flip_bit(self, pool: MemoryRegion, offsets: Int64Array, lengths: Int64Array) -> None:
        """Damage one of the pieces that have arrived in ``pool``."""
        random = self._fabric.random
        piece = random.randrange(len(lengths))
        at = pool.address + int(offsets[piece]) + random.randrange(int(lengths[piece]))
        ctypes.c_ubyte.from_address(at).value ^= 1 << random.randrange(8)
