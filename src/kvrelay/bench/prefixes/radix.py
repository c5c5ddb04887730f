"""The compressed radix tree over many sequences, stored as a sorted list, and the shared prefixes in it.

A radix tree whose nodes count the sequences that pass through them is, node by node, the sorted list of sequences with
the lengths of the common prefixes (LCP) of neighbours: a node of depth d with count c is a longest run of c neighbours
that share d items.

    sorted        LCP     windows of N = 3: smallest LCP inside
    "abc one"      -      [0..2] 4   <- a run of equal windows whose neighbours are both smaller:
    "abc two"      4      [1..3] 4   <- the deepest node that still has N sequences below it ("abc ", 4 of them)
    "abc two"      7      [2..4] 0
    "abc zero"     4      [3..5] 0
    "x"            0
    "y"            0

Descend while a child has at least N sequences; the nodes where that ends are the shared prefixes. In the columns these
are the strict local maxima of the window minima.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from kvrelay.errors import InvalidInputError

_CONTINUATION_MASK, _CONTINUATION = 0xC0, 0x80
_PROGRESS_EVERY = 1 << 14

Progress = Callable[[float], None]


class SharedPrefixNode(msgspec.Struct, frozen=True):
    """A prefix that ``count`` sequences share, ``length`` items long; ``content`` is its bytes."""

    length: int
    count: int
    content: bytes


class PackedSequences:
    """Sequences as bytes in sorted order, with the LCP of neighbours in bytes, cut to whole items.

    ``item_bytes`` is the width of an item (big-endian, so that byte order is item order); 0 means UTF-8 text, whose
    items are characters. ``lcp[i]`` is that of sequences i and i + 1.
    """

    def __init__(self, sequences: Iterable[bytes], item_bytes: int = 0, progress: Progress = lambda _: None) -> None:
        self.ordered = sorted(sequences)
        if not self.ordered:
            raise InvalidInputError("no conversations: nothing to measure")
        self.item_bytes = item_bytes
        self.lcp: npt.NDArray[np.int64] = np.zeros(len(self) - 1, np.int64)
        for at, pair in enumerate(pairwise(self.ordered)):
            self.lcp[at] = self._common(*pair)
            if at % _PROGRESS_EVERY == 0:
                progress(at / len(self))

    def __len__(self) -> int:
        return len(self.ordered)

    def num_items(self, content: bytes) -> int:
        """The number of characters or items in the bytes."""
        return len(content) // self.item_bytes if self.item_bytes else len(content.decode("utf-8", "surrogatepass"))

    def _common(self, left: bytes, right: bytes) -> int:
        size = min(len(left), len(right))
        # As big-endian numbers they differ from their highest different byte on.
        differing = int.from_bytes(left[:size], "big") ^ int.from_bytes(right[:size], "big")
        common = size - (differing.bit_length() + 7) // 8
        if self.item_bytes:
            return common - common % self.item_bytes
        while common < len(left) and left[common] & _CONTINUATION_MASK == _CONTINUATION:
            common -= 1
        return common


def shared_prefixes(packed: PackedSequences, min_count: int, min_length: int) -> list[SharedPrefixNode]:
    """The longest prefixes that at least ``min_count`` sequences share, if longer than ``min_length``.

    Lengths are in items and must be above ``min_length``; the order is that of the sorted sequences. ``min_count`` is
    at least 2: the prefix of one sequence is not shared.
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
    # An item spans one or more bytes, so the test on bytes is a safe first filter.
    deepest = np.flatnonzero((depth > before) & (depth > after) & (depth > min_length))
    nodes = []
    for at in deepest.tolist():
        content = packed.ordered[int(begins[at])][: int(depth[at])]
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
