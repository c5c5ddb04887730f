"""Who is next of those that wait: the shortest, and every fourth time the oldest.

A burst of long prompts reaches a frontend or an engine faster than it can be taken in. In order of arrival, a chat
would wait for all of them. So a callback that takes something in does not name its item: it takes the next one from
here. However many short items come, an item with n older ones is taken within OLDEST_EVERY * (n + 1) turns.
"""

from __future__ import annotations

import heapq
import threading
from typing import Generic, TypeVar

T = TypeVar("T")

OLDEST_EVERY = 4
_MAX_STALE = 64


class ShortestFirst(Generic[T]):
    """Items that wait. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: dict[int, T] = {}
        """By number, in order of arrival."""
        self._by_size: list[tuple[int, int]] = []
        """A heap. Items that were taken by age or removed are still in it."""
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, number: int, size: int, item: T) -> None:
        """Item ``number``, of ``size``, has arrived. Numbers increase."""
        with self._lock:
            self._items[number] = item
            if len(self._by_size) > 2 * len(self._items) + _MAX_STALE:
                self._by_size = [entry for entry in self._by_size if entry[1] in self._items]
                heapq.heapify(self._by_size)
            heapq.heappush(self._by_size, (size, number))

    def take(self) -> T | None:
        """The next item; None if all have been taken or removed."""
        with self._lock:
            if not self._items:
                self._by_size.clear()
                return None
            self._num_taken += 1
            number = next(iter(self._items)) if self._num_taken % OLDEST_EVERY == 0 else self._shortest()
            return self._items.pop(number)

    def remove(self, number: int) -> T | None:
        """Remove this item; None if it is not here."""
        with self._lock:
            return self._items.pop(number, None)

    def clear(self) -> list[T]:
        """Remove all items, and return them in order of arrival."""
        with self._lock:
            items, self._items = list(self._items.values()), {}
            self._by_size.clear()
            return items

    def _shortest(self) -> int:
        while True:
            _, number = heapq.heappop(self._by_size)
            if number in self._items:
                return number
