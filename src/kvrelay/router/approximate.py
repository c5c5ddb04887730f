"""ApproximateIndexer: an index guessed from placements, for blocks that workers have not reported or never report.

Every prompt that this router sends to a worker counts as cached there for a time to live; a later use extends it. The
index does not know what the worker really holds, nor what other frontends have sent to it.

Time is cut into windows of a quarter of the time to live. The placements of one worker in one window are a holder of
their own in a ``PrefixIndex``. When a window ends, its holders are removed. That costs next to nothing, and no block
needs a counter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.core.clock import Clock
from kvrelay.router.overlap import WorkerGroup
from kvrelay.router.prefix_index import PrefixIndex
from kvrelay.router.segments import MAX_CACHED_MASKS

WINDOWS_PER_TTL = 4
MAX_TRACKED_BLOCKS = 1 << 20


@dataclass(slots=True)
class _Window:
    """Placements from ``start_s`` on. ``holders``: a worker's name in the index, for this window."""

    start_s: float
    holders: dict[str, str] = field(default_factory=dict)
    num_blocks: int = 0


class ApproximateIndexer:
    """A placement lives for ``ttl_s`` to 1.25 ``ttl_s``; ``ttl_s`` may be changed at any time.

    ``max_blocks`` bounds the memory. A block counts once per placement; above the bound the oldest windows end early.
    """

    def __init__(self, ttl_s: float, clock: Clock, max_blocks: int = MAX_TRACKED_BLOCKS) -> None:
        self.ttl_s = ttl_s
        self._clock = clock
        self._max_blocks = max_blocks
        self._index = PrefixIndex()
        self._windows: deque[_Window] = deque()
        self._worker_of: dict[str, str] = {}
        self._group_of_mask: dict[int, WorkerGroup] = {}
        self._num_windows = 0
        self._num_blocks = 0

    @property
    def index(self) -> PrefixIndex:
        return self._index

    def find_holders(self, sequence: Sequence[int]) -> list[tuple[int, WorkerGroup]]:
        """As ``KvIndexer.find_holders``; a worker may appear more than once, the last time with the most blocks."""
        self._expire(self._clock.now())
        return [(depth, self._group(mask)) for depth, mask in self._index.find_steps(sequence)]

    def _group(self, mask: int) -> WorkerGroup:
        """The workers of a mask of holders; cached as in ``PrefixIndex.group``."""
        found = self._group_of_mask.get(mask)
        if found is None:
            if len(self._group_of_mask) >= MAX_CACHED_MASKS:
                self._group_of_mask.clear()
            workers = dict.fromkeys(self._worker_of[holder] for holder in self._index.group(mask).names)
            found = self._group_of_mask[mask] = WorkerGroup(tuple(workers))
        return found

    def place(self, worker_id: str, sequence: tuple[int, ...]) -> None:
        """A prompt with these sequence hashes was sent to the worker."""
        if not sequence:
            return
        now = self._clock.now()
        self._expire(now)
        window = self._current_window(now, len(sequence))
        holder = window.holders.get(worker_id)
        if holder is None:
            holder = window.holders[worker_id] = f"{self._num_windows}/{worker_id}"
            self._worker_of[holder] = worker_id
        self._index.store(holder, None, sequence)
        window.num_blocks += len(sequence)
        self._num_blocks += len(sequence)

    def remove(self, worker_id: str, block_hashes: Sequence[int]) -> None:
        """The worker reports that these blocks are gone. Blocks that it computes again are missing until it reports
        them."""
        if self._index.knows_none(block_hashes):
            return  # as a rule: a worker evicts what has not been placed for long
        for window in self._windows:
            holder = window.holders.get(worker_id)
            if holder is not None:
                self._index.remove(holder, block_hashes)

    def remove_worker(self, worker_id: str) -> None:
        """Forget the worker and all its placements."""
        for window in self._windows:
            holder = window.holders.pop(worker_id, None)
            if holder is not None:
                self._drop(holder)

    def _current_window(self, now: float, num_blocks: int) -> _Window:
        if self._windows and now - self._windows[-1].start_s < self.ttl_s / WINDOWS_PER_TTL:
            window = self._windows[-1]
            if not window.num_blocks or window.num_blocks + num_blocks <= self._max_blocks // WINDOWS_PER_TTL:
                return window
        self._windows.append(_Window(now))
        self._num_windows += 1
        return self._windows[-1]

    def _expire(self, now: float) -> None:
        oldest = now - self.ttl_s * (1 + 1 / WINDOWS_PER_TTL)
        while self._windows and (self._windows[0].start_s <= oldest or self._num_blocks > self._max_blocks):
            window = self._windows.popleft()
            self._num_blocks -= window.num_blocks
            for holder in window.holders.values():
                self._drop(holder)

    def _drop(self, holder: str) -> None:
        self._index.remove_worker(holder)
        self._group_of_mask.clear()
        del self._worker_of[holder]

    def __repr__(self) -> str:
        return f"ApproximateIndexer(windows={len(self._windows)}, blocks={self._num_blocks}, {self._index!r})"
