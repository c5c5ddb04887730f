"""Segments of blocks, and the table that leads from every block to its segment: the parts of a ``PrefixIndex``.

A segment is a stretch of consecutive blocks that exactly the same workers hold. ``SegmentTable`` keeps every block in
exactly one segment while segments are split, grow, are joined and are dropped. It does not know the order of events,
how many blocks a worker holds, or when to tidy up.

``WorkerBits`` gives each worker a bit, so that a set of workers is one integer. The bit of a worker that leaves is
*retired*: it no longer counts, but old masks still contain it. So it stays taken until the pass over the segments has
cleared it everywhere and calls ``give_away``. It does not know where the masks are.

``SegmentPass`` is that pass, advanced by a few segments with every event. It clears the bits of departed workers, so
that new workers can get them, drops segments that no worker holds, and joins adjoining segments that the same workers
hold.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat

from kvrelay.errors import IntegrityError
from kvrelay.router.overlap import WorkerGroup


class Segment:
    """Consecutive blocks with one set of workers. ``parent`` is the hash before the first block, None at the root.

    ``mask`` has a bit per worker and may still have bits of departed workers. ``slot`` is the index in the list of
    segments, -1 once dropped. ``spill`` is the segment that took the last block cut off this one's tail: when a worker
    evicts from the tail, the next block goes there instead of becoming one more segment.
    """

    __slots__ = ("hashes", "mask", "parent", "slot", "spill")

    def __init__(self, hashes: list[int], mask: int, parent: int | None) -> None:
        self.hashes = hashes
        self.mask = mask
        self.parent = parent
        self.slot = -1
        self.spill: Segment | None = None

    def index(self, block_hash: int) -> int:
        """Index of a block of this segment: nearly always the head or the tail."""
        hashes = self.hashes
        if hashes[0] == block_hash:
            return 0
        if hashes[-1] == block_hash:
            return len(hashes) - 1
        return hashes.index(block_hash)

    def common_length(self, sequence: Sequence[int], at: int) -> int:
        """How many blocks ``sequence`` from ``at`` shares with the segment, which holds ``sequence[at]``; at least one.

        Sequence hashes are chained: if one is equal, so are all before it. So bisection finds the end.
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
        """The slice of the segment that ``wanted`` names from ``at`` on, in ascending or in descending order."""
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


class SegmentTable:
    """``segment_of`` and ``segments`` are for reading. ``num_cuts``: changes after which segments might be joined."""

    def __init__(self, bits: WorkerBits) -> None:
        self._bits = bits
        self.segment_of: dict[int, Segment] = {}
        self.segments: list[Segment] = []
        self.num_cuts = 0

    # -- blocks and workers -------------------------------------------------------------------------------------------

    def add_blocks(self, hashes: Sequence[int], bit: int, before: int | None) -> int:
        """Add unknown blocks of one worker and return how many they are.

        They extend the segment before them if this worker alone holds it.
        """
        segment = self._ending_with(before, bit) or self._new([], bit, before)
        table = self.segment_of
        size = len(table)
        table.update(zip(hashes, repeat(segment)))
        if len(table) - size != len(hashes):
            hashes = tuple(dict.fromkeys(hashes))  # malformed: a block twice in one event
        segment.hashes.extend(hashes)
        return len(hashes)

    def add_worker(self, segment: Segment, first: int, last: int, bit: int, before: int | None) -> None:
        """One more worker holds blocks ``first`` to ``last`` (exclusive) of ``segment``."""
        mask = (segment.mask & self._bits.alive) | bit
        left = self._ending_with(before, mask) if first == 0 and segment.parent == before else None
        if left is not None:
            self._move_head(segment, last, left)
            return
        if last < len(segment.hashes):
            segment = self._split(segment, last)[0]
        if first:
            segment = self._split(segment, first)[1]
        segment.mask = mask

    def drop_worker(self, segment: Segment, first: int, last: int, bit: int) -> None:
        """One worker no longer holds blocks ``first`` to ``last`` (exclusive) of ``segment``."""
        mask = segment.mask & self._bits.alive & ~bit
        if last < len(segment.hashes):
            segment = self._split(segment, last)[0]
        if not mask:
            self._cut_off(segment, first)
        elif first == 0:
            segment.mask = mask
            self.num_cuts += 1
        elif (spill := self._spill(segment, mask)) is not None:
            self._move_tail(segment, first, spill)
        else:
            left, right = self._split(segment, first)
            right.mask = mask
            left.spill = right

    def drop(self, segment: Segment) -> None:
        """Remove a segment whose blocks no worker holds."""
        deque(map(self.segment_of.pop, segment.hashes), maxlen=0)
        self._forget(segment)

    def tidy(self, segment: Segment) -> None:
        """Clear the bits of departed workers; then drop the segment, or join it to the one before, if possible."""
        segment.mask &= self._bits.alive
        if not segment.mask:
            self.drop(segment)
            return
        left = self._ending_with(segment.parent, segment.mask)
        if left is not None and left is not segment:
            self._move_head(segment, len(segment.hashes), left)

    # -- segments -----------------------------------------------------------------------------------------------------

    def _ending_with(self, block_hash: int | None, mask: int) -> Segment | None:
        """The segment that ends with this block, if exactly the workers of ``mask`` hold it."""
        segment = self.segment_of.get(block_hash) if block_hash is not None else None
        if segment is None or segment.hashes[-1] != block_hash or segment.mask & self._bits.alive != mask:
            return None
        segment.mask = mask
        return segment

    def _spill(self, segment: Segment, mask: int) -> Segment | None:
        """The segment that took this one's last tail, if the next tail belongs there as well."""
        into = segment.spill
        if into is None or into.slot < 0 or into.parent != segment.hashes[-1] or into.mask & self._bits.alive != mask:
            return None
        return into

    def _new(self, hashes: list[int], mask: int, parent: int | None) -> Segment:
        segment = Segment(hashes, mask, parent)
        segment.slot = len(self.segments)
        self.segments.append(segment)
        return segment

    def _split(self, segment: Segment, at: int) -> tuple[Segment, Segment]:
        """Cut before block ``at``; the shorter part moves into a new segment."""
        self.num_cuts += 1
        segment.mask &= self._bits.alive
        head, tail = segment.hashes[:at], segment.hashes[at:]
        if len(tail) <= len(head):
            right = self._new(tail, segment.mask, head[-1])
            self.segment_of.update(zip(tail, repeat(right)))
            del segment.hashes[at:]
            return segment, right
        left = self._new(head, segment.mask, segment.parent)
        self.segment_of.update(zip(head, repeat(left)))
        del segment.hashes[:at]
        segment.parent = head[-1]
        return left, segment

    def _cut_off(self, segment: Segment, first: int) -> None:
        """Remove the blocks from ``first`` on, which no worker holds any more."""
        if first == 0:
            self.drop(segment)
        else:
            deque(map(self.segment_of.pop, segment.hashes[first:]), maxlen=0)
            del segment.hashes[first:]

    def _move_head(self, segment: Segment, count: int, left: Segment) -> None:
        """Give the first ``count`` blocks to the adjoining segment ``left``; if that is all of them, join the two."""
        if count == len(segment.hashes) and len(left.hashes) < count:
            segment.mask = left.mask
            segment.parent = left.parent
            segment.hashes[0:0] = left.hashes
            self.segment_of.update(zip(left.hashes, repeat(segment)))
            self._forget(left)
            return
        head = segment.hashes[:count]
        left.hashes.extend(head)
        left.spill = None
        self.segment_of.update(zip(head, repeat(left)))
        if count == len(segment.hashes):
            self._forget(segment)
        else:
            del segment.hashes[:count]
            segment.parent = head[-1]

    def _move_tail(self, segment: Segment, first: int, right: Segment) -> None:
        """Give the blocks from ``first`` on to the adjoining segment ``right``."""
        tail = segment.hashes[first:]
        right.hashes[0:0] = tail
        right.parent = segment.hashes[first - 1]
        self.segment_of.update(zip(tail, repeat(right)))
        del segment.hashes[first:]

    def _forget(self, segment: Segment) -> None:
        """Take the segment off the list; the last one fills the gap."""
        last = self.segments.pop()
        if last is not segment:
            self.segments[segment.slot] = last
            last.slot = segment.slot
        segment.slot = -1
        segment.spill = None

    # -- inspection ---------------------------------------------------------------------------------------------------

    def parents_first(self) -> Iterator[Segment]:
        """All segments; each comes after the segment that holds its parent block, if there is one."""
        done: set[int] = set()
        for start in self.segments:
            way = []
            segment: Segment | None = start
            while segment is not None and id(segment) not in done:
                done.add(id(segment))
                way.append(segment)
                segment = self.segment_of.get(segment.parent) if segment.parent is not None else None
            yield from reversed(way)

    def memory_bytes(self) -> int:
        """Approximate size of segments and table, with one hash object (48 bytes) per block."""
        per_segment = sys.getsizeof(Segment([], 1, None)) + 48
        segments = sum(sys.getsizeof(segment.hashes) for segment in self.segments) + per_segment * len(self.segments)
        return sys.getsizeof(self.segment_of) + 48 * len(self.segment_of) + segments

    def check_integrity(self) -> None:
        """Every block in exactly one segment, no segment without a worker. Raises IntegrityError."""
        total = 0
        for slot, segment in enumerate(self.segments):
            total += len(segment.hashes)
            if segment.slot != slot or not segment.hashes or not segment.mask:
                raise IntegrityError(f"segment {slot} of the prefix index is damaged")
            if any(self.segment_of.get(block) is not segment for block in segment.hashes):
                raise IntegrityError(f"a block of segment {slot} is not found under its hash")
        if total != len(self.segment_of):
            raise IntegrityError(f"{len(self.segment_of)} blocks in the table, {total} in segments")


MAX_CACHED_MASKS = 4096


class WorkerBits:
    """``alive``: the bits of all present workers. ``retired``: the bits of departed workers that masks may contain."""

    def __init__(self) -> None:
        self.alive = 0
        self.retired = 0
        self._bit_of: dict[str, int] = {}
        self._name_of: dict[int, str] = {}
        self._free: list[int] = []
        self._num_bits = 0
        self._group_of_mask: dict[int, WorkerGroup] = {}

    def __len__(self) -> int:
        return len(self._bit_of)

    def __iter__(self) -> Iterator[str]:
        return iter(self._bit_of)

    def bit(self, worker_id: str) -> int:
        """0 for a worker without a bit."""
        return self._bit_of.get(worker_id, 0)

    def add(self, worker_id: str) -> int:
        """Give a bit to a worker that has none yet."""
        if not self._free:
            self._free.append(1 << self._num_bits)
            self._num_bits += 1
        bit = self._free.pop()
        self._bit_of[worker_id] = bit
        self._name_of[bit] = worker_id
        self.alive |= bit
        return bit

    def retire(self, worker_id: str) -> int:
        """Retire the bit of a departed worker and return it; 0 if the worker had none."""
        bit = self._bit_of.pop(worker_id, 0)
        self.alive &= ~bit
        self.retired |= bit
        return bit

    def give_away(self, mask: int) -> None:
        """Free these retired bits, which no mask contains any more: new workers may get them."""
        for bit in _single_bits(mask):
            del self._name_of[bit]
            self._free.append(bit)
        self._group_of_mask.clear()
        self.retired &= ~mask

    def group(self, mask: int) -> WorkerGroup:
        """The workers of a mask. The same masks come again and again, so the groups are cached."""
        found = self._group_of_mask.get(mask)
        if found is None:
            if len(self._group_of_mask) >= MAX_CACHED_MASKS:
                self._group_of_mask.clear()
            found = self._group_of_mask[mask] = WorkerGroup(tuple(self._name_of[bit] for bit in _single_bits(mask)))
        return found


def _single_bits(mask: int) -> Iterator[int]:
    """Lowest first."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


MIN_CUTS_FOR_PASS = 64


class SegmentPass:
    """A pass begins when workers have left, or when enough segments were split that might be joined again.

    The pass goes from the last segment to the first. Segments at the cursor and above are done: new segments are
    appended there and carry no bits of departed workers. When a segment is dropped, the last one, which is done as
    well, fills the gap.
    """

    def __init__(self, table: SegmentTable, bits: WorkerBits) -> None:
        self._table = table
        self._bits = bits
        self._clearing = 0
        self._cursor = 0

    def begin(self) -> None:
        """Begin a pass, unless one is in progress: at its end the next one begins if workers have left meanwhile."""
        if self._cursor == 0:
            self._clearing = self._bits.retired
            self._cursor = len(self._table.segments)
            self._table.num_cuts = 0
            if not self._cursor:
                self._end()

    def advance(self, num_segments: int) -> None:
        """Tidy up to ``num_segments`` segments."""
        segments = self._table.segments
        if not self._cursor:
            if self._table.num_cuts <= max(MIN_CUTS_FOR_PASS, len(segments) // 4):
                return
            self.begin()
        for _ in range(num_segments):
            self._cursor = min(self._cursor, len(segments))  # joins and drops shorten the list
            if not self._cursor:
                break
            self._cursor -= 1
            self._table.tidy(segments[self._cursor])
        if not self._cursor:
            self._end()

    def complete(self) -> None:
        """Finish the current pass, if any, and the passes that follow from it."""
        while self._cursor:
            self.advance(len(self._table.segments) + 1)

    def _end(self) -> None:
        """No segment has a bit of ``_clearing`` any more."""
        self._bits.give_away(self._clearing)
        self._clearing = 0
        if self._bits.retired:
            self.begin()
