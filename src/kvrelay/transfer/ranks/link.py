"""The worker's end of one rank process: a Transport whose posts, peers and memory are the rank's.

It owns the socket and knows what is in flight there. A rank that does not answer for ``timeout_s`` is killed: only then
is it certain that it touches no memory any more. Its executor notices its end, and the worker ends.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from kvrelay import errors
from kvrelay.config import TransferConfig
from kvrelay.core.layout import MemoryRegion
from kvrelay.core.window import MemoryWindow
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import FatalError, IncompatiblePeerError, KvrelayError, TransferError
from kvrelay.transfer.base import Post, PostEnd, Transport
from kvrelay.transfer.nixl import LATE_S
from kvrelay.transfer.p2p.address import LOOPBACK, P2pAddress
from kvrelay.transfer.ranks.channel import Channel, ChannelClosedError
from kvrelay.transfer.ranks.messages import (
    Answer,
    Call,
    Connect,
    Counted,
    Disconnect,
    Fence,
    FromRank,
    Learn,
    Notified,
    OpenMemory,
    PartEnded,
    RankMemory,
    ToRank,
    Watch,
)
from kvrelay.transfer.stats import P2pCounters
from kvrelay.transfer.values import worker_of

WATCH_S = 0.2
"""A rank polls its transport for so long after a post or a Watch."""
OPEN_TIMEOUT_S = 60.0
"""A rank loads libraries when it registers its memory."""
_WATCH_AGAIN_S = WATCH_S / 4

_log = logging.getLogger(__name__)


class RankLink(msgspec.Struct, frozen=True):
    """One rank process, as its executor offers it. ``kill`` ends the process and returns when it has ended."""

    name: str
    channel: Channel[FromRank]
    kill: Callable[[], None]


class RankLinks:
    """Give ``offer`` to the executor and this object to the transport's builder."""

    def __init__(self) -> None:
        self.links: tuple[RankLink, ...] = ()
        self.fence: Fence | None = None

    def offer(self, links: Sequence[RankLink], fence: Fence) -> None:
        """What an executor calls whose ranks can move their own KV. ``fence``: in memory that they share with us."""
        self.links, self.fence = tuple(links), fence


class RankTransport(Transport):
    """Contract: ``transfer.base.Transport``; all methods from any thread."""

    def __init__(
        self, link: RankLink, rank_id: str, config: TransferConfig, pool_name: str = "", address: P2pAddress = LOOPBACK
    ) -> None:
        super().__init__(rank_id)
        self.name = config.transport
        self.has_bar = config.transport != "nixl"
        self.late_s = LATE_S if config.transport in ("nixl", "auto") else 0.0
        self.has_windows = config.transport == "p2p"
        self.memory: RankMemory | None = None
        """Once it is registered."""
        self._link = link
        self._config = config
        self._pool_name = pool_name
        self._address = address
        self._timeout_s = config.transfer_timeout_s
        self._lock = threading.RLock()
        self._poller = select.poll()
        self._poller.register(link.channel.fileno(), select.POLLIN)
        self._received: deque[FromRank] = deque()
        self._in_flight: dict[int, str] = {}
        self._counters = P2pCounters()
        self._watched_s = 0.0
        self._end: str | None = None
        """Why the rank is not asked any more."""
        link.channel.set_timeout(self._timeout_s)

    def register(self, region: MemoryRegion) -> bytes:
        """``region`` is the worker's; the rank registers its own."""
        answer = self._ask(OpenMemory(self._worker_id, self._config, self._pool_name, self._address), OPEN_TIMEOUT_S)
        assert answer.memory is not None
        self.memory = memory = answer.memory
        self._region = MemoryRegion(memory.address, memory.num_bytes, memory.device, memory.device_id)
        return memory.agent

    def poll(self) -> tuple[list[PostEnd], list[bytes]]:
        with self._lock:
            self._watch()
            while self._end is None and self._poller.poll(0):
                self._receive()
            received, self._received = self._received, deque()
            ended, notifications = self._take_ended(), []
            for message in received:
                if isinstance(message, Notified):
                    notifications.append(message.payload)
                elif isinstance(message, PartEnded) and self._in_flight.pop(message.handle, None) is not None:
                    ended.append(message)
            return ended, notifications

    @property
    def num_pending(self) -> int:
        return len(self._in_flight) + len(self._ended)

    def bar(self, worker_id: str) -> bool:
        # A rank that has ended touches nothing.
        return self._ask_if_alive(Call("bar", (worker_id,))).is_true

    def admit(self, worker_id: str) -> None:
        self._ask_if_alive(Call("admit", (worker_id,)))

    def open_window(self, window: MemoryWindow) -> None:
        self._ask_if_alive(window)

    def close_window(self, handoff: str, loan: int) -> None:
        self._ask_if_alive(Call("close_window", (handoff, loan)))

    def learn(self, worker_id: str, public_key: str) -> None:
        with self._lock:
            self._send(Learn(worker_id, public_key))

    def p2p_counters(self) -> P2pCounters | None:
        """As the rank has told them last."""
        return self._counters if self.has_windows else None

    def check_integrity(self) -> None:
        if self.memory is not None:
            self._ask_if_alive(Call("check_integrity"))

    def close(self) -> None:
        super().close()
        if self.memory is not None:
            self._ask_if_alive(Call("close"))
            self.memory = self._region = None

    def _open(self, region: MemoryRegion) -> bytes:
        raise AssertionError("register does it")

    def _connect(self, metadata: KvMetadata) -> KvMetadata:
        self._ask(Connect(metadata.worker_id, replace(metadata, worker_id=worker_of(metadata.worker_id))))
        return metadata

    def _disconnect(self, worker_id: str, peer: KvMetadata) -> None:
        """The rank has stopped, or is dead, when this returns."""
        self._ask_if_alive(Disconnect(worker_id))
        with self._lock:
            gone = [handle for handle, name in self._in_flight.items() if name == worker_id]
            for handle in gone:
                del self._in_flight[handle]
            self._fail(gone, f"worker {worker_id} was disconnected")

    def _begin(self, post: Post, peer: KvMetadata) -> None:
        with self._lock:
            self._in_flight[post.handle] = post.worker_id
            self._watched_s = time.monotonic()
            self._send(post)

    @property
    def _silence(self) -> str:
        return f"has not answered for {self._timeout_s:g} s (--transfer-timeout-s)"

    # -- the socket, under the lock -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        if time.monotonic() - self._watched_s > _WATCH_AGAIN_S:
            self._watched_s = time.monotonic()
            self._send(Watch())

    def _ask_if_alive(self, message: ToRank) -> Answer:
        """An empty answer if the rank has ended."""
        try:
            return self._ask(message)
        except KvrelayError:
            if self._end is None:
                raise
            return Answer()

    def _ask(self, message: ToRank, least_s: float = 0.0) -> Answer:
        """Waits for the timeout, at least ``least_s``. Raises what the rank has raised, or TransferError if it has
        ended."""
        with self._lock:
            self._send(message)
            until_s = time.monotonic() + max(self._timeout_s, least_s)
            while self._end is None:
                answer = self._received[-1] if self._received else None
                if isinstance(answer, Answer):
                    self._received.pop()
                    if answer.error is not None:
                        raise _raised(answer.kind, answer.error)
                    return answer
                if self._poller.poll(max(0.0, until_s - time.monotonic()) * 1000):
                    self._receive()
                else:
                    self._lose(self._silence)
            raise TransferError(self._end)

    def _send(self, message: ToRank) -> None:
        """Reads meanwhile, since the rank may be sending too. Nothing once the rank has ended."""
        rest = memoryview(self._link.channel.frame(message))
        until_s = time.monotonic() + self._timeout_s
        both = select.poll()
        both.register(self._link.channel.fileno(), select.POLLIN | select.POLLOUT)
        while rest and self._end is None:
            try:
                rest = rest[self._link.channel.send_some(rest) :]
            except ChannelClosedError as exc:
                self._lose(f"is gone ({exc})")
                return
            if not rest:
                return
            events = both.poll(max(0.0, until_s - time.monotonic()) * 1000)
            if not events:
                self._lose(self._silence)
            elif events[0][1] & ~select.POLLOUT:
                self._receive()

    def _receive(self) -> None:
        try:
            message = self._link.channel.receive()
        except ChannelClosedError as exc:
            self._lose(f"is gone ({exc})")
            return
        if isinstance(message, Counted):
            self._counters = message.counters
        else:
            self._received.append(message)

    def _lose(self, reason: str) -> None:
        """End the rank, if it has not ended: then it moves nothing any more, and its posts have failed."""
        self._end = f"{self._link.name} {reason}"
        _log.error("%s, and so it is killed, since it may be moving KV", self._end)
        self._link.kill()
        gone = list(self._in_flight)
        self._in_flight.clear()
        self._fail(gone, self._end)


def _raised(kind: str, message: str) -> KvrelayError:
    """What the rank has raised, if it is one of our errors that need only a message."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, (TransferError, IncompatiblePeerError, FatalError)):
        return found(message)
    return FatalError(f"{kind}: {message}")
