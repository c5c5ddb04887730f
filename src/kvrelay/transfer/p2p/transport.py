"""The peer-to-peer transport: one worker's end. Control over ZMQ, data over process groups made at first contact.

    transfer thread ── post, poll ──> P2pTransport ── call ──> control thread: Initiator, Responder, Room, Communicators
                                            ^ completions, notifications       │ tasks
                                            └───────── queues ────────── lane threads: receive, send, copy

``send_type`` says when a post's bytes go:
  PUT        ``post`` returns when they have landed, or have failed. Everything else of the transfer thread waits.
  PUT_ASYNC  ``post`` returns at once; a thread of the pair sends.
  GET        ``post`` returns at once; the bytes are copied into this worker's own room, and the peer fetches them
             when it has room itself. It never refuses them.
Reads are alike in all three. It does not know hand-offs; which bytes a peer may touch stands in ``windows``.
"""

from __future__ import annotations

import contextlib
import os
import queue
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvrelay.config import TransferConfig
from kvrelay.core.layout import MemoryRegion
from kvrelay.core.window import MemoryWindow
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import FatalError, IntegrityError, TransferError
from kvrelay.transfer.base import Agent, Post, PostEnd, Transport
from kvrelay.transfer.p2p.address import LOOPBACK, P2pAddress
from kvrelay.transfer.p2p.posts import Arrival, SentPost
from kvrelay.transfer.stats import P2pCounters
from kvrelay.transfer.values import TransferOp
from kvrelay.transfer.windows import WindowTable

if TYPE_CHECKING:
    from kvrelay.transfer.p2p.node import Node


class P2pAgent(Agent, frozen=True):
    """What a peer has to know: ``KvMetadata.agent`` as msgpack."""

    address: str
    device: str
    max_message_bytes: int
    """The largest that can ever fit into this worker's room."""
    public_key: str = ""


class P2pTransport(Transport):
    """Contract: ``transfer.base.Transport``."""

    name = "p2p"
    has_bar = True
    has_windows = True

    def __init__(self, config: TransferConfig, worker_id: str, address: P2pAddress = LOOPBACK) -> None:
        super().__init__(worker_id)
        self._config = config
        self._address = address
        self.windows = WindowTable(is_enforced=address.is_guarded)
        self.node: Node | None = None
        self._posts: dict[int, SentPost] = {}
        self._arrived: queue.SimpleQueue[Arrival] = queue.SimpleQueue()

    def __repr__(self) -> str:
        return f"{super().__repr__()}, {self.node!r}"

    def _open(self, region: MemoryRegion) -> bytes:
        """Listen. Raises FatalError if torch is missing or the port is taken."""
        try:
            from kvrelay.transfer.p2p.node import Node
        except ImportError as exc:
            raise FatalError(f"transport p2p needs torch: {exc}") from exc
        self.wake_fds = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK),)
        self.node = Node(
            self._config,
            self._worker_id,
            region,
            self._address,
            self.windows,
            on_arrived=self._arrive,
            on_lost=lambda worker_id: self._peers.pop(worker_id, None),
        )
        agent = P2pAgent(
            worker_id=self._worker_id,
            address=self.node.control.address,
            num_bytes=region.num_bytes,
            device=region.device,
            max_message_bytes=self.node.shared.rooms.room.largest_bytes,
            public_key=self._address.keys.public.decode() if self._address.keys else "",
        )
        return msgspec.msgpack.encode(agent)

    def _connect(self, metadata: KvMetadata) -> KvMetadata:
        worker_id, node = metadata.worker_id, self.node
        agent = P2pAgent.of(metadata)
        if node is None or self._region is None or agent.device != self._region.device:
            raise TransferError(f"worker {worker_id} has its pool on {agent.device}", peer=worker_id)
        key, limit = metadata.public_key or agent.public_key, agent.max_message_bytes
        node.control.ask(partial(node.initiator.add_peer, worker_id, agent.address, key, limit))
        return metadata

    def remove_peer(self, worker_id: str) -> None:
        if self.node is None:
            return
        self._peers.pop(worker_id, None)
        gone = [post for post in self._posts.values() if post.worker_id == worker_id]
        error = f"worker {worker_id} was disconnected"
        with self.node.initiator.post_lock:
            for post in gone:
                post.is_over = True
        for post in gone:
            del self._posts[post.handle]
        self._fail([post.handle for post in gone], error)
        self.node.control.call(self.node.initiator.drop_peer, worker_id, error)

    def _begin(self, post: Post, peer: KvMetadata) -> None:
        node = self.node
        assert node is not None
        sent = SentPost(*msgspec.structs.astuple(post))
        self._posts[post.handle] = sent
        node.control.call(node.initiator.begin, sent)
        if self._config.send_type == "PUT" and post.op is TransferOp.WRITE:
            # The transfer thread's deadline follows if this one passes: it tears the connection down.
            sent.ended.wait(self._config.transfer_timeout_s)

    def poll(self) -> tuple[list[PostEnd], list[bytes]]:
        completions, notifications = self._take_ended(), []
        for fd in self.wake_fds:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(fd)
        while not self._arrived.empty():
            arrival = self._arrived.get()
            if isinstance(arrival, IntegrityError):
                raise arrival
            if isinstance(arrival, bytes):
                notifications.append(arrival)
            elif self._posts.pop(arrival.handle, None) is not None:
                is_refused = arrival.error is not None and arrival.is_refused
                completions.append(PostEnd(arrival.handle, arrival.error, is_refused))
        return completions, notifications

    def _arrive(self, arrival: Arrival) -> None:
        """On the control thread."""
        self._arrived.put(arrival)
        os.eventfd_write(self.wake_fds[0], 1)

    @property
    def num_pending(self) -> int:
        return len(self._posts) + len(self._ended)

    def learn(self, worker_id: str, public_key: str) -> None:
        """From any thread."""
        if self.node is not None:
            self.node.control.call(self.node.control.learn, worker_id, public_key)

    def bar(self, worker_id: str) -> bool:
        """What it has sent is copied by our own threads, under the table's lock: from here on it is not."""
        self.windows.bar(worker_id)
        if self.node is not None:
            self.node.control.call(self.node.responder.drop, worker_id)
        return True

    def admit(self, worker_id: str) -> None:
        self.windows.admit(worker_id)

    def open_window(self, window: MemoryWindow) -> None:
        self.windows.open(window)

    def close_window(self, handoff: str, loan: int) -> None:
        self.windows.close(handoff, loan)

    def p2p_counters(self) -> P2pCounters:
        """From any thread; single numbers, each by itself."""
        return self.node.counters() if self.node is not None else P2pCounters()

    def check_integrity(self) -> None:
        """Raises IntegrityError. From any thread; waits for the control thread."""
        if self.node is not None:
            self.node.control.ask(self.node.check_integrity)

    def close(self) -> None:
        """End all threads and communicators; our memory is not touched any more. Idempotent."""
        if self.node is None:
            return
        super().close()
        node, self.node = self.node, None
        node.close()
        (bell,), self.wake_fds = self.wake_fds, ()
        os.close(bell)
