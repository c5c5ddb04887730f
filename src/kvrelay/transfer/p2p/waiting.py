"""Who waits for room, first come first served, and for how long. Back-pressure and loss are decided here.

A message that can never fit is lost at once. One that may wait only until a deadline is lost when that has passed. The
others wait until the messages before them have been served. Only the control thread calls this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kvrelay.transfer.p2p.room import Reservation, Room


@dataclass(frozen=True, slots=True)
class _Waiter:
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
