"""SegmentPass: the pass over all segments of an index that advances a few with every event.

It clears the bits of workers that have left, so that they can be given away again, drops segments that nobody holds, and
joins adjoining ones that the same workers hold. What it does not know: why there is something to do.
"""

from __future__ import annotations

from kvrelay.router.segments import SegmentTable
from kvrelay.router.worker_bits import WorkerBits

MIN_CUTS_FOR_PASS = 64


class SegmentPass:
    """One pass begins when workers have left, or when enough was cut apart that could be joined.

    It goes from the last segment to the first. Segments at and behind the cursor are done: new ones are appended there and have
    no bits of workers that have left, and where one is dropped the last one, done as well, fills the gap.
    """

    def __init__(self, table: SegmentTable, bits: WorkerBits) -> None:
        self._table = table
        self._bits = bits
        self._clearing = 0
        self._cursor = 0

    def begin(self) -> None:
        """Nothing to do while one is under way: when it ends the next begins, if workers have left meanwhile."""
        if self._cursor == 0:
            self._clearing = self._bits.retired
            self._cursor = len(self._table.segments)
            self._table.num_cuts = 0
            if not self._cursor:
                self._end()

    def advance(self, num_segments: int) -> None:
        """Look at up to ``num_segments`` segments."""
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
        """Finish the pass that may be under way, and those that it leads to."""
        while self._cursor:
            self.advance(len(self._table.segments) + 1)

    def _end(self) -> None:
        """No segment has a bit of ``_clearing`` any more."""
        self._bits.give_away(self._clearing)
        self._clearing = 0
        if self._bits.retired:
            self.begin()
