"""One worker's data plane over the transports of its ranks, and to the ranks of its peers.

The worker sees one pool, the joined one (``splitting``), and one Transport. A post is split by pair of ranks, and ends
once: when all parts have ended. Its notification is sent only then, by one pair of ranks; the peer's rank hands it to
its worker. Rank i connects to the ranks of the peer that the rank map names, at first contact, and to others only if a
post needs them.

A worker whose own process moves its KV has one end, that process's transport: it pairs with peers of any kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.layout import KVLayout, MemoryRegion
from kvrelay.core.window import MemoryWindow
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import KvrelayError, TransferError
from kvrelay.transfer.base import Post, PostEnd, Transport
from kvrelay.transfer.compat import check_pool
from kvrelay.transfer.pieces import NO_PIECES
from kvrelay.transfer.ranks.link import RankTransport
from kvrelay.transfer.ranks.messages import Fence, RankMemory
from kvrelay.transfer.ranks.splitting import RankCut, RankPieces, rank_pairs, split
from kvrelay.transfer.stats import P2pCounters
from kvrelay.transfer.values import rank_id

_DECODER = msgspec.msgpack.Decoder(tuple[RankMemory, ...])


class _Peer(msgspec.Struct, eq=False):
    """A peer's joined pool, and its ranks as workers of their own."""

    num_bytes: int
    cut: RankCut | None
    ranks: tuple[KvMetadata, ...]
    connected: set[tuple[int, int]] = msgspec.field(default_factory=set)
    """(our end, the peer's rank), the pairs that are."""


class _Flight(msgspec.Struct, eq=False):
    """A post whose parts are under way. ``notify`` is still to be sent."""

    post: Post
    notify: bytes | None
    num_left: int = 0
    error: str | None = None
    is_refused: bool = False


class RankedTransport(Transport):
    """Contract: ``transfer.base.Transport``. ``ends``: one per rank, or this process's transport alone. ``layout``: of
    this worker's pool. ``fence``: what the ranks obey."""

    def __init__(
        self, worker_id: str, ends: Sequence[Transport], layout: KVLayout, shared_fence: Fence | None = None
    ) -> None:
        super().__init__(worker_id)
        self.name = ends[0].name
        self.has_bar = ends[0].has_bar
        self.has_windows = ends[0].has_windows
        self.late_s = ends[0].late_s
        self._ends = tuple(ends)
        self._layout = layout
        self._shared_fence = shared_fence
        self._cut: RankCut | None = None
        self._peers: dict[str, _Peer] = {}
        self._flights: dict[tuple[int, int], _Flight] = {}
        """By end and its own handle."""

    @property
    def wake_fds(self) -> tuple[int, ...]:  # type: ignore[override]
        return self._ends[0].wake_fds if len(self._ends) == 1 else ()

    def poll(self) -> tuple[list[PostEnd], list[bytes]]:
        self._tell_fence()
        arrived: list[bytes] = []
        for number, end in enumerate(self._ends):
            parts, notifications = end.poll()
            arrived += notifications
            for part in parts:
                flight = self._flights.pop((number, part.handle), None)
                if flight is not None:
                    self._part_ended(flight, part)
        return self._take_ended(), arrived

    @property
    def num_pending(self) -> int:
        return len({id(flight) for flight in self._flights.values()}) + len(self._ended)

    def bar(self, worker_id: str) -> bool:
        # Every one of them is told, whatever the first says.
        return all([end.bar(worker_id) for end in self._ends])

    def admit(self, worker_id: str) -> None:
        for end in self._ends:
            end.admit(worker_id)

    def open_window(self, window: MemoryWindow) -> None:
        if not self.has_windows:
            return
        parts = [window] if self._cut is None else self._cut.windows(window)
        for end, part in zip(self._ends, parts, strict=True):
            end.open_window(part)

    def close_window(self, handoff: str, loan: int) -> None:
        for end in self._ends if self.has_windows else ():
            end.close_window(handoff, loan)

    def learn(self, worker_id: str, public_key: str) -> None:
        for end in self._ends:
            end.learn(worker_id, public_key)

    def p2p_counters(self) -> P2pCounters | None:
        counters = [found for end in self._ends if (found := end.p2p_counters()) is not None]
        return P2pCounters.sum(counters) if counters else None

    def check_integrity(self) -> None:
        for end in self._ends:
            end.check_integrity()

    def close(self) -> None:
        super().close()
        for end in self._ends:
            end.close()

    def _open(self, region: MemoryRegion) -> bytes:
        """The agent's blob is a list of the ranks' memories with their blobs."""
        memories = [_registered(end, region) for end in self._ends]
        self._cut = RankCut.of(self._layout, memories)
        return msgspec.msgpack.encode(memories)

    def _connect(self, metadata: KvMetadata) -> _Peer:
        worker_id = metadata.worker_id
        try:
            memories = _DECODER.decode(metadata.agent)
            cut = RankCut.of(metadata.layout, memories)
        except (*UNREADABLE, ValueError) as exc:
            raise TransferError(f"the metadata of worker {worker_id} is damaged: {exc}", peer=worker_id) from exc
        peer = _Peer(metadata.num_bytes, cut, _ranks(metadata, memories))
        try:
            for here, there in rank_pairs(self._cut, cut):
                self._meet(peer, here, there)
        except KvrelayError:
            self._disconnect(worker_id, peer)
            raise
        return peer

    def _disconnect(self, worker_id: str, peer: _Peer) -> None:
        for here, there in sorted(peer.connected):
            self._ends[here].remove_peer(peer.ranks[there].worker_id)
        peer.connected.clear()

    def _meet(self, peer: _Peer, here: int, there: int) -> Transport:
        """Raises what ``add_peer`` raises."""
        end, rank = self._ends[here], peer.ranks[there]
        if (here, there) not in peer.connected or not end.has_peer(rank.worker_id):
            end.add_peer(rank)
            peer.connected.add((here, there))
        return end

    def _begin(self, post: Post, peer: _Peer) -> None:
        self._tell_fence()
        parts = split(post.pieces, self._cut, peer.cut)
        flight = _Flight(post, post.notify)
        if len(parts) > 1:
            for part in parts:
                self._send(flight, peer, part, None)
            self._settle(flight)
        else:
            self._send_last(flight, peer, parts)

    def _send_last(self, flight: _Flight, peer: _Peer, parts: list[RankPieces]) -> None:
        """What may carry the notification, since nothing else is under way."""
        notify, flight.notify = flight.notify, None
        # Any pair of ranks would do.
        part = parts[0] if parts else RankPieces(*min(peer.connected, default=(0, 0)), NO_PIECES)
        self._send(flight, peer, part, notify)
        self._settle(flight)

    def _send(self, flight: _Flight, peer: _Peer, part: RankPieces, notify: bytes | None) -> None:
        rank = peer.ranks[part.remote].worker_id
        try:
            end = self._meet(peer, part.local, part.remote)
            handle = end.forward(replace(flight.post, worker_id=rank, pieces=part.pieces, notify=notify))
        except KvrelayError as exc:
            flight.error, flight.is_refused = exc.message, False
        else:
            flight.num_left += 1
            self._flights[part.local, handle] = flight

    def _part_ended(self, flight: _Flight, part: PostEnd) -> None:
        flight.num_left -= 1
        if part.error is not None and (flight.error is None or not part.is_refused):
            flight.error, flight.is_refused = part.error, part.is_refused
        self._settle(flight)

    def _settle(self, flight: _Flight) -> None:
        """After a part was begun or has ended: the next, or the end of all."""
        handle, worker_id = flight.post.handle, flight.post.worker_id
        if flight.error is not None and not flight.is_refused:
            # The caller removes the peer, by which the other parts end.
            self._flights = {key: other for key, other in self._flights.items() if other is not flight}
            self._ended.append(PostEnd(handle, flight.error))
        elif flight.num_left == 0 and flight.error is not None:
            self._ended.append(PostEnd(handle, flight.error, is_refused=True))
        elif flight.num_left == 0 and flight.notify is not None:
            peer = self._peers.get(worker_id)
            if peer is None:
                self._ended.append(PostEnd(handle, f"worker {worker_id} was disconnected"))
            else:
                self._send_last(flight, peer, [])
        elif flight.num_left == 0:
            self._ended.append(PostEnd(handle, None))

    def _tell_fence(self) -> None:
        if self._shared_fence is not None:
            self._shared_fence[0] = self.fence()


def _registered(end: Transport, region: MemoryRegion) -> RankMemory:
    agent = end.register(region)
    if isinstance(end, RankTransport) and end.memory is not None:
        return end.memory
    return RankMemory(agent, region.address, region.num_bytes, region.device, region.device_id)


def _ranks(metadata: KvMetadata, memories: Sequence[RankMemory]) -> tuple[KvMetadata, ...]:
    """A worker's ranks as peers of their own. Raises IncompatiblePeerError for memory that cannot exist."""
    ranks = tuple(
        replace(
            metadata,
            worker_id=rank_id(metadata.worker_id, number, len(memories)),
            agent=memory.agent,
            address=memory.address,
            num_bytes=memory.num_bytes,
            block_bytes=memory.stride or metadata.block_bytes,
            device=memory.device,
            device_id=memory.device_id,
        )
        for number, memory in enumerate(memories)
    )
    for rank in ranks:
        check_pool(rank)
    return ranks
