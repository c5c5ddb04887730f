"""Transport within one process: memory copies between registered pools. For ``kvrelay.LLM``, simulations and tests.

It owns the fabric, which stands in for the network and is shared by several transports. It does not know processes,
sockets or devices; memory is ordinary memory. Bytes move when the poster polls, not when it posts.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque

import msgspec

from kvrelay.core.layout import MemoryRegion
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import FatalError, TransferError
from kvrelay.transfer.base import Post, PostEnd, Transport
from kvrelay.transfer.values import TransferOp


class _End(msgspec.Struct):
    """One worker's side of the fabric."""

    region: MemoryRegion
    inbox: deque[bytes] = msgspec.field(default_factory=deque)
    connected: set[str] = msgspec.field(default_factory=set)


class LoopbackFabric:
    """The registry that transports of one process share. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.ends: dict[str, _End] = {}

    def transport(self, worker_id: str) -> LoopbackTransport:
        """A worker's end, not registered yet."""
        return LoopbackTransport(self, worker_id)

    def kill(self, worker_id: str) -> None:
        """The worker's process is gone: posts to it fail, its memory is never touched again."""
        with self.lock:
            self.ends.pop(worker_id, None)
            for end in self.ends.values():
                end.connected.discard(worker_id)


class LoopbackTransport(Transport):
    """Contract: ``transfer.base.Transport``."""

    name = "loopback"

    def __init__(self, fabric: LoopbackFabric, worker_id: str) -> None:
        super().__init__(worker_id)
        self._fabric = fabric
        self.posts: list[Post] = []
        """In flight."""

    def remove_peer(self, worker_id: str) -> None:
        """For both: it cannot post to us either."""
        with self._fabric.lock:
            for end_id, other in ((self._worker_id, worker_id), (worker_id, self._worker_id)):
                end = self._fabric.ends.get(end_id)
                if end is not None:
                    end.connected.discard(other)
        self._peers.pop(worker_id, None)
        gone = [post.handle for post in self.posts if post.worker_id == worker_id]
        self.posts = [post for post in self.posts if post.worker_id != worker_id]
        self._fail(gone, f"worker {worker_id} was disconnected")

    def poll(self) -> tuple[list[PostEnd], list[bytes]]:
        with self._fabric.lock:
            self._ended += [PostEnd(post.handle, self._perform(post)) for post in self._take_due()]
            own = self._fabric.ends.get(self._worker_id)
            notifications = list(own.inbox) if own else []
            if own:
                own.inbox.clear()
        return self._take_ended(), notifications

    @property
    def num_pending(self) -> int:
        return len(self.posts) + len(self._ended)

    def close(self) -> None:
        super().close()
        self._fabric.kill(self._worker_id)

    def _open(self, region: MemoryRegion) -> bytes:
        with self._fabric.lock:
            if self._worker_id in self._fabric.ends:
                raise FatalError(f"another worker {self._worker_id} has registered its KV pool")
            self._fabric.ends[self._worker_id] = _End(region)
        return self._worker_id.encode()

    def _connect(self, metadata: KvMetadata) -> KvMetadata:
        with self._fabric.lock:
            end, own = self._fabric.ends.get(metadata.worker_id), self._fabric.ends.get(self._worker_id)
            if end is None or own is None or metadata.agent != metadata.worker_id.encode():
                raise TransferError(f"worker {metadata.worker_id} cannot be reached", peer=metadata.worker_id)
            own.connected.add(metadata.worker_id)
            end.connected.add(self._worker_id)
        return metadata

    def _begin(self, post: Post, peer: KvMetadata) -> None:
        self.posts.append(post)

    def _take_due(self) -> list[Post]:
        """The posts that end now."""
        due, self.posts = self.posts, []
        return due

    def _perform(self, post: Post) -> str | None:
        end = self._fabric.ends.get(post.worker_id)
        own = self._fabric.ends.get(self._worker_id)
        if end is None or own is None or self._worker_id not in end.connected:
            return f"worker {post.worker_id} is gone"
        pieces = post.pieces
        sides = pieces.local_offsets.tolist(), pieces.remote_offsets.tolist(), pieces.lengths.tolist()
        for local, remote, length in zip(*sides, strict=True):
            here, there = own.region.address + local, end.region.address + remote
            if post.op is TransferOp.WRITE:
                ctypes.memmove(there, here, length)
            else:
                ctypes.memmove(here, there, length)
        if post.notify is not None:
            end.inbox.append(post.notify)
        return None
