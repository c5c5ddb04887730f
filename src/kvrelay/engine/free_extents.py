"""Free block ids as extents of adjacent ids, so that a request's blocks are adjacent and a transfer has few pieces.

It owns only the extents: the free ids, merged with their neighbours. It does not know requests, hashes or reference
counts. Every operation is O(1) in the number of free blocks (a request costs one step per extent that it gets).

    ids     0 1 2 3 4 5 6 7 8 9         extents by length class (floor(log2 length)):
    free    . x x . . x x x x x         class 1: {1: 2}     class 2: {5: 5}
"""

from __future__ import annotations

from collections.abc import Iterable


class FreeExtents:
    """A set of free block ids, kept as maximal extents ``[start, start + length)``."""

    def __init__(self) -> None:
        self._length: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        self._classes: list[dict[int, None]] = [{} for _ in range(64)]
        self._class_mask = 0
        self._num_free = 0

    def __len__(self) -> int:
        return self._num_free

    def add(self, start: int, length: int = 1) -> None:
        """Free ``length`` adjacent ids from ``start``, and merge them with free neighbours."""
        self._num_free += length
        before = self._start_of_end.get(start)
        if before is not None:
            length += self._remove(before)
            start = before
        if start + length in self._length:
            length += self._remove(start + length)
        self._insert(start, length)

    def add_all(self, ids: Iterable[int]) -> None:
        """Free these ids, adjacent ones together."""
        ordered, start = sorted(ids), 0
        for end, number in enumerate(ordered, 1):
            if end == len(ordered) or ordered[end] != number + 1:
                self.add(ordered[start], end - start)
                start = end

    def take(self, count: int, after: int | None = None) -> list[int]:
        """``count`` free ids, in few extents, preferably directly after block ``after``.

        The caller has checked that this many are free.
        """
        assert count <= self._num_free, "more blocks than are free"
        taken: list[int] = []
        if after is not None and count and after + 1 in self._length:
            self._take_from(after + 1, count, taken)
        while len(taken) < count:
            missing = count - len(taken)
            self._take_from(self._choose(missing), missing, taken)
        return taken

    def extents(self) -> dict[int, int]:
        """Start and length of every extent; for checks."""
        return dict(self._length)

    def _choose(self, count: int) -> int:
        """The start of an extent of the smallest class in which every extent has ``count`` ids, or else of a longest
        extent."""
        level = (count - 1).bit_length()
        fitting = self._class_mask >> level
        if fitting:
            level += (fitting & -fitting).bit_length() - 1
        else:
            level = self._class_mask.bit_length() - 1
        start, _ = self._classes[level].popitem()
        self._classes[level][start] = None
        return start

    def _take_from(self, start: int, count: int, taken: list[int]) -> None:
        length = self._remove(start)
        used = min(length, count)
        taken.extend(range(start, start + used))
        self._num_free -= used
        if used < length:
            self._insert(start + used, length - used)

    def _insert(self, start: int, length: int) -> None:
        level = length.bit_length() - 1
        self._length[start] = length
        self._start_of_end[start + length] = start
        self._classes[level][start] = None
        self._class_mask |= 1 << level

    def _remove(self, start: int) -> int:
        length = self._length.pop(start)
        del self._start_of_end[start + length]
        level = length.bit_length() - 1
        members = self._classes[level]
        del members[start]
        if not members:
            self._class_mask &= ~(1 << level)
        return length
