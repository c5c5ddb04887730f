"""One process's latest marks: a ring of fixed size, with the marks of each request linked backwards.

    number      7        8        9       10          newest of a: 9, of b: 10
    key         a        b        a        b
    before      -        -        7        8

Everything is allocated at the start; a mark overwrites the oldest one. So an unread request costs nothing but its place
in the ring. Methods may be called from any thread.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from kvrelay.marks.phases import Phase

CAPACITY = 1 << 15
NONE = -1
_RECORD = struct.Struct("<Bqd")
_SLOT = struct.Struct("<Bqdq")
"""A record, and the number of the request's mark before it."""
_NUMBER = struct.Struct("<q")
RECORD_BYTES, SLOT_BYTES = _RECORD.size, _SLOT.size


_pack_slot = _SLOT.pack_into


class Mark(NamedTuple):
    """``t_ns`` is by the monotonic clock of the process that made it."""

    phase: Phase
    t_ns: int
    value: float


class Ring:
    """Marks by key, which names a request."""

    def __init__(self, capacity: int = CAPACITY, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.capacity = capacity
        self._now_ns = now_ns
        self._slots = bytearray(SLOT_BYTES * capacity)
        self._keys = [""] * capacity
        self._newest: dict[str, int] = {}
        self._count = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Ring({self._count} marks in {self.capacity}, {len(self._newest)} requests)"

    def __len__(self) -> int:
        """The number of requests that have marks."""
        return len(self._newest)

    def add(self, key: str, phase: int, value: float = 0.0) -> None:
        """The request has reached ``phase`` now."""
        with self._lock:
            number, capacity, newest, keys = self._count, self.capacity, self._newest, self._keys
            self._count = number + 1
            slot = number % capacity
            oldest = keys[slot]
            if newest.get(oldest) == number - capacity:
                del newest[oldest]
            keys[slot] = key
            _pack_slot(self._slots, slot * SLOT_BYTES, phase, self._now_ns(), value, newest.get(key, NONE))
            newest[key] = number

    def read(self, key: str) -> bytes:
        """The request's marks, packed, the oldest first. They stay."""
        with self._lock:
            return self._walk(self._newest.get(key, NONE))

    def take(self, key: str) -> bytes:
        """The same; the request has none from then on."""
        with self._lock:
            return self._walk(self._newest.pop(key, NONE))

    def _walk(self, number: int) -> bytes:
        found: list[bytearray] = []
        while number > NONE and number >= self._count - self.capacity:
            at = number % self.capacity * SLOT_BYTES
            found.append(self._slots[at : at + RECORD_BYTES])
            (number,) = _NUMBER.unpack_from(self._slots, at + RECORD_BYTES)
        return b"".join(reversed(found))


def unpack(packed: bytes) -> list[Mark]:
    """The marks in order of time. What another version has made is left out."""
    whole = len(packed) // RECORD_BYTES * RECORD_BYTES
    known = (mark for mark in _RECORD.iter_unpack(packed[:whole]) if mark[0] in _PHASES)
    return sorted((Mark(_PHASES[phase], t_ns, value) for phase, t_ns, value in known), key=lambda mark: mark.t_ns)


_PHASES = {int(phase): phase for phase in Phase}
