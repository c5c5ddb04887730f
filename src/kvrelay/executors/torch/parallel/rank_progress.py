"""The progress of each rank, in memory that all ranks and the driver share.

    [num_ranks, 2] int64:   number of moves     1 while it waits for other ranks, else 0

A rank writes only its own row; a move costs one store. The driver reads the table only while an answer is overdue, to
distinguish a hang from a long step: a computing rank moves with every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def progress_table(memory: memoryview, num_ranks: int) -> Int64Array:
    """The table at the beginning of ``memory``. Raises ValueError if it does not fit."""
    return np.frombuffer(memory, dtype=np.int64, count=num_ranks * 2).reshape(num_ranks, 2)


class RankProgress:
    """One rank's row. Used by the rank's main thread."""

    def __init__(self, row: Int64Array) -> None:
        self._row = row

    def move(self) -> None:
        self._row[0] += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        row = self._row
        row[0] += 1
        row[1] = 1
        try:
            yield
        finally:
            row[1] = 0
            row[0] += 1


class RankHangDetector:
    """Detects that no rank moves any more. ``check`` is called at equal intervals while an answer is awaited. It counts
    calls, not seconds: a driver that was stopped itself has not waited."""

    def __init__(self, table: Int64Array, max_checks: int) -> None:
        self._table = table
        self._max_checks = max_checks
        self.begin()

    def begin(self) -> None:
        self._last = self._table.copy()
        self._num_checks = 0

    def check(self) -> bool:
        """True if no rank has moved for ``max_checks`` calls in a row."""
        if np.array_equal(self._last, self._table):
            self._num_checks += 1
        else:
            self.begin()
        return self._num_checks >= self._max_checks

    def is_waiting(self, rank: int) -> bool:
        """Whether this rank waits for others in a collective."""
        return bool(self._table[rank, 1])

    def culprits(self) -> list[int]:
        """The ranks that do not wait for others; if all wait, the ranks with the least progress."""
        computing = np.flatnonzero(self._table[:, 1] == 0)
        if len(computing):
            return [int(rank) for rank in computing]
        return [int(rank) for rank in np.flatnonzero(self._table[:, 0] == self._table[:, 0].min())]
