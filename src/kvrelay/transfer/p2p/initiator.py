"""The end that posts: cuts transfers into messages, makes communicators, offers, sends or receives, and completes.

    write ──> messages of CHUNK_BYTES ──> [GET: keep a copy] ──> offer ──> Accept ──> [gather, send] ──> Landed
    read  ──> messages of CHUNK_BYTES ──> reserve room ──> offer ──> Sending ──> [receive, scatter] ──> Landed

At most WINDOW messages per peer are offered at once, so that room and staging stay small. A message that was offered on
a communicator which the peer has closed before accepting it is offered again on a new one.

Handlers run on the control thread. Tasks run on a lane's thread.
"""

from __future__ import annotations

import enum
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvrelay.transfer.base import GrantRef, TransferOp, TransferPlan
from kvrelay.transfer.p2p.groups import PairGroup
from kvrelay.transfer.p2p.messages import (
    MAX_PIECES,
    Accept,
    Close,
    Connect,
    Connected,
    Get,
    Landed,
    Message,
    Put,
    Refused,
    Rendezvous,
    Sending,
    Tell,
    pack,
)
from kvrelay.transfer.p2p.pairs import Pair
from kvrelay.transfer.p2p.room import Reservation
from kvrelay.transfer.p2p.shared import CHUNK_BYTES, Shared
from kvrelay.transfer.p2p.tasks import MoveTask, ReceiveTask, staging
from kvrelay.transfer.plan import split_plan

WINDOW = 4
RETRY_S = 0.05
"""Before a peer that had no communicator left is asked again."""

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Post:
    """One call of ``Transport.post``. ``is_over``: completed, or given up (under ``Initiator.post_lock``).

    ``is_refused``: all its errors are refusals of the peer, and the connection is good.
    """

    handle: int
    op: TransferOp
    worker_id: str
    notify: bytes | None
    grant: GrantRef | None
    num_parts: int = 0
    num_left: int = 0
    error: str | None = None
    is_refused: bool = True
    is_over: bool = False
    ended: threading.Event = field(default_factory=threading.Event)


class State(enum.Enum):
    """Of a message."""

    WAITING = "waiting"
    """For a communicator, the window, or room of our own."""
    OFFERED = "offered"
    ACCEPTED = "accepted"


@dataclass(eq=False, slots=True)
class _Item:
    """One message of a post. ``is_busy``: a task of it is queued or runs. ``is_kept`` (GET): the bytes are copied."""

    number: int
    post: Post
    peer: _Peer
    plan: TransferPlan
    num_bytes: int
    state: State = State.WAITING
    pair: Pair | None = None
    reservation: Reservation | None = None
    is_busy: bool = False
    is_kept: bool = False
    is_landed: bool = False
    error: str | None = None
    is_refused: bool = False


@dataclass(eq=False, slots=True)
class _Peer:
    max_message_bytes: int
    pair: Pair | None = None
    connecting: str = ""
    retry_s: float | None = None
    waiting: deque[_Item] = field(default_factory=deque)
    num_offered: int = 0
    is_pumping: bool = False


class _Keep(MoveTask["Initiator", _Item]):
    """GET: copy the bytes out of the blocks."""

    def begin(self, group: Callable[[], PairGroup], slot: int) -> None:
        item = self._item
        assert item.reservation is not None
        self._owner.shared.pool.gather(item.plan.local_offsets, item.plan.lengths, item.reservation.tensor)

    def ended(self, error: str | None) -> None:
        self._owner.shared.control.call(self._owner.kept, self._item, error)


class _Send(MoveTask["Initiator", _Item]):
    """Data of a Put: from the copy, from the one run of bytes that it is, or gathered."""

    def begin(self, group: Callable[[], PairGroup], slot: int) -> Any:
        item, shared = self._item, self._owner.shared
        assert item.pair is not None
        offsets, lengths = item.plan.local_offsets, item.plan.lengths
        if item.reservation is not None:
            tensor = item.reservation.tensor
            if item.reservation.is_spilled and not shared.pool.is_host:
                tensor = staging(item.pair, "send", slot, shared)[: item.num_bytes].copy_(tensor)
        else:
            tensor = shared.pool.run(offsets, lengths)
            if tensor is None:
                tensor = staging(item.pair, "send", slot, shared)[: item.num_bytes]
                shared.pool.gather(offsets, lengths, tensor)
        return group().send(tensor, item.number)


class _Receive(ReceiveTask["Initiator", _Item]):
    """Data of a Get: into room of ours, then into our blocks unless the post was given up."""

    def scatter(self, tensor: Any) -> None:
        item = self._item
        with self._owner.post_lock:
            if not item.post.is_over:
                self._owner.shared.pool.scatter(tensor, item.plan.local_offsets, item.plan.lengths)


class Initiator:
    """``keeps``: GET. ``on_ended(post)`` runs on the control thread, once for each post that was not given up.

    ``post_lock`` excludes what a lane copies into our pool from the moment at which a post is given up.
    """

    def __init__(self, shared: Shared, *, keeps: bool, on_ended: Callable[[Post], None]) -> None:
        self.shared = shared
        self.post_lock = threading.Lock()
        self._keeps = keeps
        self._on_ended = on_ended
        self._peers: dict[str, _Peer] = {}
        self._items: dict[int, _Item] = {}
        self._tells: dict[int, Post] = {}
        self._next_number = 1

    def __repr__(self) -> str:
        return f"Initiator({len(self._peers)} peers, {len(self._items)} messages open)"

    @property
    def num_open(self) -> int:
        return len(self._items) + len(self._tells)

    @property
    def num_connecting(self) -> int:
        return sum(bool(peer.connecting) for peer in self._peers.values())

    # -- peers and posts ----------------------------------------------------------------------------------------------

    def add_peer(self, worker_id: str, address: str, public_key: str, max_message_bytes: int) -> None:
        """Raises TransferError."""
        self.shared.control.dial(worker_id, address, public_key)
        self._peers[worker_id] = _Peer(max_message_bytes)

    def drop_peer(self, worker_id: str, error: str) -> None:
        """End everything with it. Tasks that are under way end by themselves."""
        peer = self._peers.pop(worker_id, None)
        if peer is not None and peer.pair is not None:
            self.shared.control.send(worker_id, Close(peer.pair.name))
            self._close(peer.pair)
        self.shared.control.hang_up(worker_id)
        for number in [number for number, post in self._tells.items() if post.worker_id == worker_id]:
            self._complete(self._tells.pop(number), error)
        for item in [item for item in self._items.values() if item.post.worker_id == worker_id]:
            self._land(item, error)

    def begin(self, post: Post, plan: TransferPlan) -> None:
        """Offer everything, as fast as the window allows."""
        peer = self._peers.get(post.worker_id)
        if peer is None:
            self._complete(post, f"worker {post.worker_id} is not connected")
            return
        if plan.num_pieces == 0:
            self._tell(post)
            return
        for part in self._parts(plan, peer, post.op):
            post.num_left += 1
            item = _Item(self._number(), post, peer, part, part.num_bytes)
            self._items[item.number] = item
            peer.waiting.append(item)
        post.num_parts = post.num_left
        self._pump(post.worker_id, peer)

    def _parts(self, plan: TransferPlan, peer: _Peer, op: TransferOp) -> Iterator[TransferPlan]:
        """Messages that can fit: into the peer's room, and into ours where we need some."""
        limits = [CHUNK_BYTES, peer.max_message_bytes]
        if self._keeps or op is TransferOp.READ:
            limits.append(self.shared.rooms.room.largest_bytes)
        # Below that size messages need no room. Larger ones will be lost, and counted.
        largest = CHUNK_BYTES if self.shared.is_eager(min(limits)) else min(limits)
        for part in split_plan(plan, largest):
            for first in range(0, part.num_pieces, MAX_PIECES):
                cut = slice(first, first + MAX_PIECES)
                yield TransferPlan(part.local_offsets[cut], part.remote_offsets[cut], part.lengths[cut])

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number

    # -- offers -------------------------------------------------------------------------------------------------------

    def _pump(self, worker_id: str, peer: _Peer) -> None:
        """Offer what may be offered, in order. What ends meanwhile does not begin this again, but makes it go on."""
        if peer.is_pumping:
            return
        peer.is_pumping = True
        try:
            while peer.waiting and peer.num_offered < WINDOW and self._peers.get(worker_id) is peer:
                if not self._offer_first(worker_id, peer):
                    return
        finally:
            peer.is_pumping = False

    def _offer_first(self, worker_id: str, peer: _Peer) -> bool:
        """False: it waits for a communicator."""
        item = peer.waiting[0]
        is_useless = item.post.is_over or item.post.error is not None
        is_eager = self.shared.is_eager(item.num_bytes)
        if not is_useless and not is_eager and peer.pair is None:
            self._connect(worker_id, peer)
            return False
        peer.waiting.popleft()
        peer.num_offered += 1
        item.state = State.OFFERED
        if is_useless:
            self._land(item, "another part of it has failed", is_refused=True)
        elif is_eager:
            self._send_eager(worker_id, item)
        else:
            self._begin(worker_id, peer, item)
        return True

    def _send_eager(self, worker_id: str, item: _Item) -> None:
        plan, post = item.plan, item.post
        pieces = (item.num_bytes, pack(plan.remote_offsets), pack(plan.lengths), post.grant)
        if post.op is TransferOp.READ:
            is_sent = self.shared.control.send(worker_id, Get("", item.number, *pieces))
        else:
            data = self.shared.pool.gather_bytes(plan.local_offsets, plan.lengths)
            is_sent = self.shared.control.send(worker_id, Put("", item.number, *pieces, notify=_rides(post)), data)
        if not is_sent:
            self._land(item, f"worker {worker_id} does not read what we send")

    def _begin(self, worker_id: str, peer: _Peer, item: _Item) -> None:
        assert peer.pair is not None
        item.pair = peer.pair
        item.pair.num_open += 1
        needs_room = item.post.op is TransferOp.READ or (self._keeps and not item.is_kept)
        if not needs_room or item.reservation is not None:
            self._offer(worker_id, item)
            return
        self.shared.rooms.ask(item, item.num_bytes, lambda room: self._has_room(worker_id, item, room))

    def _has_room(self, worker_id: str, item: _Item, reservation: Reservation | None) -> None:
        if reservation is None:
            error = f"{item.num_bytes} bytes fit neither into our buffer nor into our memory pool"
            self._land(item, error, is_refused=True)
            return
        item.reservation = reservation
        if item.post.op is TransferOp.READ:
            self._offer(worker_id, item)
        elif item.pair is not None:
            item.is_busy = True
            item.pair.send(_Keep(self, item))

    def kept(self, item: _Item, error: str | None) -> None:
        """GET: the copy is made, or will not be."""
        item.is_busy = False
        item.is_kept = error is None
        if error is None and item.number in self._items and not item.is_landed:
            self._offer(item.post.worker_id, item)
        else:
            self._land(item, error)

    def _offer(self, worker_id: str, item: _Item) -> None:
        assert item.pair is not None
        plan, post, name = item.plan, item.post, item.pair.name
        pieces = (item.num_bytes, pack(plan.remote_offsets), pack(plan.lengths), post.grant)
        if post.op is TransferOp.READ:
            message: Message = Get(name, item.number, *pieces)
        else:
            message = Put(name, item.number, *pieces, waits=self._keeps, notify=_rides(post))
        if not self.shared.control.send(worker_id, message):
            self._land(item, f"worker {worker_id} does not read what we send")

    def _tell(self, post: Post) -> None:
        if post.notify is None:
            self._complete(post, None)
            return
        number = self._number()
        self._tells[number] = post
        if not self.shared.control.send(post.worker_id, Tell(number, post.notify)):
            self._complete(self._tells.pop(number), f"worker {post.worker_id} does not read what we send")

    # -- communicators ------------------------------------------------------------------------------------------------

    def _connect(self, worker_id: str, peer: _Peer) -> None:
        """Ask for a communicator, unless that is under way."""
        shared = self.shared
        if peer.connecting or (peer.retry_s is not None and shared.clock() < peer.retry_s):
            return
        evicted = shared.table.make_room(self.num_connecting)
        if evicted is None:
            shared.num_busy += 1
            peer.retry_s = shared.clock() + RETRY_S
            return
        for pair in evicted:
            shared.table.num_evicted += 1
            shared.end_idle(pair)
        peer.connecting = secrets.token_hex(16)
        peer.retry_s = None
        shared.control.send(worker_id, Connect(peer.connecting))

    def end_idle(self, pair: Pair) -> None:
        """Close a communicator of ours that nothing needs."""
        self.shared.control.send(pair.peer_id, Close(pair.name))
        self._close(pair)

    def _connected(self, worker_id: str, peer: _Peer, name: str) -> None:
        shared = self.shared
        peer.connecting = ""
        peer.pair = Pair(
            name,
            worker_id,
            0,
            device=shared.pool.device,
            timeout_s=shared.timeout_s,
            send_key=lambda key, value: shared.control.call(
                shared.control.send, worker_id, Rendezvous(name, key, value)
            ),
            on_failed=lambda pair, error: shared.control.call(self._failed, pair, error),
        )
        peer.pair.used_s = shared.clock()
        shared.table.add(peer.pair)
        self._pump(worker_id, peer)

    def _failed(self, pair: Pair, error: str) -> None:
        """Everything that needs it fails, at once: the peer may be dead."""
        self.shared.num_failed += 1
        _log.warning("the communicator with %s has failed: %s", pair.peer_id, error)
        self.shared.control.send(pair.peer_id, Close(pair.name))
        self._close(pair)
        for item in [item for item in self._items.values() if item.pair is pair]:
            self._land(item, error)

    def _close(self, pair: Pair) -> None:
        """No message is offered on it any more."""
        self.shared.table.remove(pair)
        pair.close()
        peer = self._peers.get(pair.peer_id)
        if peer is not None and peer.pair is pair:
            peer.pair = None

    def _closed_by_peer(self, worker_id: str, peer: _Peer, name: str) -> None:
        pair = peer.pair
        if pair is None or pair.name != name:
            return
        self._close(pair)
        again = []
        for item in [item for item in self._items.values() if item.pair is pair]:
            if item.state is State.OFFERED and not item.is_busy and not item.is_landed:
                again.append(self._back(peer, item))
            else:
                self._land(item, "the peer has closed the communicator")
        peer.waiting.extendleft(reversed(again))
        self._pump(worker_id, peer)

    def _back(self, peer: _Peer, item: _Item) -> _Item:
        """Offer it again; what it keeps stays."""
        item.state = State.WAITING
        item.pair = None
        peer.num_offered -= 1
        self.shared.rooms.cancel(item)
        return item

    # -- answers ------------------------------------------------------------------------------------------------------

    def handle(self, worker_id: str, message: Message, payload: memoryview) -> None:
        """An answer of a peer. One that makes no sense changes nothing."""
        peer = self._peers.get(worker_id)
        if peer is None:
            return
        match message:
            case Connected() if message.pair == peer.connecting:
                self._connected(worker_id, peer, message.pair)
            case Connected():
                self.shared.control.send(worker_id, Close(message.pair))
            case Refused() if message.pair == peer.connecting:
                peer.connecting = ""
                peer.retry_s = self.shared.clock() + RETRY_S
            case Rendezvous() if peer.pair is not None and peer.pair.name == message.pair:
                peer.pair.store.receive(message.key, message.value)
            case Close():
                self._closed_by_peer(worker_id, peer, message.pair)
            case Accept() | Sending():
                self._accepted(worker_id, message)
            case Landed():
                self._landed(worker_id, message, payload)
            case _:
                _log.debug("%s sent an unexpected %s", worker_id, type(message).__name__)

    def _accepted(self, worker_id: str, message: Accept | Sending) -> None:
        item = self._items.get(message.message)
        is_read = isinstance(message, Sending)
        if item is None or item.post.worker_id != worker_id or item.state is not State.OFFERED or item.pair is None:
            return
        if is_read is not (item.post.op is TransferOp.READ) or item.is_busy or item.is_landed:
            return
        item.state = State.ACCEPTED
        item.is_busy = True
        if is_read:
            item.pair.receive(_Receive(self, item))
        else:
            item.pair.send(_Send(self, item))

    def _landed(self, worker_id: str, message: Landed, payload: memoryview) -> None:
        post = self._tells.get(message.message)
        if post is not None and post.worker_id == worker_id:
            del self._tells[message.message]
            self._complete(post, message.error)
            return
        item = self._items.get(message.message)
        if item is None or item.post.worker_id != worker_id or item.state is State.WAITING:
            return
        error = message.error
        if error is None and item.post.op is TransferOp.READ and item.pair is None:
            error = self._take(item, payload)
        elif error is None and item.pair is not None and item.state is not State.ACCEPTED:
            error = "it is said to have landed, but was not sent"
        self._land(item, error, is_refused=message.is_refused)

    def _take(self, item: _Item, payload: memoryview) -> str | None:
        """A small read's bytes came with the answer."""
        if len(payload) != item.num_bytes:
            return "other bytes came than were asked for"
        with self.post_lock:
            if not item.post.is_over:
                self.shared.pool.scatter_bytes(payload, item.plan.local_offsets, item.plan.lengths)
        return None

    def moved(self, item: _Item, error: str | None) -> None:
        """A task has ended. The message ends when the peer has said so too."""
        item.is_busy = False
        if error is not None:
            self._land(item, error)
        else:
            self._settle(item)

    def _land(self, item: _Item, error: str | None, *, is_refused: bool = False) -> None:
        item.is_landed = True
        if item.error is None and error is not None:
            item.error, item.is_refused = error, is_refused
        self._settle(item)

    def _settle(self, item: _Item) -> None:
        """The message has ended once the peer has said so and nothing of ours touches its bytes."""
        if not item.is_landed or item.is_busy or self._items.pop(item.number, None) is None:
            return
        shared, post, peer = self.shared, item.post, item.peer
        if item.state is not State.WAITING:
            peer.num_offered -= 1
        elif item in peer.waiting:
            peer.waiting.remove(item)
        if item.pair is not None:
            item.pair.num_open -= 1
            item.pair.used_s = shared.clock()
        shared.rooms.cancel(item)
        if item.reservation is not None:
            shared.rooms.release(item.reservation)
        post.num_left -= 1
        post.error = post.error or item.error
        post.is_refused = post.is_refused and (item.error is None or item.is_refused)
        if post.num_left == 0:
            if post.error is None and _rides(post) is None and post.notify is not None:
                self._tell(post)
            else:
                self._complete(post, post.error)
        self._pump(post.worker_id, peer)

    def _complete(self, post: Post, error: str | None) -> None:
        if error is not None and post.error is None:
            post.error, post.is_refused = error, False
        post.ended.set()
        self._on_ended(post)

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Ask again for communicators that were refused."""
        now_s = self.shared.clock()
        for worker_id, peer in list(self._peers.items()):
            if peer.retry_s is not None and peer.retry_s <= now_s:
                peer.retry_s = None
                self._pump(worker_id, peer)

    @property
    def next_s(self) -> float | None:
        return min((peer.retry_s for peer in self._peers.values() if peer.retry_s is not None), default=None)


def _rides(post: Post) -> bytes | None:
    """The notification, if the post's only message carries it."""
    return post.notify if post.num_parts == 1 and post.op is TransferOp.WRITE else None
