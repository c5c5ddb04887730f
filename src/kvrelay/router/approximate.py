"""ApproximateIndexer: an index guessed from placements, for blocks that workers have not reported or never report.

Every prompt that this router sends to a worker counts as cached there for a time to live; a later use extends it. The
index does not know what the worker really holds, nor what other frontends have sent to it.

Placed prompts begin at the root, so they are a tree of stretches: a placement adds one stretch and splits one at most,
however long the prompt is, and no block has an entry of its own. Sequence hashes are chained, so bisection finds where
two prompts part.

    h0 ... h9 ──┬── h10 ... h99      used by a, b
                └── h10' ... h41'    used by a              the stretch h0 ... h9 is used by a, b
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from kvrelay.core.clock import Clock
from kvrelay.router.base import IndexState
from kvrelay.router.knowledge import Indexer
from kvrelay.router.overlap import WorkerGroup

MAX_TRACKED_BLOCKS = 1 << 20
MAX_CACHED_GROUPS = 4096


class _Stretch(msgspec.Struct, eq=False):
    """Blocks ``start`` to ``end`` (exclusive) of ``sequence``. ``after``: those that follow, by their first block.
    ``used_s``: the last placement through here, by the worker's number."""

    sequence: tuple[int, ...]
    start: int
    end: int
    before: _Stretch | None
    after: dict[int, _Stretch] = {}
    used_s: dict[int, float] = {}

    def common_end(self, other: Sequence[int]) -> int:
        """Where the stretch parts from ``other``, which has its first block."""
        own, end = self.sequence, min(self.end, len(other))
        if own[end - 1] == other[end - 1]:
            return end
        return bisect_left(range(end), True, self.start + 1, key=lambda at: own[at] != other[at])


class _Placement(NamedTuple):
    placed_s: float
    worker: int
    last: _Stretch


class ApproximateIndexer(Indexer):
    """A placement lives for ``ttl_s``, which may be changed at any time.

    ``max_blocks`` bounds the memory. A block counts once per placement; above it the oldest placements end early.
    """

    def __init__(self, ttl_s: float, clock: Clock, max_blocks: int = MAX_TRACKED_BLOCKS) -> None:
        self.ttl_s = ttl_s
        self._clock = clock
        self._max_blocks = max_blocks
        self._root = _Stretch((), 0, 0, None)
        self._ending_with: dict[int, _Stretch] = {}
        """Every stretch, by its last block."""
        self._placements: deque[_Placement] = deque()
        self._num_blocks = 0
        self._number_of: defaultdict[str, int] = defaultdict(itertools.count().__next__)
        """A worker that comes back gets a new number, so what it had is forgotten at once."""
        self._name_of: dict[int, str] = {}
        self._group = lru_cache(MAX_CACHED_GROUPS)(self._new_group)

    def find_holders(self, sequence: Sequence[int]) -> list[tuple[int, WorkerGroup]]:
        """As ``KvIndexer.find_holders``; a worker may appear more than once, the last time with the most blocks."""
        self._expire(self._clock.now())
        found: list[tuple[int, WorkerGroup]] = []
        at, stretch, workers = 0, self._root, set(self._name_of)
        while at == stretch.end and at < len(sequence):
            following = stretch.after.get(sequence[at])
            if following is None or not (workers := workers & following.used_s.keys()):
                break
            at, stretch = following.common_end(sequence), following
            found.append((at, self._group(frozenset(workers))))
        return found

    def _new_group(self, workers: frozenset[int]) -> WorkerGroup:
        return WorkerGroup(tuple(map(self._name_of.__getitem__, workers)))

    def place(self, worker_id: str, sequence: tuple[int, ...]) -> None:
        """A prompt with these sequence hashes was sent to the worker."""
        if not sequence:
            return
        now = self._clock.now()
        self._expire(now)
        worker = self._number_of[worker_id]
        self._name_of[worker] = worker_id
        stretch = self._root
        while stretch.end < len(sequence):
            stretch = self._following(stretch, sequence)
            stretch.used_s[worker] = now
        self._placements.append(_Placement(now, worker, stretch))
        self._num_blocks += len(sequence)

    def _following(self, stretch: _Stretch, sequence: tuple[int, ...]) -> _Stretch:
        """The next stretch along ``sequence``, which has all blocks of it. A new one, or one split off, if need be."""
        first, length = sequence[stretch.end], len(sequence)
        following = stretch.after.get(first)
        if following is None:
            made = _Stretch(sequence, stretch.end, length, stretch)
        elif (end := following.common_end(sequence)) == following.end:
            return following
        else:
            after, used_s = {following.sequence[end]: following}, dict(following.used_s)
            made = _Stretch(following.sequence, stretch.end, end, stretch, after, used_s)
            following.start, following.before = end, made
        stretch.after[first] = self._ending_with[made.sequence[made.end - 1]] = made
        return made

    def remove(self, worker_id: str, block_hashes: Sequence[int]) -> None:
        """The worker reports that these blocks are gone. A stretch that ends with one of them is forgotten: a cache
        evicts the last block first, and what the worker still holds of the stretch it has reported. Blocks that it
        computes again are missing until it reports them."""
        worker = self._number_of.get(worker_id)
        if worker is not None:
            for block in self._ending_with.keys() & block_hashes:
                self._ending_with[block].used_s.pop(worker, None)

    def remove_worker(self, worker_id: str) -> None:
        """Forget the worker and all its placements."""
        worker = self._number_of.pop(worker_id, None)
        if worker is not None:
            del self._name_of[worker]

    def index_state(self, worker_id: str) -> IndexState:
        return IndexState.APPROXIMATE

    def _expire(self, now: float) -> None:
        oldest, placements = now - self.ttl_s, self._placements
        while placements and (placements[0].placed_s < oldest or self._num_blocks > self._max_blocks):
            self._end(*placements.popleft())

    def _end(self, placed_s: float, worker: int, last: _Stretch) -> None:
        """A placement has ended: its stretches are no longer used by the worker, unless a later one uses them."""
        self._num_blocks -= last.end
        stretch = last
        while (before := stretch.before) is not None:
            if stretch.used_s.get(worker, math.inf) <= placed_s:
                del stretch.used_s[worker]
            is_needed = stretch.used_s or stretch.after
            if not is_needed and self._ending_with.get(stretch.sequence[stretch.end - 1]) is stretch:
                del self._ending_with[stretch.sequence[stretch.end - 1]]
                del before.after[stretch.sequence[stretch.start]]
            stretch = before

    def __repr__(self) -> str:
        return f"ApproximateIndexer(placements={len(self._placements)}, stretches={len(self._ending_with)})"
