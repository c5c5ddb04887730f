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
from array import array
from collections.abc import Callable
from typing import NamedTuple

from kvrelay.marks.phases import Phase

CAPACITY = 1 << 15
NONE = -1
_RECORD = struct.Struct("<Bqd")
RECORD_BYTES = _RECORD.size


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
        self._phases = array("B", bytes(capacity))
        self._times = array("q", bytes(8 * capacity))
        self._values = array("d", bytes(8 * capacity))
        self._before = array("q", bytes(8 * capacity))
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
        t_ns = self._now_ns()
        with self._lock:
            number = self._count
            self._count = number + 1
            slot = number % self.capacity
            newest, keys = self._newest, self._keys
            oldest = keys[slot]
            if newest.get(oldest) == number - self.capacity:
                del newest[oldest]
            keys[slot] = key
            self._phases[slot] = phase
            self._times[slot] = t_ns
            self._values[slot] = value
            self._before[slot] = newest.get(key, NONE)
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
        found: list[bytes] = []
        while number > NONE and number >= self._count - self.capacity:
            slot = number % self.capacity
            found.append(_RECORD.pack(self._phases[slot], self._times[slot], self._values[slot]))
            number = self._before[slot]
        return b"".join(reversed(found))


def unpack(packed: bytes) -> list[Mark]:
    """The marks in order of time. What another version has made is left out."""
    whole = len(packed) // RECORD_BYTES * RECORD_BYTES
    known = (mark for mark in _RECORD.iter_unpack(packed[:whole]) if mark[0] in _PHASES)
    return sorted((Mark(_PHASES[phase], t_ns, value) for phase, t_ns, value in known), key=lambda mark: mark.t_ns)


_PHASES = {int(phase): phase for phase in Phase}
