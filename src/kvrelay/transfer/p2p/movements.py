"""Tasks that move bytes between blocks, room and a communicator, and tell their owner of the end.

The posting end copies out of blocks, sends, or receives the bytes of a read; ``responder`` has the tasks of the other
end. Tasks run on a lane's thread (``pairs``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from kvrelay.transfer.p2p.communicators import Communicator
from kvrelay.transfer.p2p.pool_view import empty_bytes
from kvrelay.transfer.p2p.posts import Part
from kvrelay.transfer.p2p.process_group import PairGroup
from kvrelay.transfer.p2p.room import Reservation
from kvrelay.transfer.p2p.shared import CHUNK_BYTES, Shared


class Moving(Protocol):
    """A message whose data moves."""

    @property
    def number(self) -> int: ...

    @property
    def pair(self) -> Communicator | None: ...

    @property
    def reservation(self) -> Reservation | None: ...


class Mover(Protocol):
    """Who has begun a task; ``moved`` runs on the control thread."""

    @property
    def shared(self) -> Shared: ...

    def moved(self, item: Any, error: str | None) -> None: ...


M = TypeVar("M", bound=Mover)
T = TypeVar("T", bound=Moving)


class MoveTask(Generic[M, T]):
    """A task that has nothing to do when its work is done, and tells its owner of its end."""

    def __init__(self, owner: M, item: T) -> None:
        self._owner, self._item = owner, item

    def finish(self) -> None:
        """Nothing is left to do."""

    def ended(self, error: str | None) -> None:
        self._owner.shared.control.call(self._owner.moved, self._item, error)


class ReceiveTask(MoveTask[M, T]):
    """Data arrives in the room that is reserved for it; then ``scatter`` puts it into blocks."""

    _landing: Any = None

    def begin(self, group: Callable[[], PairGroup], slot: int) -> Any:
        reservation, pair = self._item.reservation, self._item.pair
        assert reservation is not None
        assert pair is not None
        if reservation.is_spilled and not self._owner.shared.pool.is_host:
            # NCCL cannot reach that room.
            self._landing = staging(pair, "receive", slot, self._owner.shared)[: reservation.num_bytes]
        else:
            self._landing = reservation.tensor
        return group().receive(self._landing, self._item.number)

    def finish(self) -> None:
        reservation = self._item.reservation
        assert reservation is not None
        if self._landing is not reservation.tensor:
            reservation.tensor.copy_(self._landing)
        self.scatter(reservation.tensor)

    def scatter(self, tensor: Any) -> None:
        """Put the bytes into blocks, if they still may go there."""
        raise NotImplementedError


def staging(pair: Communicator, direction: str, slot: int, shared: Shared) -> Any:
    """Memory of a lane to gather into: made at first use, freed with the pair."""
    if (direction, slot) not in pair.staging:
        pair.staging[direction, slot] = empty_bytes(CHUNK_BYTES, shared.pool.device, is_host=False)
    return pair.staging[direction, slot]


class Poster(Mover, Protocol):
    """The initiator, as its tasks see it."""

    @property
    def post_lock(self) -> threading.Lock: ...

    def kept(self, item: Part, error: str | None) -> None: ...


class KeepTask(MoveTask[Poster, Part]):
    """GET: copy the bytes out of the blocks."""

    def begin(self, group: Callable[[], PairGroup], slot: int) -> None:
        item = self._item
        assert item.reservation is not None
        self._owner.shared.pool.gather(item.pieces.local_offsets, item.pieces.lengths, item.reservation.tensor)

    def ended(self, error: str | None) -> None:
        self._owner.shared.control.call(self._owner.kept, self._item, error)


class SendTask(MoveTask[Poster, Part]):
    """Data of a Put: from the copy, from the one run of bytes that it is, or gathered."""

    def begin(self, group: Callable[[], PairGroup], slot: int) -> Any:
        item, shared = self._item, self._owner.shared
        assert item.pair is not None
        offsets, lengths = item.pieces.local_offsets, item.pieces.lengths
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


class ReadTask(ReceiveTask[Poster, Part]):
    """Data of a Get: into room of ours, then into our blocks unless the post was given up."""

    def scatter(self, tensor: Any) -> None:
        item = self._item
        with self._owner.post_lock:
            if not item.post.is_over:
                self._owner.shared.pool.scatter(tensor, item.pieces.local_offsets, item.pieces.lengths)
