"""Which ranks move which bytes: pieces between two workers' pools, cut by (our rank, the peer's rank). Pure.

Pieces name offsets in a worker's *joined* pool, where a block is its ranks' parts side by side (``core.layout``). Each
rank has registered memory of its own, in which its part of block b begins at ``begin + b * stride``:

    joined pool            [ block 0: rank 0 | rank 1 ][ block 1: rank 0 | rank 1 ]
    memory of rank 1       [ block 0 | block 1 ]                                     begin 0, stride: a part (a GPU)
                           the joined pool itself                                    begin: of its part, stride: a block

A worker whose KV one process moves is one rank, which has the joined pool.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from kvrelay.config import WorkerRole
from kvrelay.core.layout import KVLayout
from kvrelay.core.window import MemoryWindow
from kvrelay.errors import ConfigError
from kvrelay.transfer.pieces import merge_pieces
from kvrelay.transfer.rank_map import InstanceSizes, place_rank
from kvrelay.transfer.ranks.messages import RankMemory
from kvrelay.transfer.values import Int64Array, Pieces


class RankCut(msgspec.Struct, frozen=True):
    """One worker's joined pool and its ranks' memories."""

    block_bytes: int
    offsets: Int64Array
    """Where each rank's part of a block begins, ascending, in the joined pool."""
    begins: Int64Array
    strides: Int64Array
    tp: int
    pp: int

    @classmethod
    def of(cls, layout: KVLayout | None, memories: Sequence[RankMemory]) -> RankCut | None:
        """None: one rank has the joined pool. Raises ValueError unless each rank of the layout has a memory."""
        if len(memories) == 1:
            return None
        if layout is None or len(memories) != layout.num_ranks:
            raise ValueError(f"{len(memories)} memories are not those of the ranks that its layout has")
        return cls(
            layout.block_bytes,
            np.array(layout.rank_offsets, dtype=np.int64),
            np.array([each.begin for each in memories], dtype=np.int64),
            np.array([each.stride for each in memories], dtype=np.int64),
            layout.tp_size,
            layout.pp_size,
        )

    def windows(self, window: MemoryWindow) -> list[MemoryWindow]:
        """A window onto the joined pool as windows onto each rank's memory."""
        sizes = np.diff(self.offsets, append=self.block_bytes)
        places = zip(sizes.tolist(), self.strides.tolist(), self.begins.tolist(), strict=True)
        return [replace(window, block_bytes=size, stride=stride, begin=begin) for size, stride, begin in places]

    def cut(self, offsets: Int64Array, lengths: Int64Array) -> _Parts:
        """Runs of bytes of the joined pool, cut where a rank's part ends."""
        first, last = self._number(offsets), self._number(offsets + lengths - 1)
        counts = last - first + 1
        source = np.repeat(np.arange(len(offsets)), counts)
        numbers = first[source] + np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = np.maximum(offsets[source], self._begin(numbers))
        ends = np.minimum((offsets + lengths)[source], self._begin(numbers + 1))
        blocks, ranks = np.divmod(numbers, len(self.offsets))
        own = self.begins[ranks] + blocks * self.strides[ranks] + begins - self._begin(numbers)
        return _Parts(source, begins - offsets[source], ends - begins, ranks, own)

    def _number(self, offsets: Int64Array) -> Int64Array:
        """Of the part that holds each offset, counted over all blocks and ranks."""
        blocks, within = np.divmod(offsets, self.block_bytes)
        return blocks * len(self.offsets) + np.searchsorted(self.offsets, within, side="right") - 1

    def _begin(self, numbers: Int64Array) -> Int64Array:
        blocks, ranks = np.divmod(numbers, len(self.offsets))
        return blocks * self.block_bytes + self.offsets[ranks]


class _Parts(msgspec.Struct, frozen=True):
    """What ``cut`` has made of some runs: of which run each part is and where it begins there, its length, its rank,
    and its offset in that rank's memory."""

    source: Int64Array
    shifts: Int64Array
    lengths: Int64Array
    ranks: Int64Array
    own: Int64Array


class RankPieces(msgspec.Struct, frozen=True):
    """What our rank ``local`` exchanges with the peer's rank ``remote``; offsets are in the memories of the two."""

    local: int
    remote: int
    pieces: Pieces


def split(pieces: Pieces, local: RankCut | None, remote: RankCut | None) -> list[RankPieces]:
    """The same bytes by pair of ranks. Pieces that are adjacent in the memories of both ranks are one again."""
    if (local is None and remote is None) or not pieces.num_pieces:
        return [RankPieces(0, 0, pieces)] if pieces.num_pieces else []
    here, there, lengths = pieces.local_offsets, pieces.remote_offsets, pieces.lengths
    our_ranks = their_ranks = np.zeros(len(lengths), dtype=np.int64)
    if local is not None:
        parts = local.cut(here, lengths)
        here, there, lengths, our_ranks = parts.own, there[parts.source] + parts.shifts, parts.lengths, parts.ranks
    if remote is not None:
        parts = remote.cut(there, lengths)
        here, our_ranks = here[parts.source] + parts.shifts, our_ranks[parts.source] if local else parts.ranks * 0
        there, lengths, their_ranks = parts.own, parts.lengths, parts.ranks
    else:
        their_ranks = np.zeros(len(lengths), dtype=np.int64)
    order = np.lexsort((their_ranks, our_ranks))
    pairs = np.stack((our_ranks[order], their_ranks[order]))
    starts = np.flatnonzero(np.concatenate(([True], (np.diff(pairs) != 0).any(axis=0))))
    return [
        RankPieces(int(pairs[0, begin]), int(pairs[1, begin]), merge_pieces(here[at], there[at], lengths[at]))
        for begin, at in zip(starts.tolist(), np.split(order, starts[1:]), strict=True)
    ]


def rank_pairs(local: RankCut | None, remote: RankCut | None) -> list[tuple[int, int]]:
    """(our rank, the peer's rank) of those that connect at first contact: the groups of the rank map. Every rank with
    the one process that moves a worker's whole KV; none for degrees that the map does not know."""
    if local is None or remote is None:
        ours, theirs = (1 if cut is None else len(cut.offsets) for cut in (local, remote))
        return list(itertools.product(range(ours), range(theirs)))
    sizes = [InstanceSizes(1, cut.tp, cut.pp) for cut in (local, remote)]
    try:
        groups = [
            [place_rank(sizes[0], sizes[1], role, number, rank).group for rank in range(sizes[number].num_ranks)]
            for number, role in enumerate((WorkerRole.PREFILL, WorkerRole.DECODE))
        ]
    except ConfigError:
        return []
    ranks = itertools.product(enumerate(groups[0]), enumerate(groups[1]))
    return [(here, there) for (here, ours), (there, theirs) in ranks if ours == theirs]
