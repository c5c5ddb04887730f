"""The answer of a look-up in an index, its errors, and the count of recent uses in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from kvrelay.core.clock import Clock
from kvrelay.errors import KvrelayError, RetryElsewhereError


class OverlapScores(msgspec.Struct, frozen=True):
    """``scores``: per worker the number of leading blocks that it holds (workers with none are left out).

    ``frequencies``: for each matched block in turn, its uses within the expiration duration before this one; empty if
    uses are not counted.
    """

    scores: dict[str, int]
    frequencies: tuple[int, ...] = ()


class WorkerGroup:
    """Workers that hold the same blocks. An index returns the same object again if it can, and a group equals only
    itself, so a caller can cache derived values by group without hashing the names."""

    __slots__ = ("names",)

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __repr__(self) -> str:
        return f"WorkerGroup{self.names}"


class StoredChain(msgspec.Struct, frozen=True):
    """A part of an index's dump: consecutive blocks that a worker holds, below ``parent_hash`` (None: at the root).

    ``local_hashes`` are empty if the index does not keep them.
    """

    worker_id: str
    parent_hash: int | None
    block_hashes: tuple[int, ...]
    local_hashes: tuple[int, ...] = ()


class RecentUses:
    """Counts look-ups per block over a sliding window. Memory is proportional to the look-ups within the window."""

    def __init__(self, expiration_s: float, clock: Clock) -> None:
        self._expiration_s = expiration_s
        self._clock = clock
        self._uses: deque[tuple[float, tuple[int, ...]]] = deque()
        self._counts: dict[int, int] = {}

    def record(self, block_hashes: Sequence[int]) -> tuple[int, ...]:
        """Count one more use of each block; returns the counts before this use."""
        now = self._clock.now()
        self._expire(now - self._expiration_s)
        before = tuple(self._counts.get(block, 0) for block in block_hashes)
        for block, count in zip(block_hashes, before):
            self._counts[block] = count + 1
        if block_hashes:
            self._uses.append((now, tuple(block_hashes)))
        return before

    def _expire(self, oldest: float) -> None:
        while self._uses and self._uses[0][0] < oldest:
            for block in self._uses.popleft()[1]:
                self._counts[block] -= 1
                if not self._counts[block]:
                    del self._counts[block]

    def __len__(self) -> int:
        return len(self._counts)


class ParentNotFoundError(KvrelayError):
    """The parent in a stored event is a block that the worker does not hold: events were lost. Ask for a dump."""

    def __init__(self, worker_id: str, parent_hash: int) -> None:
        super().__init__(f"worker {worker_id} stored a block below {parent_hash:#018x}, which it does not hold")
        self.worker_id = worker_id
        self.parent_hash = parent_hash


class IndexerOfflineError(RetryElsewhereError):
    """The indexer has been closed."""


class RequestDroppedError(RetryElsewhereError):
    """The indexer refused a look-up above its size limit."""
