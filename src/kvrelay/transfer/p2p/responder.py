"""The end whose pool is touched: offers get room, data lands in it and then goes into blocks; wanted bytes are sent.

    Put ──checked, window?───> room, or wait for room ──Accept──> [receive] ──still open?─────> scatter ──> Landed
    Get ──checked, window?───> Sending ──still open?─────> gather ──> [send] ──> Landed

Handlers run on the control thread. Tasks run on a lane's thread (``communicators``); they copy under the
window table's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import msgspec

from kvrelay.core.window import RemoteKey
from kvrelay.errors import ProtocolError
from kvrelay.transfer.p2p.communicators import Communicator, Task
from kvrelay.transfer.p2p.messages import (
    MAX_REASON,
    Accept,
    Close,
    CommunicatorMade,
    CommunicatorRefused,
    Connect,
    Get,
    Landed,
    Message,
    Put,
    Rendezvous,
    Sending,
    Tell,
    pieces_of,
)
from kvrelay.transfer.p2p.process_group import PairGroup
from kvrelay.transfer.p2p.room import Reservation
from kvrelay.transfer.p2p.shared import CHUNK_BYTES, Shared
from kvrelay.transfer.values import Int64Array, TransferOp

MAX_OFFERS = 256
"""Messages of one peer that may be open at once; an honest one has a handful."""

_log = logging.getLogger(__name__)


class _Open(msgspec.Struct, eq=False):
    """A message that is under way."""

    op: TransferOp
    worker_id: str
    number: int
    pair: Communicator
    offsets: Int64Array
    lengths: Int64Array
    num_bytes: int
    key: RemoteKey | None
    notify: bytes | None
    reservation: Reservation | None = None
    refusal: str | None = None


class Responder:
    """``on_notified(payload)`` runs on the control thread."""

    def __init__(self, shared: Shared, on_notified: Callable[[bytes], None]) -> None:
        self.shared = shared
        self._on_notified = on_notified
        self._open: dict[tuple[str, int], _Open] = {}

    def __repr__(self) -> str:
        return f"Responder({len(self._open)} open)"

    @property
    def num_open(self) -> int:
        return len(self._open)

    # -- what peers ask -----------------------------------------------------------------------------------------------

    def handle(self, worker_id: str, message: Message, payload: memoryview) -> None:
        """A request of a peer. Raises ProtocolError for what no peer may say."""
        match message:
            case Connect():
                self._connect(worker_id, message.pair)
            case Rendezvous():
                pair = self._pair(worker_id, message.pair)
                if pair is not None:
                    pair.store.receive(message.key, message.value)
            case Put() | Get():
                self._checked(worker_id, message, payload)
            case Tell():
                self._on_notified(message.notify)
                self._answer(worker_id, message.message, None)
            case Close():
                pair = self._pair(worker_id, message.pair)
                if pair is not None:
                    self.close(pair)
            case _:
                raise ProtocolError(f"{worker_id} sent an unexpected {type(message).__name__}")

    def _connect(self, worker_id: str, name: str) -> None:
        shared = self.shared
        if name in shared.table.pairs:
            raise ProtocolError(f"{worker_id} names a communicator that exists")
        if not shared.make_room():
            shared.control.answer(worker_id, CommunicatorRefused(name, "all communicators are in use"))
            return
        shared.open_pair(name, worker_id, 1, shared.control.answer, self._failed)
        shared.control.answer(worker_id, CommunicatorMade(name))

    def _checked(self, worker_id: str, message: Put | Get, payload: memoryview) -> None:
        """Refuse what is malformed, too much, or outside every window, before anything is reserved for it."""
        shared, number = self.shared, message.message
        op = TransferOp.WRITE if isinstance(message, Put) else TransferOp.READ
        try:
            offsets, lengths = pieces_of(message, shared.pool.num_bytes)
        except ProtocolError as exc:
            self._answer(worker_id, number, exc.message)
            raise
        is_known = (worker_id, number) in self._open
        if is_known or sum(key[0] == worker_id for key in self._open) >= MAX_OFFERS:
            self._answer(worker_id, number, "it is open already" if is_known else "too many messages are open")
            return
        if not message.pair:
            self._at_once(worker_id, message, payload, op, offsets, lengths)
            return
        refusal = shared.windows.refusal(op, worker_id, message.key, offsets, lengths)
        if refusal is not None:
            shared.windows.num_refused += 1
            self._answer(worker_id, number, refusal, is_refused=True)
            return
        pair = self._pair(worker_id, message.pair)
        if pair is None:
            # Closed by us before its message arrived: it will be offered again on another one.
            shared.control.answer(worker_id, Close(message.pair))
            return
        notify = message.notify if isinstance(message, Put) else None
        item = _Open(op, worker_id, number, pair, offsets, lengths, message.num_bytes, message.key, notify)
        self._open[worker_id, number] = item
        pair.num_open += 1
        if isinstance(message, Put):
            deadline_s = None if message.waits else shared.clock() + shared.room_wait_s
            shared.rooms.ask(item, item.num_bytes, partial(self._accept, item), deadline_s)
        elif item.num_bytes > CHUNK_BYTES:
            self._end(item, f"{item.num_bytes} bytes are too many for one message")
        else:
            shared.control.answer(worker_id, Sending(number))
            pair.run("send", Task(partial(self._send, item), partial(shared.control.call, self._moved, item)))

    def _at_once(
        self,
        worker_id: str,
        message: Put | Get,
        payload: memoryview,
        op: TransferOp,
        offsets: Int64Array,
        lengths: Int64Array,
    ) -> None:
        """A small message brings, or takes, its bytes itself."""
        shared, data = self.shared, b""
        if not shared.is_eager(message.num_bytes) or (op is TransferOp.WRITE and len(payload) != message.num_bytes):
            self._answer(worker_id, message.message, "its bytes are not those that it names")
            return
        with shared.windows.touching(op, worker_id, message.key, offsets, lengths) as refusal:
            if refusal is None and op is TransferOp.WRITE:
                shared.pool.scatter_bytes(payload, offsets, lengths)
            elif refusal is None:
                data = shared.pool.gather_bytes(offsets, lengths)
        if refusal is None and isinstance(message, Put) and message.notify is not None:
            self._on_notified(message.notify)
        landed = Landed(message.message, refusal, is_refused=refusal is not None)
        shared.control.answer(worker_id, landed, data or None)

    def _accept(self, item: _Open, reservation: Reservation | None) -> None:
        if reservation is None:
            error = f"{item.num_bytes} bytes fit neither into its buffer nor into its memory pool"
            self._end(item, error, is_refused=True)
            return
        item.reservation = reservation
        self.shared.control.answer(item.worker_id, Accept(item.number))
        scatter, moved = partial(self._scatter, item), partial(self._moved, item)
        self.shared.receive(item.pair, item.number, reservation, scatter, moved)

    # -- on a lane's thread -------------------------------------------------------------------------------------------

    def _scatter(self, item: _Open, tensor: Any) -> None:
        """Data of a Put: from the room into the blocks, if the window is still open."""
        with self._touching(item) as item.refusal:
            if item.refusal is None:
                self.shared.pool.scatter(tensor, item.offsets, item.lengths)

    def _send(self, item: _Open, group: Callable[[], PairGroup], slot: int) -> Any:
        """Data of a Get: gathered while the window is open, then sent. Without one zeros are sent, and an error."""
        tensor = self.shared.staging(item.pair, "send", slot, item.num_bytes)
        with self._touching(item) as item.refusal:
            if item.refusal is None:
                self.shared.pool.gather(item.offsets, item.lengths, tensor)
            else:
                tensor.zero_()
        return group().send(tensor, item.number)

    def _touching(self, item: _Open) -> AbstractContextManager[str | None]:
        return self.shared.windows.touching(item.op, item.worker_id, item.key, item.offsets, item.lengths)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _moved(self, item: _Open, error: str | None) -> None:
        """A task has ended; nothing of it touches memory any more."""
        if item.notify is not None and error is None and item.refusal is None:
            self._on_notified(item.notify)
        self._end(item, error or item.refusal, is_refused=error is None)

    def _end(self, item: _Open, error: str | None, *, is_refused: bool = False) -> None:
        if self._open.pop((item.worker_id, item.number), None) is None:
            return
        item.pair.num_open -= 1
        item.pair.used_s = self.shared.clock()
        self._answer(item.worker_id, item.number, error, is_refused=is_refused)
        reservation, item.reservation = item.reservation, None
        if reservation is not None:
            self.shared.rooms.release(reservation)

    def _failed(self, pair: Communicator, error: str) -> None:
        self.shared.num_failed += 1
        _log.warning("the communicator with %s has failed: %s", pair.peer_id, error)
        self.close(pair)
        self.shared.control.answer(pair.peer_id, Close(pair.name))

    def close(self, pair: Communicator) -> None:
        """End a communicator that a peer has made. What is being received ends by itself; what waits for room goes."""
        self.shared.table.remove(pair)
        pair.close()
        for item in [each for each in self._open.values() if each.pair is pair and each.reservation is None]:
            if item.op is TransferOp.WRITE:
                self.shared.rooms.cancel(item)
                self._end(item, "the communicator is closed")

    def end_idle(self, pair: Communicator) -> None:
        """Close a communicator that a peer has made, and tell it."""
        self.close(pair)
        self.shared.control.answer(pair.peer_id, Close(pair.name))

    def drop(self, worker_id: str) -> None:
        """End what a worker whose lease has ended has begun. From now on the window table refuses what it asks."""
        for pair in self.shared.table.of_peer(worker_id):
            if pair.rank:
                self.end_idle(pair)

    def _pair(self, worker_id: str, name: str) -> Communicator | None:
        pair = self.shared.table.find(name, worker_id)
        return pair if pair is not None and pair.rank else None

    def _answer(self, worker_id: str, number: int, error: str | None, *, is_refused: bool = False) -> None:
        message = Landed(number, error if error is None else error[:MAX_REASON], error is not None and is_refused)
        self.shared.control.answer(worker_id, message)
