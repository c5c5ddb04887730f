"""SegmentPass: the pass over all segments of an index, advanced by a few segments with every event.

The pass clears the bits of departed workers, so that new workers can get them. It drops segments that no worker holds,
and joins adjoining segments that the same workers hold.
"""

from __future__ import annotations

from kvrelay.router.segments import SegmentTable
from kvrelay.router.worker_bits import WorkerBits

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
