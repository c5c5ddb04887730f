"""Room for messages on their way to their blocks: a buffer bounded by kv_buffer_size, and behind it a memory pool.

    reserve(n) ──> buffer: memory of the device, used first
               └─> pool:   host memory, pinned beside a GPU; a flood basin for bursts (a spill)
               └─> None:   both are full; the caller waits, and gives up in the end

Both are buddy allocators (``buddy``) over memory that is allocated at the first use and touched as it is needed. It
does not know messages. Only the control thread calls it.

``RoomQueue`` decides back-pressure and loss: first come, first served. A message that can never fit is lost at once.
One that may wait only until a deadline is lost when that has passed. The others wait until those before them have been
served.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import msgspec

from kvrelay.errors import IntegrityError
from kvrelay.transfer.p2p.buddy import BuddyAllocator
from kvrelay.transfer.p2p.pool_view import empty_bytes

MIN_BLOCK_BYTES = 4096

_log = logging.getLogger(__name__)


class Reservation(msgspec.Struct, eq=False):
    """``tensor``: ``num_bytes`` of uint8, on the device or, if ``is_spilled``, in host memory."""

    tensor: Any
    num_bytes: int
    offset: int
    is_spilled: bool


class _Memory:
    """A buddy allocator and its bytes."""

    def __init__(self, num_bytes: int, device: str, is_spilled: bool) -> None:
        self.buddy = BuddyAllocator(num_bytes, MIN_BLOCK_BYTES)
        self._device = device
        self._is_spilled = is_spilled
        self._tensor: Any = None
        self._is_missing = False

    def reserve(self, num_bytes: int) -> Reservation | None:
        if self._tensor is None and num_bytes <= self.buddy.largest_block_bytes:
            try:
                self._tensor = empty_bytes(self.buddy.capacity_bytes, self._device, is_host=self._is_spilled)
            except RuntimeError as exc:  # torch's, of a device that is out of memory
                self._log_once(exc)
                return None
        offset = self.buddy.allocate(num_bytes)
        if offset is None:
            return None
        return Reservation(self._tensor[offset : offset + num_bytes], num_bytes, offset, self._is_spilled)

    def _log_once(self, exc: RuntimeError) -> None:
        if not self._is_missing:
            _log.warning("no memory for messages on %s, trying again with each: %s", self._device, exc)
        self._is_missing = True


class Room:
    """``device``: of the KV pool, e.g. "cpu" or "cuda:0"."""

    def __init__(self, buffer_bytes: int, pool_bytes: int, device: str = "cpu") -> None:
        self.buffer = _Memory(buffer_bytes, device, False)
        self.pool = _Memory(pool_bytes, device, True)
        self._out: set[Reservation] = set()
        self.num_spilled = 0
        self.num_spilled_bytes = 0

    def __repr__(self) -> str:
        return f"Room(buffer {self.buffer.buddy!r}, pool {self.pool.buddy!r})"

    @property
    def largest_bytes(self) -> int:
        """The largest message that can ever fit."""
        return max(self.buffer.buddy.largest_block_bytes, self.pool.buddy.largest_block_bytes)

    @property
    def num_reserved(self) -> int:
        return len(self._out)

    def reserve(self, num_bytes: int) -> Reservation | None:
        """In the buffer if it fits, else in the pool; None if neither has room now."""
        reservation = self.buffer.reserve(num_bytes)
        if reservation is None:
            reservation = self.pool.reserve(num_bytes)
            if reservation is not None:
                self.num_spilled += 1
                self.num_spilled_bytes += num_bytes
        if reservation is not None:
            self._out.add(reservation)
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Nothing touches its bytes any more."""
        self._out.remove(reservation)
        (self.pool if reservation.is_spilled else self.buffer).buddy.free(reservation.offset)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every byte is free or reserved, none twice."""
        for memory in (self.buffer, self.pool):
            memory.buddy.check_integrity()
        num_taken = self.buffer.buddy.num_taken + self.pool.buddy.num_taken
        if num_taken != len(self._out):
            raise IntegrityError(f"{num_taken} blocks of buffer and pool are taken by {len(self._out)} messages")


class _Waiter(msgspec.Struct, frozen=True):
    key: Hashable
    num_bytes: int
    on_room: Callable[[Reservation | None], None]
    deadline_s: float | None


class RoomQueue:
    """``ask`` leads to exactly one ``on_room`` call, with a reservation or with None (lost), unless it is cancelled."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self._waiters: deque[_Waiter] = deque()
        self.num_waited = 0
        """Messages that did not get room at once."""
        self.num_lost = 0
        """Messages that never got it."""

    def __repr__(self) -> str:
        return f"RoomQueue({len(self._waiters)} wait, {self.num_lost} lost, {self.room!r})"

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    @property
    def next_deadline_s(self) -> float | None:
        return min((each.deadline_s for each in self._waiters if each.deadline_s is not None), default=None)

    def ask(
        self,
        key: Hashable,
        num_bytes: int,
        on_room: Callable[[Reservation | None], None],
        deadline_s: float | None = None,
    ) -> None:
        """``deadline_s``: until when it may wait; None: without end. ``key`` is for ``cancel``."""
        if num_bytes > self.room.largest_bytes:
            self.num_lost += 1
            on_room(None)
            return
        reservation = None if self._waiters else self.room.reserve(num_bytes)
        if reservation is None:
            self.num_waited += 1
            self._waiters.append(_Waiter(key, num_bytes, on_room, deadline_s))
        else:
            on_room(reservation)

    def release(self, reservation: Reservation) -> None:
        """Give room back and serve those that wait, in order."""
        self.room.release(reservation)
        self._serve()

    def cancel(self, key: Hashable) -> None:
        """Nobody waits under this key any more."""
        self._waiters = deque(each for each in self._waiters if each.key != key)
        self._serve()

    def expire(self, now_s: float) -> None:
        """Those whose deadline has passed are lost."""
        late = [each for each in self._waiters if each.deadline_s is not None and each.deadline_s <= now_s]
        if not late:
            return
        self._waiters = deque(each for each in self._waiters if each not in late)
        for each in late:
            self.num_lost += 1
            each.on_room(None)
        self._serve()

    def _serve(self) -> None:
        while self._waiters:
            reservation = self.room.reserve(self._waiters[0].num_bytes)
            if reservation is None:
                return
            self._waiters.popleft().on_room(reservation)
