"""The end that posts: cuts transfers into messages, offers, sends or receives, and completes.

    write ──> messages of CHUNK_BYTES ──> [GET: keep a copy] ──> offer ──> Accept ──> [gather, send] ──> Landed
    read  ──> messages of CHUNK_BYTES ──> reserve room ──> offer ──> Sending ──> [receive, scatter] ──> Landed

At most WINDOW messages per peer are offered at once, so that room and staging stay small. A message that was offered on
a communicator which the peer has closed before accepting it is offered again on a new one.

Handlers run on the control thread. Tasks run on a lane's thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kvrelay.transfer.p2p.communicators import Task
from kvrelay.transfer.p2p.contacts import Contacts
from kvrelay.transfer.p2p.messages import (
    MAX_PIECES,
    Accept,
    Close,
    CommunicatorMade,
    CommunicatorRefused,
    Get,
    Landed,
    Message,
    Put,
    Rendezvous,
    Sending,
    Tell,
    pack,
)
from kvrelay.transfer.p2p.posts import Part, PostPeer, SentPost, State, rides
from kvrelay.transfer.p2p.process_group import PairGroup
from kvrelay.transfer.p2p.room import Reservation
from kvrelay.transfer.p2p.shared import CHUNK_BYTES, Shared
from kvrelay.transfer.pieces import split_pieces
from kvrelay.transfer.values import Pieces, TransferOp

WINDOW = 4

_log = logging.getLogger(__name__)


class Initiator:
    """``keeps``: GET. ``on_ended(post)`` runs on the control thread, once for each post that was not given up.

    ``post_lock`` excludes what a lane copies into our pool from the moment at which a post is given up.
    """

    def __init__(self, shared: Shared, *, keeps: bool, on_ended: Callable[[SentPost], None]) -> None:
        self.shared = shared
        self.post_lock = threading.Lock()
        self._keeps = keeps
        self._on_ended = on_ended
        self._peers: dict[str, PostPeer] = {}
        self._items: dict[int, Part] = {}
        self._tells: dict[int, SentPost] = {}
        self._next_number = 1
        self.contacts = Contacts(shared, self._peers, self._items, self._pump, self._land)

    def __repr__(self) -> str:
        return f"Initiator({len(self._peers)} peers, {len(self._items)} messages open)"

    @property
    def num_open(self) -> int:
        return len(self._items) + len(self._tells)

    # -- peers and posts ----------------------------------------------------------------------------------------------

    def add_peer(self, worker_id: str, address: str, public_key: str, max_message_bytes: int) -> None:
        """Raises TransferError."""
        self.shared.control.dial(worker_id, address, public_key)
        self._peers[worker_id] = PostPeer(max_message_bytes)

    def drop_peer(self, worker_id: str, error: str) -> None:
        """End everything with it. Tasks that are under way end by themselves."""
        peer = self._peers.pop(worker_id, None)
        if peer is not None and peer.pair is not None:
            self.contacts.end_idle(peer.pair)
        self.shared.control.hang_up(worker_id)
        for number in [number for number, post in self._tells.items() if post.worker_id == worker_id]:
            self._complete(self._tells.pop(number), error)
        for item in [item for item in self._items.values() if item.post.worker_id == worker_id]:
            self._land(item, error)

    def begin(self, post: SentPost) -> None:
        """Offer everything, as fast as the window allows."""
        peer = self._peers.get(post.worker_id)
        if peer is None:
            self._complete(post, f"worker {post.worker_id} is not connected")
            return
        if post.pieces.num_pieces == 0:
            self._tell(post)
            return
        for part in self._parts(post.pieces, peer, post.op):
            post.num_left += 1
            item = Part(self._number(), post, peer, part, part.num_bytes)
            self._items[item.number] = item
            peer.waiting.append(item)
        post.num_parts = post.num_left
        self._pump(post.worker_id, peer)

    def _parts(self, pieces: Pieces, peer: PostPeer, op: TransferOp) -> Iterator[Pieces]:
        """Messages that can fit: into the peer's room, and into ours where we need some."""
        limits = [CHUNK_BYTES, peer.max_message_bytes]
        if self._keeps or op is TransferOp.READ:
            limits.append(self.shared.rooms.room.largest_bytes)
        # Below that size messages need no room. Larger ones will be lost, and counted.
        largest = CHUNK_BYTES if self.shared.is_eager(min(limits)) else min(limits)
        for part in split_pieces(pieces, largest):
            for first in range(0, part.num_pieces, MAX_PIECES):
                cut = slice(first, first + MAX_PIECES)
                yield Pieces(part.local_offsets[cut], part.remote_offsets[cut], part.lengths[cut])

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number

    # -- offers -------------------------------------------------------------------------------------------------------

    def _pump(self, worker_id: str, peer: PostPeer) -> None:
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

    def _offer_first(self, worker_id: str, peer: PostPeer) -> bool:
        """False: it waits for a communicator."""
        item = peer.waiting[0]
        is_useless = item.post.is_over or item.post.error is not None
        is_eager = self.shared.is_eager(item.num_bytes)
        if not is_useless and not is_eager and peer.pair is None:
            self.contacts.connect(worker_id, peer)
            return False
        peer.waiting.popleft()
        peer.num_offered += 1
        item.state = State.OFFERED
        if is_useless:
            self._land(item, "another part of it has failed", is_refused=True)
        elif is_eager:
            self._offer(worker_id, item)
        else:
            self._begin(worker_id, peer, item)
        return True

    def _begin(self, worker_id: str, peer: PostPeer, item: Part) -> None:
        assert peer.pair is not None
        item.pair = peer.pair
        item.pair.num_open += 1
        needs_room = item.post.op is TransferOp.READ or (self._keeps and not item.is_kept)
        if not needs_room or item.reservation is not None:
            self._offer(worker_id, item)
            return
        self.shared.rooms.ask(item, item.num_bytes, lambda room: self._has_room(worker_id, item, room))

    def _has_room(self, worker_id: str, item: Part, reservation: Reservation | None) -> None:
        if reservation is None:
            error = f"{item.num_bytes} bytes fit neither into our buffer nor into our memory pool"
            self._land(item, error, is_refused=True)
            return
        item.reservation = reservation
        if item.post.op is TransferOp.READ:
            self._offer(worker_id, item)
        elif item.pair is not None:
            item.is_busy = True
            item.pair.run("send", Task(partial(self._keep, item), partial(self.shared.control.call, self._kept, item)))

    def _kept(self, item: Part, error: str | None) -> None:
        """GET: the copy is made, or will not be."""
        item.is_busy = False
        item.is_kept = error is None
        if error is None and item.number in self._items and not item.is_landed:
            self._offer(item.post.worker_id, item)
        else:
            self._land(item, error)

    def _offer(self, worker_id: str, item: Part) -> None:
        """On its communicator; a small message has none, and brings its bytes."""
        pieces, post, data = item.pieces, item.post, None
        name = "" if item.pair is None else item.pair.name
        named = (item.num_bytes, pack(pieces.remote_offsets), pack(pieces.lengths), post.key)
        if post.op is TransferOp.READ:
            message: Message = Get(name, item.number, *named)
        else:
            message = Put(name, item.number, *named, waits=self._keeps and item.pair is not None, notify=rides(post))
            if item.pair is None:
                data = self.shared.pool.gather_bytes(pieces.local_offsets, pieces.lengths)
        if not self.shared.control.send(worker_id, message, data):
            self._land(item, f"worker {worker_id} does not read what we send")

    def _tell(self, post: SentPost) -> None:
        if post.notify is None:
            self._complete(post, None)
            return
        number = self._number()
        self._tells[number] = post
        if not self.shared.control.send(post.worker_id, Tell(number, post.notify)):
            self._complete(self._tells.pop(number), f"worker {post.worker_id} does not read what we send")

    # -- answers ------------------------------------------------------------------------------------------------------

    def handle(self, worker_id: str, message: Message, payload: memoryview) -> None:
        """An answer of a peer. One that makes no sense changes nothing."""
        peer = self._peers.get(worker_id)
        if peer is None:
            return
        match message:
            case CommunicatorMade() | CommunicatorRefused() | Rendezvous() | Close():
                self.contacts.handle(worker_id, peer, message)
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
        moved = partial(self._moved, item)
        if is_read:
            assert item.reservation is not None
            self.shared.receive(item.pair, item.number, item.reservation, partial(self._scatter, item), moved)
        else:
            item.pair.run("send", Task(partial(self._send, item), partial(self.shared.control.call, moved)))

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

    def _take(self, item: Part, payload: memoryview) -> str | None:
        """A small read's bytes came with the answer."""
        if len(payload) != item.num_bytes:
            return "other bytes came than were asked for"
        with self.post_lock:
            if not item.post.is_over:
                self.shared.pool.scatter_bytes(payload, item.pieces.local_offsets, item.pieces.lengths)
        return None

    def _moved(self, item: Part, error: str | None) -> None:
        """A task has ended. The message ends when the peer has said so too."""
        item.is_busy = False
        if error is not None:
            self._land(item, error)
        else:
            self._settle(item)

    def _land(self, item: Part, error: str | None, *, is_refused: bool = False) -> None:
        item.is_landed = True
        if item.error is None and error is not None:
            item.error, item.is_refused = error, is_refused
        self._settle(item)

    def _settle(self, item: Part) -> None:
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
            if post.error is None and rides(post) is None and post.notify is not None:
                self._tell(post)
            else:
                self._complete(post, post.error)
        self._pump(post.worker_id, peer)

    def _complete(self, post: SentPost, error: str | None) -> None:
        if error is not None and post.error is None:
            post.error, post.is_refused = error, False
        post.ended.set()
        self._on_ended(post)

    # -- on a lane's thread -------------------------------------------------------------------------------------------

    def _keep(self, item: Part, group: Callable[[], PairGroup], slot: int) -> None:
        """GET: copy the bytes out of the blocks."""
        assert item.reservation is not None
        self.shared.pool.gather(item.pieces.local_offsets, item.pieces.lengths, item.reservation.tensor)

    def _send(self, item: Part, group: Callable[[], PairGroup], slot: int) -> Any:
        """Data of a Put: from the copy, from the one run of bytes that it is, or gathered."""
        shared, offsets, lengths = self.shared, item.pieces.local_offsets, item.pieces.lengths
        assert item.pair is not None
        staging = partial(shared.staging, item.pair, "send", slot, item.num_bytes)
        if item.reservation is not None:
            tensor = item.reservation.tensor
            if item.reservation.is_spilled and not shared.pool.is_host:
                tensor = staging().copy_(tensor)
        else:
            tensor = shared.pool.run(offsets, lengths)
            if tensor is None:
                tensor = staging()
                shared.pool.gather(offsets, lengths, tensor)
        return group().send(tensor, item.number)

    def _scatter(self, item: Part, tensor: Any) -> None:
        """Data of a Get: into our blocks unless the post was given up."""
        with self.post_lock:
            if not item.post.is_over:
                self.shared.pool.scatter(tensor, item.pieces.local_offsets, item.pieces.lengths)
