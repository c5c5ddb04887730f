"""Runs of blocks, and the table that leads from every block to its run: what a ``PrefixIndex`` is made of.

A run is a stretch of consecutive blocks that exactly the same workers hold. What is owned here: that every block is in
exactly one run, through splitting, growing, joining and dropping. What is not known: the order of events, what workers
hold in all, when to tidy up.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat

from kvrelay.errors import IntegrityError
from kvrelay.router.worker_bits import WorkerBits


class Run:
    """Consecutive blocks with one set of workers. ``parent`` is the hash before the first block, None at the root.

    ``mask`` has a bit per worker, among them perhaps some of workers that have left. ``slot`` is the place in the list
    of runs, -1 once dropped. ``spill`` is the run that took the last block cut off this one's tail: with evictions from
    the tail the next block goes there, instead of becoming one more run.
    """

    __slots__ = ("hashes", "mask", "parent", "slot", "spill")

    def __init__(self, hashes: list[int], mask: int, parent: int | None) -> None:
        self.hashes = hashes
        self.mask = mask
        self.parent = parent
        self.slot = -1
        self.spill: Run | None = None

    def index(self, block_hash: int) -> int:
        """Where a block of this run lies: at the head or the tail, nearly always."""
        hashes = self.hashes
        if hashes[0] == block_hash:
            return 0
        if hashes[-1] == block_hash:
            return len(hashes) - 1
        return hashes.index(block_hash)

    def common_length(self, sequence: Sequence[int], at: int) -> int:
        """How many blocks ``sequence`` from ``at`` shares with the run, which holds ``sequence[at]``; at least one.

        Sequence hashes are chained: where one is equal, all before it are, so the end is found by bisection.
        """
        hashes, first = self.hashes, self.index(sequence[at])
        high = min(len(hashes) - first, len(sequence) - at)
        if hashes[first + high - 1] == sequence[at + high - 1]:
            return high
        low = 1
        while high - low > 1:
            middle = (low + high) // 2
            if hashes[first + middle - 1] == sequence[at + middle - 1]:
                low = middle
            else:
                high = middle
        return low

    def stretch(self, wanted: Sequence[int], at: int) -> tuple[int, int]:
        """The slice of the run that ``wanted`` names from ``at`` on, in ascending or in descending order."""
        hashes, first = self.hashes, self.index(wanted[at])
        if at + 1 == len(wanted):
            return first, first + 1
        if first and hashes[first - 1] == wanted[at + 1]:
            low = first - 1
            limit = max(0, first - (len(wanted) - at) + 1)
            if hashes[limit : first + 1] == list(wanted[at : at + first + 1 - limit])[::-1]:
                return limit, first + 1
            while low > limit and hashes[low - 1] == wanted[at + first - low + 1]:
                low -= 1
            return low, first + 1
        high, limit = first + 1, min(len(hashes), first + len(wanted) - at)
        if hashes[first:limit] == list(wanted[at : at + limit - first]):
            return first, limit
        while high < limit and hashes[high] == wanted[at + high - first]:
            high += 1
        return first, high


class RunTable:
    """``run_of`` and ``runs`` are for reading. ``num_cuts`` counts what may have left runs that could be joined."""

    def __init__(self, bits: WorkerBits) -> None:
        self._bits = bits
        self.run_of: dict[int, Run] = {}
        self.runs: list[Run] = []
        self.num_cuts = 0

    # -- blocks and workers -------------------------------------------------------------------------------------------

    def add_blocks(self, hashes: Sequence[int], bit: int, before: int | None) -> int:
        """Unknown blocks of one worker: at the end of the run before them, if it is this worker's alone. How many."""
        run = self._ending_with(before, bit) or self._new([], bit, before)
        table = self.run_of
        size = len(table)
        table.update(zip(hashes, repeat(run)))
        if len(table) - size != len(hashes):
            hashes = tuple(dict.fromkeys(hashes))  # malformed: a block twice in one event
        run.hashes.extend(hashes)
        return len(hashes)

    def add_worker(self, run: Run, first: int, last: int, bit: int, before: int | None) -> None:
        """One more worker holds blocks ``first`` to ``last`` (exclusive) of ``run``."""
        mask = (run.mask & self._bits.alive) | bit
        left = self._ending_with(before, mask) if first == 0 and run.parent == before else None
        if left is not None:
            self._move_head(run, last, left)
            return
        if last < len(run.hashes):
            run = self._split(run, last)[0]
        if first:
            run = self._split(run, first)[1]
        run.mask = mask

    def drop_worker(self, run: Run, first: int, last: int, bit: int) -> None:
        """One worker less holds blocks ``first`` to ``last`` (exclusive) of ``run``."""
        mask = run.mask & self._bits.alive & ~bit
        if last < len(run.hashes):
            run = self._split(run, last)[0]
        if not mask:
            self._cut_off(run, first)
        elif first == 0:
            run.mask = mask
            self.num_cuts += 1
        elif (spill := self._spill(run, mask)) is not None:
            self._move_tail(run, first, spill)
        else:
            left, right = self._split(run, first)
            right.mask = mask
            left.spill = right

    def drop(self, run: Run) -> None:
        """Nobody holds these blocks."""
        deque(map(self.run_of.pop, run.hashes), maxlen=0)
        self._forget(run)

    def tidy(self, run: Run) -> None:
        """Take out the bits of workers that have left; drop the run, or join it to the one before, where possible."""
        run.mask &= self._bits.alive
        if not run.mask:
            self.drop(run)
            return
        left = self._ending_with(run.parent, run.mask)
        if left is not None and left is not run:
            self._move_head(run, len(run.hashes), left)

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _ending_with(self, block_hash: int | None, mask: int) -> Run | None:
        """The run whose last block this is, if just the workers of ``mask`` hold it."""
        run = self.run_of.get(block_hash) if block_hash is not None else None
        if run is None or run.hashes[-1] != block_hash or run.mask & self._bits.alive != mask:
            return None
        run.mask = mask
        return run

    def _spill(self, run: Run, mask: int) -> Run | None:
        """The run that took this one's last tail, if the next tail belongs there as well."""
        into = run.spill
        if into is None or into.slot < 0 or into.parent != run.hashes[-1] or into.mask & self._bits.alive != mask:
            return None
        return into

    def _new(self, hashes: list[int], mask: int, parent: int | None) -> Run:
        run = Run(hashes, mask, parent)
        run.slot = len(self.runs)
        self.runs.append(run)
        return run

    def _split(self, run: Run, at: int) -> tuple[Run, Run]:
        """Cut before block ``at``; the shorter part moves into a new run."""
        self.num_cuts += 1
        run.mask &= self._bits.alive
        head, tail = run.hashes[:at], run.hashes[at:]
        if len(tail) <= len(head):
            right = self._new(tail, run.mask, head[-1])
            self.run_of.update(zip(tail, repeat(right)))
            del run.hashes[at:]
            return run, right
        left = self._new(head, run.mask, run.parent)
        self.run_of.update(zip(head, repeat(left)))
        del run.hashes[:at]
        run.parent = head[-1]
        return left, run

    def _cut_off(self, run: Run, first: int) -> None:
        """Nobody holds the blocks from ``first`` on any more."""
        if first == 0:
            self.drop(run)
        else:
            deque(map(self.run_of.pop, run.hashes[first:]), maxlen=0)
            del run.hashes[first:]

    def _move_head(self, run: Run, count: int, left: Run) -> None:
        """Give the first ``count`` blocks to the adjoining run ``left``; join both when that is all of them."""
        if count == len(run.hashes) and len(left.hashes) < count:
            run.mask = left.mask
            run.parent = left.parent
            run.hashes[0:0] = left.hashes
            self.run_of.update(zip(left.hashes, repeat(run)))
            self._forget(left)
            return
        head = run.hashes[:count]
        left.hashes.extend(head)
        left.spill = None
        self.run_of.update(zip(head, repeat(left)))
        if count == len(run.hashes):
            self._forget(run)
        else:
            del run.hashes[:count]
            run.parent = head[-1]

    def _move_tail(self, run: Run, first: int, right: Run) -> None:
        """Give the blocks from ``first`` on to the adjoining run ``right``."""
        tail = run.hashes[first:]
        right.hashes[0:0] = tail
        right.parent = run.hashes[first - 1]
        self.run_of.update(zip(tail, repeat(right)))
        del run.hashes[first:]

    def _forget(self, run: Run) -> None:
        """Take the run off the list; the last one fills the gap."""
        last = self.runs.pop()
        if last is not run:
            self.runs[run.slot] = last
            last.slot = run.slot
        run.slot = -1
        run.spill = None

    # -- inspection ---------------------------------------------------------------------------------------------------

    def parents_first(self) -> Iterator[Run]:
        """All runs, each behind the one that its first block hangs below, if that is known."""
        done: set[int] = set()
        for start in self.runs:
            way = []
            run: Run | None = start
            while run is not None and id(run) not in done:
                done.add(id(run))
                way.append(run)
                run = self.run_of.get(run.parent) if run.parent is not None else None
            yield from reversed(way)

    def memory_bytes(self) -> int:
        """What runs and table take, about, with a hash object per block (48 bytes)."""
        per_run = sys.getsizeof(Run([], 1, None)) + 48
        runs = sum(sys.getsizeof(run.hashes) for run in self.runs) + per_run * len(self.runs)
        return sys.getsizeof(self.run_of) + 48 * len(self.run_of) + runs

    def check_integrity(self) -> None:
        """Every block in exactly one run, no run without a worker. Raises IntegrityError."""
        total = 0
        for slot, run in enumerate(self.runs):
            total += len(run.hashes)
            if run.slot != slot or not run.hashes or not run.mask:
                raise IntegrityError(f"run {slot} of the prefix index is damaged")
            if any(self.run_of.get(block) is not run for block in run.hashes):
                raise IntegrityError(f"a block of run {slot} is not found under its hash")
        if total != len(self.run_of):
            raise IntegrityError(f"{len(self.run_of)} blocks in the table, {total} in runs")
