"""The compressed radix tree over many sequences, stored as a sorted array, and the shared prefixes in it.

A radix tree whose nodes count the sequences that pass through them is, node by node, the sorted array of sequences
with the lengths of the common prefixes (LCP) of neighbours: a node of depth d with count c is a longest run of c
neighbours that share d items. The array takes 16 bytes a sequence beside the text, where a tree of objects takes
hundreds, and all of it is worked on by whole columns.

    sorted        LCP     windows of N = 3: smallest LCP inside
    "abc one"      -      [0..2] 4   <- a run of equal windows whose neighbours are both smaller:
    "abc two"      4      [1..3] 4   <- the deepest node that still has N sequences below it ("abc ", 4 of them)
    "abc two"      7      [2..4] 0
    "abc zero"     4      [3..5] 0
    "x"            0
    "y"            0

Which nodes count is the mission's measure (section 13): descend while a child has at least N sequences; the nodes
where that ends are the shared prefixes. In the columns these are the strict local maxima of the window minima.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrelay.errors import InvalidInputError

_STRIDE = 32
_SLICE = 1 << 16
_CONTINUATION_MASK, _CONTINUATION = 0xC0, 0x80

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class SharedPrefixNode:
    """A prefix that ``count`` sequences share, ``length`` items long; ``content`` is its bytes."""

    length: int
    count: int
    content: bytes


class PackedSequences:
    """Sequences as bytes in sorted order, with the LCP of neighbours in bytes, cut to whole items.

    ``item_bytes`` is the width of an item (big-endian, so that byte order is item order); 0 means UTF-8 text, whose
    items are characters.
    """

    def __init__(self, sequences: Iterable[bytes], item_bytes: int = 0, progress: Progress = lambda _: None) -> None:
        ordered = sorted(sequences)
        if not ordered:
            raise InvalidInputError("no conversations: nothing to measure")
        self.item_bytes = item_bytes
        lengths = np.fromiter(map(len, ordered), np.int64, len(ordered))
        self.starts: npt.NDArray[np.int64] = np.concatenate(([0], np.cumsum(lengths)))
        self.data: npt.NDArray[np.uint8] = np.frombuffer(b"".join(ordered), np.uint8)
        del ordered
        self.lcp = self._neighbours_in_common(progress)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __repr__(self) -> str:
        return f"PackedSequences({len(self)} sequences, {self.data.nbytes} bytes)"

    def prefix(self, index: int, num_bytes: int) -> bytes:
        """The first ``num_bytes`` of the sequence at ``index`` in sorted order."""
        start = int(self.starts[index])
        return self.data[start : start + num_bytes].tobytes()

    def num_items(self, content: bytes) -> int:
        """How many characters or items the bytes hold."""
        if self.item_bytes:
            return len(content) // self.item_bytes
        raw = np.frombuffer(content, np.uint8)
        return int(np.count_nonzero((raw & _CONTINUATION_MASK) != _CONTINUATION))

    def _neighbours_in_common(self, progress: Progress) -> npt.NDArray[np.int64]:
        """``lcp[i]`` is that of sequences i and i + 1."""
        count = len(self) - 1
        lcp = np.zeros(max(count, 0), np.int64)
        for begin in range(0, count, _SLICE):
            end = min(begin + _SLICE, count)
            lcp[begin:end] = self._common(np.arange(begin, end))
            progress(end / count)
        return self._whole_items(lcp)

    def _common(self, left: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Compare each sequence with its successor, a stride at a time, going on with the pairs still equal."""
        sizes = np.diff(self.starts)
        limit = np.minimum(sizes[left], sizes[left + 1])
        common = np.zeros(len(left), np.int64)
        active = np.flatnonzero(limit > 0)
        columns = np.arange(_STRIDE)
        last = len(self.data) - 1
        while len(active):
            at = common[active]
            first = np.minimum((self.starts[left[active]] + at)[:, None] + columns, last)
            second = np.minimum((self.starts[left[active] + 1] + at)[:, None] + columns, last)
            differs = self.data[first] != self.data[second]
            equal = np.where(differs.any(axis=1), differs.argmax(axis=1), _STRIDE)
            common[active] = np.minimum(at + equal, limit[active])
            active = active[(equal == _STRIDE) & (common[active] < limit[active])]
        return common

    def _whole_items(self, lcp: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if self.item_bytes:
            return lcp - lcp % self.item_bytes
        starts, ends = self.starts[:-2], self.starts[1:-1]
        while True:
            # A character was cut where the next byte of the left sequence goes on with one.
            inside = np.flatnonzero(starts + lcp < ends)
            ahead = self.data[(starts + lcp)[inside]]
            cut = inside[(ahead & _CONTINUATION_MASK) == _CONTINUATION]
            if not len(cut):
                return lcp
            lcp[cut] -= 1


def shared_prefixes(packed: PackedSequences, min_count: int, min_length: int) -> list[SharedPrefixNode]:
    """The prefixes shared by at least ``min_count`` sequences that no longer such prefix extends, over ``min_length``.

    Lengths are in items and must be above ``min_length``; the order is that of the sorted sequences. ``min_count`` is
    at least 2: what one sequence has is not shared.
    """
    if min_count < 2:
        raise InvalidInputError(f"a shared prefix needs at least 2 uses, not {min_count}", param="min_count")
    if len(packed) < min_count:
        return []
    lows = _window_minima(packed.lcp, min_count - 1)
    changes = np.flatnonzero(np.diff(lows)) + 1
    begins = np.concatenate(([0], changes))
    ends = np.concatenate((changes, [len(lows)]))
    depth = lows[begins]
    before = np.concatenate(([-1], depth[:-1]))
    after = np.concatenate((depth[1:], [-1]))
    # An item may span several bytes, never the other way round: the byte test is a safe first sieve.
    deepest = np.flatnonzero((depth > before) & (depth > after) & (depth > min_length))
    nodes = []
    for at in deepest.tolist():
        content = packed.prefix(int(begins[at]), int(depth[at]))
        length = packed.num_items(content)
        if length > min_length:
            nodes.append(SharedPrefixNode(length, int(ends[at] - begins[at]) + min_count - 1, content))
    return nodes


def _window_minima(values: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
    """The smallest of each ``width`` neighbouring values, by doubling the width covered."""
    lows, covered = values, 1
    while covered < width:
        step = min(covered, width - covered)
        lows = np.minimum(lows[: len(lows) - step], lows[step:])
        covered += step
    return lows
