"""PrefixIndex: the fast index of who holds which prefixes, equal in behaviour to ``RadixTree`` of the tests.

A chained sequence hash names a block together with its whole prefix, so no tree is needed to find a block: a flat table
leads from every block to its *segment*, a stretch of consecutive blocks that exactly the same workers hold. The workers
of a segment are one integer with a bit each. A look-up jumps from segment to segment and ANDs their masks. The number
of segments it visits is the number of changes of the worker set along the sequence; it does not depend on the number of
blocks or workers.

    table     h0 h1 h2 h3 | h4 h5 | h6 ...
               └──┴──┴──┘   └──┘    └─ ...
    segments   mask 1111    0011    0001      scores of a query h0..h5: workers 2 and 3: 4, workers 0 and 1: 6

Segments (``segments``) are split where workers part and grow where a worker goes on. A pass over all segments
(``SegmentPass``), which advances by a few segments with every event, joins adjoining segments with equal masks. When a
worker leaves, the index only retires its bit (``WorkerBits``); the same pass clears the bit from the masks. This
module does not know the order of events, registrations, load or tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.core.events import BlockRemoved, BlockStored, KvEvent
from kvrelay.errors import IntegrityError
from kvrelay.router.overlap import ParentNotFoundError, WorkerGroup
from kvrelay.router.segments import SegmentPass, SegmentTable, WorkerBits

PASS_SEGMENTS_PER_EVENT = 8


class PrefixIndex:
    """Blocks by sequence hash, in segments with the workers that hold them."""

    def __init__(self) -> None:
        self._bits = WorkerBits()
        self.table = SegmentTable(self._bits)
        self._pass = SegmentPass(self.table, self._bits)
        self._num_held: dict[str, int] = {}

    # -- look up ------------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Distinct blocks in the table, including blocks of departed workers that the pass has not yet removed."""
        return len(self.table.segment_of)

    @property
    def num_segments(self) -> int:
        return len(self.table.segments)

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Workers that have stored blocks and have not been cleared or removed since."""
        return tuple(self._bits)

    def holds(self, worker_id: str, block_hash: int) -> bool:
        segment = self.table.segment_of.get(block_hash)
        return segment is not None and bool(segment.mask & self._bits.bit(worker_id))

    def find_steps(self, sequence: Sequence[int]) -> list[tuple[int, int]]:
        """Where workers drop out along ``sequence`` (sequence hashes): (depth, mask of the workers that end there)."""
        segment_of, length = self.table.segment_of, len(sequence)
        active, depth, steps = self._bits.alive, 0, []
        while depth < length:
            segment = segment_of.get(sequence[depth])
            if segment is None:
                break
            still = active & segment.mask
            if still != active:
                if depth:
                    steps.append((depth, active ^ still))
                active = still
                if not active:
                    break
            hashes = segment.hashes
            end = depth + len(hashes)
            if end <= length and hashes[-1] == sequence[end - 1] and hashes[0] == sequence[depth]:
                depth = end
            else:
                depth += segment.common_length(sequence, depth)
        if active and depth:
            steps.append((depth, active))
        return steps

    def find_holders(self, sequence: Sequence[int]) -> list[tuple[int, WorkerGroup]]:
        """As ``find_steps``, with the workers of each mask: the same object for the same mask, where possible."""
        return [(depth, self._bits.group(mask)) for depth, mask in self.find_steps(sequence)]

    # -- change -------------------------------------------------------------------------------------------------------

    def apply_event(self, worker_id: str, event: KvEvent) -> None:
        """Apply what a worker has stored or removed. As ``RadixTree.apply_event``."""
        if isinstance(event, BlockStored):
            self.store(worker_id, event.parent_hash, event.block_hashes)
        elif isinstance(event, BlockRemoved):
            self.remove(worker_id, event.block_hashes)
        else:
            self.clear_worker(worker_id)

    def store(
        self, worker_id: str, parent_hash: int | None, block_hashes: Sequence[int], *, detached: bool = False
    ) -> None:
        """The worker holds these consecutive blocks. Raises ParentNotFoundError if it does not hold the parent.

        ``detached`` blocks may lack the parent: look-ups find them once the worker holds the blocks before them.
        """
        if parent_hash is not None and not detached and not self.holds(worker_id, parent_hash):
            raise ParentNotFoundError(worker_id, parent_hash)
        bits, table = self._bits, self.table
        bit = bits.bit(worker_id) or bits.add(worker_id)
        at, length, before, added = 0, len(block_hashes), parent_hash, 0
        while at < length:
            segment = table.segment_of.get(block_hashes[at])
            if segment is not None and not segment.mask & bits.alive:
                table.drop(segment)
                segment = None
            if segment is None:
                end = self._end_of_new(block_hashes, at)
                added += table.add_blocks(block_hashes[at:end] if at or end < length else block_hashes, bit, before)
            else:
                first = segment.index(block_hashes[at])
                end = at + segment.common_length(block_hashes, at)
                if not segment.mask & bit:
                    table.add_worker(segment, first, first + end - at, bit, before)
                    added += end - at
            before, at = block_hashes[end - 1], end
        self._num_held[worker_id] = self._num_held.get(worker_id, 0) + added
        self._pass.advance(PASS_SEGMENTS_PER_EVENT)

    def _end_of_new(self, block_hashes: Sequence[int], start: int) -> int:
        """The end of the unknown blocks that begin at ``start``; usually the end of ``block_hashes``."""
        segment_of, length = self.table.segment_of, len(block_hashes)
        if segment_of.keys().isdisjoint(block_hashes[start:] if start else block_hashes):  # one C call
            return length
        return next(at for at in range(start, length) if block_hashes[at] in segment_of)

    def remove(self, worker_id: str, block_hashes: Sequence[int]) -> int:
        """The worker no longer holds these blocks, listed in any order. Returns how many of them it held."""
        bit = self._bits.bit(worker_id)
        at, length, removed = 0, len(block_hashes), 0
        while at < length:
            segment = self.table.segment_of.get(block_hashes[at])
            if segment is None or not segment.mask & bit:
                at += 1
                continue
            first, last = segment.stretch(block_hashes, at)
            self.table.drop_worker(segment, first, last, bit)
            removed += last - first
            at += last - first
        if removed:
            self._num_held[worker_id] -= removed
        self._pass.advance(PASS_SEGMENTS_PER_EVENT)
        return removed

    def clear_worker(self, worker_id: str) -> None:
        """The worker holds nothing any more. Takes the same time for any number of blocks."""
        if self._bits.retire(worker_id):
            self._num_held.pop(worker_id)
            self._pass.begin()

    def blocks_of(self, worker_id: str) -> list[int]:
        """All blocks that the worker holds; a block comes after its parent if the worker holds both."""
        bit = self._bits.bit(worker_id)
        return [block for segment in self.table.parents_first() if segment.mask & bit for block in segment.hashes]

    def compact(self) -> None:
        """Finish the current pass over the segments, if any, then make a complete one."""
        self._pass.complete()
        self._pass.begin()
        self._pass.complete()

    # -- inspection ---------------------------------------------------------------------------------------------------

    def memory_bytes(self) -> int:
        """Approximate size of the index in memory."""
        return self.table.memory_bytes()

    def check_integrity(self) -> None:
        """Every block in exactly one segment, no segment without a worker, counts right. Raises IntegrityError."""
        self.table.check_integrity()
        held = dict.fromkeys(self._bits, 0)
        for segment in self.table.segments:
            for name in self._bits.group(segment.mask & self._bits.alive).names:
                held[name] += len(segment.hashes)
        if held != self._num_held:
            raise IntegrityError("the workers' block counts are wrong")

    def __repr__(self) -> str:
        return f"PrefixIndex(workers={len(self._bits)}, blocks={self.num_blocks}, segments={self.num_segments})"
