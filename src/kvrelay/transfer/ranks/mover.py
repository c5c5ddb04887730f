"""The rank process's end: a thread that moves this rank's part of the KV, as the worker's process orders.

It owns the rank's transport and calls it from this one thread. It checks the worker's fence before each post, since
this process may have been stopped after the worker has checked it, and cancels what is in flight when the fence passes.
It does not know layouts, hand-offs or the other ranks.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from contextlib import closing, suppress

from msgspec.structs import replace

from kvrelay.core.layout import MemoryRegion
from kvrelay.core.window import MemoryWindow
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import FatalError, KvrelayError
from kvrelay.transfer.base import Post, Transport
from kvrelay.transfer.factory import build_transport
from kvrelay.transfer.ranks.channel import Channel, ChannelClosedError
from kvrelay.transfer.ranks.link import WATCH_S
from kvrelay.transfer.ranks.messages import (
    Answer,
    Call,
    Connect,
    Counted,
    Disconnect,
    Fence,
    Learn,
    Notified,
    OpenMemory,
    PartEnded,
    RankMemory,
    ToRank,
    Watch,
)
from kvrelay.transfer.shm.memory import SharedPoolMemory
from kvrelay.transfer.stats import P2pCounters

COUNT_INTERVAL_S = 0.5
"""How often the worker is told counters that have changed."""

_log = logging.getLogger(__name__)


class RankMover:
    """``region``: this rank's memory, whose part of block b begins at ``begin + b * stride``. ``pool_fd``: the file in
    which it lies, if it is the host's. ``port_offset``: of transport p2p, from the worker's port."""

    def __init__(
        self,
        channel: Channel[ToRank],
        fence: Fence,
        region: MemoryRegion,
        *,
        begin: int = 0,
        stride: int,
        pool_fd: int = -1,
        port_offset: int = 0,
    ) -> None:
        self._channel = channel
        self._fence = fence
        self._region, self._begin, self._stride = region, begin, stride
        self._pool_fd = pool_fd
        self._port_offset = port_offset
        self._transport: Transport | None = None
        self._poll_interval_s = 0.001
        self._peers: dict[str, KvMetadata] = {}
        self._handles: dict[int, tuple[int, str]] = {}
        """By the transport's handle: the worker's, and the peer's rank."""
        self._watched_until_s = 0.0
        self._counters = P2pCounters()
        self._counted_s = 0.0
        self._wakers = select.epoll()
        """The channel, and what the transport is woken by."""
        self._wakers.register(channel.fileno(), select.EPOLLIN)

    def start(self) -> None:
        """Run on a thread until the worker closes the channel. A defect ends this process: the worker then notices."""
        threading.Thread(target=self._main, name="transfer", daemon=True).start()

    def _main(self) -> None:
        try:
            with suppress(ChannelClosedError), closing(self._channel):
                self.serve()
        except Exception:  # noqa: BLE001 - the outermost loop of this thread
            _log.exception("moving KV failed")
            logging.shutdown()
            os._exit(1)

    def serve(self) -> None:
        """Raises ChannelClosedError when the worker is gone."""
        while True:
            if self._channel.fileno() in dict(self._wakers.poll(self._wait_s())):
                self._handle(self._channel.receive())
            self._turn()

    def _wait_s(self) -> float | None:
        is_asked = self._transport is not None and not self._transport.wake_fds
        if self._handles or (is_asked and time.monotonic() < self._watched_until_s):
            return self._poll_interval_s
        return COUNT_INTERVAL_S if self._counts else None

    @property
    def _counts(self) -> bool:
        return self._transport is not None and self._transport.p2p_counters() is not None

    def _turn(self) -> None:
        """What has ended and arrived since."""
        if self._transport is None:
            return
        if self._handles and time.monotonic() >= self._fence[0]:
            # Their posts end by this.
            for rank_id in {rank_id for _, rank_id in self._handles.values()}:
                self._transport.remove_peer(rank_id)
        ended, notifications = self._transport.poll()
        for notification in notifications:
            self._channel.send(Notified(notification))
        for end in ended:
            handle, _ = self._handles.pop(end.handle, (None, ""))
            if handle is not None:
                self._channel.send(PartEnded(handle, end.error, end.is_refused))
        if self._counts and time.monotonic() - self._counted_s > COUNT_INTERVAL_S:
            self._counted_s = time.monotonic()
            counters = self._transport.p2p_counters()
            if counters is not None and counters != self._counters:
                self._counters = counters
                self._channel.send(Counted(counters))

    def _handle(self, message: ToRank) -> None:
        match message:
            case Post():
                self._watched_until_s = time.monotonic() + WATCH_S
                self._post(message)
            case Watch():
                self._watched_until_s = time.monotonic() + WATCH_S
            case Learn():
                if self._transport is not None:
                    self._transport.learn(message.worker_id, message.public_key)
            case _:
                try:
                    answer = self._answer(message)
                except KvrelayError as exc:
                    answer = Answer(exc.message, type(exc).__name__)
                self._channel.send(answer)

    def _answer(self, message: ToRank) -> Answer:
        """Raises what the transport raises."""
        if isinstance(message, OpenMemory):
            return Answer(memory=self._open(message))
        transport = self._transport
        if transport is None:
            raise FatalError("this rank has registered no memory")
        is_true = True
        match message:
            case Connect():
                peer = replace(message.peer, worker_id=message.rank_id)
                transport.add_peer(peer)
                self._peers[message.rank_id] = peer
            case Disconnect():
                self._peers.pop(message.rank_id, None)
                transport.remove_peer(message.rank_id)
            case Call():
                is_true = getattr(transport, message.method)(*message.arguments) is not False
            case MemoryWindow():
                transport.open_window(message)
        return Answer(is_true=is_true)

    def _open(self, message: OpenMemory) -> RankMemory:
        region, config = self._region, message.config
        memory = SharedPoolMemory()
        if message.pool_name and region.device == "cpu":
            memory.adopt(message.pool_name, self._pool_fd, region)
        config = config.at_port(self._port_offset)
        self._transport = build_transport(config, message.rank_id, memory=memory, address=message.address)
        self._poll_interval_s = config.poll_interval_s
        agent = self._transport.register(region)
        for fd in self._transport.wake_fds:
            self._wakers.register(fd, select.EPOLLIN)
        return RankMemory(
            agent, region.address, region.num_bytes, region.device, region.device_id, self._begin, self._stride
        )

    def _post(self, message: Post) -> None:
        transport = self._transport
        assert transport is not None
        if time.monotonic() >= self._fence[0]:
            error = "the lease has run out, so nothing may be written any more"
            self._channel.send(PartEnded(message.handle, error))
            return
        try:
            if not transport.has_peer(message.worker_id) and message.worker_id in self._peers:
                transport.add_peer(self._peers[message.worker_id])  # the connection was lost meanwhile
            handle = transport.forward(message)
        except KvrelayError as exc:
            self._channel.send(PartEnded(message.handle, exc.message))
        else:
            self._handles[handle] = message.handle, message.worker_id
