"""PrefixIndex: the fast index of who holds which prefixes, equal in behaviour to ``RadixTree``.

A chained sequence hash names a block with all that precedes it, so a tree is not needed to find one: a flat table leads
from every block to its *run*, a stretch of consecutive blocks that exactly the same workers hold. The workers of a
run are one integer with a bit each. A look-up jumps from run to run and ANDs their masks; it looks at as many runs as
there are changes of the set of workers on the way, whatever the number of blocks and workers.

    table     h0 h1 h2 h3 | h4 h5 | h6 ...
               └──┴──┴──┘   └──┘    └─ ...
    runs       mask 1111    0011    0001      scores of a query h0..h5: workers 2 and 3: 4, workers 0 and 1: 6

Runs are split where workers part, grow where a worker goes on, and adjoining ones with equal masks are joined by a
pass over all runs that advances a few with every event. The same pass clears the bits of workers that have left:
leaving only takes the bit out of ``_alive``, whatever the worker held. Bits are given away again when it is through.
What it does not know: the order of events, registrations, load, tokens.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

from kvrelay.core.events import BlockRemoved, BlockStored, KvEvent
from kvrelay.errors import IntegrityError
from kvrelay.router.errors import ParentNotFoundError
from kvrelay.router.overlap import OverlapScores, RecentUses, StoredChain, WorkerGroup

PASS_RUNS_PER_EVENT = 8
MIN_DIRT_FOR_PASS = 64
MAX_CACHED_MASKS = 4096


class _Run:
    """Consecutive blocks with one set of workers. ``parent`` is the hash before the first block, None at the root.

    ``slot`` is the place in the list of runs, -1 once dropped. ``spill`` is the run that took the last block cut off
    this one's tail: with evictions from the tail the next block goes there, instead of becoming one more run.
    """

    __slots__ = ("hashes", "mask", "parent", "slot", "spill")

    def __init__(self, hashes: list[int], mask: int, parent: int | None) -> None:
        self.hashes = hashes
        self.mask = mask
        self.parent = parent
        self.slot = -1
        self.spill: _Run | None = None


class PrefixIndex:
    """Give ``uses`` to have ``find_matches`` count recent uses per block; that costs time per block."""

    def __init__(self, uses: RecentUses | None = None) -> None:
        self._uses = uses
        self._table: dict[int, _Run] = {}
        self._runs: list[_Run] = []
        self._bit_of: dict[str, int] = {}
        self._name_of: dict[int, str] = {}
        self._num_held: dict[str, int] = {}
        self._alive = 0
        self._free_bits: list[int] = []
        self._num_bits = 0
        self._retired = 0
        self._sweeping = 0
        self._cursor = 0
        self._dirt = 0
        self._group_of_mask: dict[int, WorkerGroup] = {}

    # -- look up ------------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Distinct blocks in the table; those of workers that have just left are in it until the pass has come by."""
        return len(self._table)

    @property
    def num_runs(self) -> int:
        return len(self._runs)

    def num_blocks_of(self, worker_id: str) -> int:
        return self._num_held.get(worker_id, 0)

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Workers that hold something, or once did and have not been removed."""
        return tuple(self._bit_of)

    def holds(self, worker_id: str, block_hash: int) -> bool:
        run = self._table.get(block_hash)
        return run is not None and bool(run.mask & self._bit_of.get(worker_id, 0))

    def find_steps(self, sequence: Sequence[int], early_exit: bool = False) -> list[tuple[int, int]]:
        """Where workers drop out along ``sequence`` (sequence hashes): (depth, mask of those that hold no more)."""
        table, length = self._table, len(sequence)
        active, depth, steps = self._alive, 0, []
        while depth < length:
            run = table.get(sequence[depth])
            if run is None:
                break
            still = active & run.mask
            if still != active:
                if depth:
                    steps.append((depth, active ^ still))
                active = still
                if not active:
                    break
            if early_exit and not active & (active - 1):
                depth += 1
                break
            hashes = run.hashes
            end = depth + len(hashes)
            if end <= length and hashes[-1] == sequence[end - 1] and hashes[0] == sequence[depth]:
                depth = end
            else:
                depth += _common_length(hashes, sequence, depth)
        if active and depth:
            steps.append((depth, active))
        return steps

    def find_matches(self, sequence: Sequence[int], early_exit: bool = False) -> OverlapScores:
        """Per worker the number of leading blocks of ``sequence`` (sequence hashes) that it holds.

        With ``early_exit`` the walk ends at the first block that only one worker holds.
        """
        scores: dict[str, int] = {}
        steps = self.find_steps(sequence, early_exit)
        for depth, mask in steps:
            for name in self.group(mask).names:
                scores[name] = depth
        if self._uses is None:
            return OverlapScores(scores)
        return OverlapScores(scores, self._uses.record(sequence[: steps[-1][0] if steps else 0]))

    def group(self, mask: int) -> WorkerGroup:
        """The workers of a mask. The same masks come again and again, so they are remembered."""
        found = self._group_of_mask.get(mask)
        if found is None:
            if len(self._group_of_mask) >= MAX_CACHED_MASKS:
                self._group_of_mask.clear()
            found = self._group_of_mask[mask] = WorkerGroup(tuple(self._name_of[bit] for bit in _bits(mask)))
        return found

    # -- change -------------------------------------------------------------------------------------------------------

    def apply_event(self, worker_id: str, event: KvEvent) -> None:
        """As ``RadixTree.apply_event``."""
        if isinstance(event, BlockStored):
            self.store(worker_id, event.parent_hash, event.block_hashes)
        elif isinstance(event, BlockRemoved):
            self.remove(worker_id, event.block_hashes)
        else:
            self.clear_worker(worker_id)

    def store(
        self, worker_id: str, parent_hash: int | None, block_hashes: Sequence[int], *, detached: bool = False
    ) -> None:
        """The worker holds these consecutive blocks. Raises ParentNotFoundError when it does not hold the parent.

        ``detached`` blocks may lack it: they are found once the worker holds what precedes them.
        """
        if parent_hash is not None and not detached and not self.holds(worker_id, parent_hash):
            raise ParentNotFoundError(worker_id, parent_hash)
        bit = self._bit_of.get(worker_id) or self._new_bit(worker_id)
        table, at, length, before, added = self._table, 0, len(block_hashes), parent_hash, 0
        while at < length:
            run = table.get(block_hashes[at])
            if run is not None and not run.mask & self._alive:
                self._drop_run(run)
                run = None
            if run is None:
                end = self._end_of_new(block_hashes, at)
                added += self._add_new(block_hashes[at:end] if at or end < length else block_hashes, bit, before)
            else:
                first = _index(run.hashes, block_hashes[at])
                end = at + _common_length(run.hashes, block_hashes, at)
                if not run.mask & bit:
                    self._add_worker(run, first, first + end - at, bit, before)
                    added += end - at
            before, at = block_hashes[end - 1], end
        self._num_held[worker_id] += added
        self.advance_pass(PASS_RUNS_PER_EVENT)

    def remove(self, worker_id: str, block_hashes: Sequence[int]) -> int:
        """The worker holds these blocks no more, in whatever order; how many it had held."""
        bit = self._bit_of.get(worker_id, 0)
        at, length, removed = 0, len(block_hashes), 0
        while at < length:
            run = self._table.get(block_hashes[at])
            if run is None or not run.mask & bit:
                at += 1
                continue
            first, last = _stretch(run.hashes, block_hashes, at)
            self._drop_worker(run, first, last, bit)
            removed += last - first
            at += last - first
        if removed:
            self._num_held[worker_id] -= removed
        self.advance_pass(PASS_RUNS_PER_EVENT)
        return removed

    def clear_worker(self, worker_id: str) -> None:
        """The worker holds nothing any more; at once, whatever it held."""
        bit = self._bit_of.pop(worker_id, 0)
        if bit:
            self._num_held.pop(worker_id)
            self._alive ^= bit
            self._retired |= bit
            self._begin_pass()

    remove_worker = clear_worker

    def dump(self, worker_id: str | None = None) -> list[StoredChain]:
        """The blocks of every worker, or of one, parents first where a worker holds both. Local hashes are not kept."""
        wanted = self._alive if worker_id is None else self._bit_of.get(worker_id, 0)
        return [
            StoredChain(name, run.parent, tuple(run.hashes))
            for run in self._parents_first()
            for name in self.group(run.mask & wanted).names
        ]

    def load(self, chains: Iterable[StoredChain]) -> None:
        """Add what a dump gave."""
        for chain in chains:
            self.store(chain.worker_id, chain.parent_hash, chain.block_hashes, detached=True)

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _end_of_new(self, block_hashes: Sequence[int], start: int) -> int:
        """The end of the unknown blocks that begin at ``start``; usually all the rest."""
        table, length = self._table, len(block_hashes)
        rest = block_hashes[start:] if start else block_hashes
        if table.keys().isdisjoint(rest):
            return length
        return next(at for at in range(start, length) if block_hashes[at] in table)

    def _add_new(self, hashes: Sequence[int], bit: int, before: int | None) -> int:
        """Unknown blocks of one worker: at the end of the run before them, if it is this worker's alone."""
        table = self._table
        run = table.get(before) if before is not None else None
        if run is None or run.mask & self._alive != bit or run.hashes[-1] != before:
            run = self._new_run([], bit, before)
        size = len(table)
        table.update(zip(hashes, repeat(run)))
        if len(table) - size != len(hashes):
            hashes = tuple(dict.fromkeys(hashes))  # malformed: a block twice in one event
        run.hashes.extend(hashes)
        return len(hashes)

    def _add_worker(self, run: _Run, first: int, last: int, bit: int, before: int | None) -> None:
        """One more worker holds blocks ``first`` to ``last`` (exclusive) of ``run``."""
        mask = (run.mask & self._alive) | bit
        if first == 0 and before is not None and run.parent == before:
            left = self._table.get(before)
            if left is not None and left.mask & self._alive == mask and left.hashes[-1] == before:
                left.mask = mask
                self._move_head(run, last, left)
                return
        if last < len(run.hashes):
            run = self._split(run, last)[0]
        if first:
            run = self._split(run, first)[1]
        run.mask = mask

    def _drop_worker(self, run: _Run, first: int, last: int, bit: int) -> None:
        """One worker less holds blocks ``first`` to ``last`` (exclusive) of ``run``."""
        mask = run.mask & self._alive & ~bit
        if not mask:
            self._cut_out(run, first, last)
            return
        if last < len(run.hashes):
            run = self._split(run, last)[0]
        if first == 0:
            run.mask = mask
            self._dirt += 1
        elif self._spills(run, mask):
            self._move_tail(run, first, run.spill)
        else:
            left, right = self._split(run, first)
            right.mask = mask
            left.spill = right

    def _cut_out(self, run: _Run, first: int, last: int) -> None:
        """Nobody holds blocks ``first`` to ``last`` (exclusive) of ``run`` any more."""
        if last < len(run.hashes):
            run = self._split(run, last)[0]
        if first == 0:
            self._drop_run(run)
        else:
            deque(map(self._table.pop, run.hashes[first:]), maxlen=0)
            del run.hashes[first:]

    def _spills(self, run: _Run, mask: int) -> bool:
        into = run.spill
        return into is not None and into.slot >= 0 and into.parent == run.hashes[-1] and into.mask & self._alive == mask

    def _split(self, run: _Run, at: int) -> tuple[_Run, _Run]:
        """Cut before block ``at``; the shorter part moves into a new run."""
        self._dirt += 1
        run.mask &= self._alive
        head, tail = run.hashes[:at], run.hashes[at:]
        if len(tail) <= len(head):
            right = self._new_run(tail, run.mask, head[-1])
            self._table.update(zip(tail, repeat(right)))
            del run.hashes[at:]
            return run, right
        left = self._new_run(head, run.mask, run.parent)
        self._table.update(zip(head, repeat(left)))
        del run.hashes[:at]
        run.parent = head[-1]
        return left, run

    def _move_head(self, run: _Run, count: int, left: _Run) -> None:
        """Give the first ``count`` blocks to the adjoining run ``left``; join both when that is all of them."""
        if count == len(run.hashes) and len(left.hashes) < count:
            run.mask = left.mask
            run.parent = left.parent
            run.hashes[0:0] = left.hashes
            self._table.update(zip(left.hashes, repeat(run)))
            self._forget(left)
            return
        head = run.hashes[:count]
        left.hashes.extend(head)
        left.spill = None
        self._table.update(zip(head, repeat(left)))
        if count == len(run.hashes):
            self._forget(run)
        else:
            del run.hashes[:count]
            run.parent = head[-1]

    def _move_tail(self, run: _Run, first: int, right: _Run | None) -> None:
        """Give the blocks from ``first`` on to the adjoining run ``right``."""
        assert right is not None
        tail = run.hashes[first:]
        right.hashes[0:0] = tail
        right.parent = run.hashes[first - 1]
        self._table.update(zip(tail, repeat(right)))
        del run.hashes[first:]

    def _new_run(self, hashes: list[int], mask: int, parent: int | None) -> _Run:
        run = _Run(hashes, mask, parent)
        run.slot = len(self._runs)
        self._runs.append(run)
        return run

    def _drop_run(self, run: _Run) -> None:
        """Nobody holds these blocks."""
        deque(map(self._table.pop, run.hashes), maxlen=0)
        self._forget(run)

    def _forget(self, run: _Run) -> None:
        """Take the run off the list; the last one fills the gap. Behind the cursor everything is swept already."""
        last = self._runs.pop()
        if last is not run:
            self._runs[run.slot] = last
            last.slot = run.slot
        run.slot = -1
        run.spill = None

    # -- workers' bits, and the pass over all runs --------------------------------------------------------------------

    def _new_bit(self, worker_id: str) -> int:
        if not self._free_bits:
            self._free_bits.append(1 << self._num_bits)
            self._num_bits += 1
        bit = self._free_bits.pop()
        self._bit_of[worker_id] = bit
        self._name_of[bit] = worker_id
        self._num_held[worker_id] = 0
        self._alive |= bit
        return bit

    def _begin_pass(self) -> None:
        if self._cursor == 0:
            self._sweeping = self._retired
            self._cursor = len(self._runs)
            self._dirt = 0
            if not self._cursor:
                self._end_pass()

    def _end_pass(self) -> None:
        """No run has a bit of ``_sweeping`` any more: they can be given to new workers."""
        for bit in _bits(self._sweeping):
            del self._name_of[bit]
            self._free_bits.append(bit)
        self._group_of_mask.clear()
        self._retired &= ~self._sweeping
        self._sweeping = 0
        if self._retired:
            self._begin_pass()

    def advance_pass(self, num_runs: int) -> None:
        """Look at up to ``num_runs`` runs: clear the bits of workers that left, drop and join."""
        if not self._cursor:
            if self._dirt <= max(MIN_DIRT_FOR_PASS, len(self._runs) // 4):
                return
            self._begin_pass()
        for _ in range(num_runs):
            # Runs at and behind the cursor are done. Joins and drops shorten the list, at most by those.
            self._cursor = min(self._cursor, len(self._runs))
            if not self._cursor:
                break
            self._cursor -= 1
            self._tidy(self._runs[self._cursor])
        if not self._cursor:
            self._end_pass()

    def compact(self) -> None:
        """Finish the pass over all runs that may be under way, and make a whole one."""
        self._finish_passes()
        self._begin_pass()
        self._finish_passes()

    def _finish_passes(self) -> None:
        while self._cursor:
            self.advance_pass(len(self._runs) + 1)

    def _tidy(self, run: _Run) -> None:
        run.mask &= self._alive
        if not run.mask:
            self._drop_run(run)
            return
        left = self._table.get(run.parent) if run.parent is not None else None
        if left is None or left is run or left.mask & self._alive != run.mask or left.hashes[-1] != run.parent:
            return
        left.mask &= self._alive
        self._move_head(run, len(run.hashes), left)

    # -- inspection ---------------------------------------------------------------------------------------------------

    def _parents_first(self) -> Iterator[_Run]:
        """All runs, each behind the one that its first block hangs below, if that is known."""
        done: set[int] = set()
        for start in self._runs:
            way = []
            run: _Run | None = start
            while run is not None and id(run) not in done:
                done.add(id(run))
                way.append(run)
                run = self._table.get(run.parent) if run.parent is not None else None
            yield from reversed(way)

    def memory_bytes(self) -> int:
        """What the index takes, about: the table, a hash object per block (48 bytes) and the runs."""
        per_run = sys.getsizeof(_Run([], 1, None)) + 48
        runs = sum(sys.getsizeof(run.hashes) for run in self._runs) + per_run * len(self._runs)
        return sys.getsizeof(self._table) + 48 * len(self._table) + runs

    def check_integrity(self) -> None:
        """Every block in exactly one run, no run without a worker, counts right. Raises IntegrityError."""
        held = dict.fromkeys(self._bit_of, 0)
        total = 0
        for slot, run in enumerate(self._runs):
            total += len(run.hashes)
            if run.slot != slot or not run.hashes or not run.mask:
                raise IntegrityError(f"run {slot} of the prefix index is damaged")
            if any(self._table.get(block) is not run for block in run.hashes):
                raise IntegrityError(f"a block of run {slot} is not found under its hash")
            for name in self.group(run.mask & self._alive).names:
                held[name] += len(run.hashes)
        if total != len(self._table):
            raise IntegrityError(f"{len(self._table)} blocks in the table, {total} in runs")
        if held != self._num_held:
            raise IntegrityError("the workers' block counts are wrong")

    def __repr__(self) -> str:
        return f"PrefixIndex(workers={len(self._bit_of)}, blocks={len(self._table)}, runs={len(self._runs)})"


def _bits(mask: int) -> Iterator[int]:
    """The single bits of ``mask``, lowest first."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def _index(hashes: list[int], block_hash: int) -> int:
    """Where a block lies in its run: at the head or the tail, nearly always."""
    if hashes[0] == block_hash:
        return 0
    if hashes[-1] == block_hash:
        return len(hashes) - 1
    return hashes.index(block_hash)


def _common_length(hashes: list[int], sequence: Sequence[int], at: int) -> int:
    """How many blocks ``sequence`` from ``at`` shares with the run that holds ``sequence[at]``; at least one.

    Sequence hashes are chained: where one is equal, all before it are, so the end is found by bisection.
    """
    first = _index(hashes, sequence[at])
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


def _stretch(hashes: list[int], wanted: Sequence[int], at: int) -> tuple[int, int]:
    """The slice of a run that ``wanted`` names from ``at`` on, in ascending or in descending order."""
    first = _index(hashes, wanted[at])
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
