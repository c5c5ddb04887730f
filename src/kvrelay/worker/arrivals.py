"""Requests between the event loop and the engine: a short one does not wait while the engine adds long ones.

Adding a long prompt costs the engine's thread milliseconds (hashes, checks). So a callback on the engine does not name
its request: it takes the shortest one that has arrived, and every fourth callback the oldest. This module does not know
the engine.
"""

from __future__ import annotations

import heapq
import threading
from typing import Generic, TypeVar

T = TypeVar("T")

OLDEST_EVERY = 4


class Arrivals(Generic[T]):
    """Each ``add`` is followed by one ``take``. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: dict[int, T] = {}
        """By number, in order of arrival."""
        self._by_size: list[tuple[int, int]] = []
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, number: int, num_tokens: int, item: T) -> None:
        """Request ``number``, of ``num_tokens``, has arrived. Numbers increase."""
        with self._lock:
            self._items[number] = item
            heapq.heappush(self._by_size, (num_tokens, number))

    def take(self) -> T | None:
        """The next request; None if all have been taken or removed."""
        with self._lock:
            if not self._items:
                self._by_size.clear()
                return None
            self._num_taken += 1
            number = next(iter(self._items)) if self._num_taken % OLDEST_EVERY == 0 else self._shortest()
            return self._items.pop(number)

    def remove(self, number: int) -> T | None:
        """Remove this request; None if it is not here."""
        with self._lock:
            return self._items.pop(number, None)

    def _shortest(self) -> int:
        while True:
            # Requests that were taken by age or removed are still in the heap.
            _, number = heapq.heappop(self._by_size)
            if number in self._items:
                return number
