"""Joins the layouts of two pools: which bytes of one become which bytes of the other. Pure arithmetic on integers.

A *cell* is one vector (K or V) of one layer and one head of one region in one rank's part of a block: its entries, one
after the other. A block is the same cells on every block (``core.layout``). Each cell of the target gets its bytes from
one cell of the source with the same region, layer, vector and head. So every rank that holds a repeated head gets its
own copy, and reads come from one rank of several. If the block sizes differ, a cell is cut into runs of tokens that lie
within one block on each side. Pieces are sorted by target and merged, so no two of them could be one; where a head is
repeated in the source, the copy is taken that leaves the fewest pieces.

The module knows neither memory addresses nor requests. Tokens move in whole units of ``unit_tokens``: the last block
of a sequence may be partly filled, and its rest moves with it. A state belongs to the end of a block, so blocks with
states need equal sizes.
"""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np

from kvrelay.core.layout import BlockRun, KVLayout, region_difference
from kvrelay.errors import IncompatiblePeerError, TransferError
from kvrelay.transfer.pieces import NO_PIECES, checked_block_ids, merge_pieces
from kvrelay.transfer.values import Int64Array, Pieces, TransferOp


class _Span(msgspec.Struct, frozen=True):
    """Runs of tokens, one entry each: the blocks that hold a run, its first token within them, its length."""

    local_ids: Int64Array
    remote_ids: Int64Array
    local_tokens: Int64Array
    remote_tokens: Int64Array
    num_tokens: Int64Array


class _Cells(msgspec.Struct, frozen=True):
    """Cells here and there: offsets within a worker's block. With equal block sizes ``pieces`` are adjacent cells
    merged, else single ones, whose entries of ``entry_bytes`` stand for ``entry_tokens`` each."""

    pieces: Pieces
    entry_tokens: Int64Array
    entry_bytes: Int64Array


class LayoutMapping:
    """Between one pair of pools: which pieces of one are which of the other. Immutable; safe from any thread."""

    def __init__(self, local: KVLayout, remote: KVLayout) -> None:
        """Raises IncompatiblePeerError, naming the difference, if the two layouts cannot be joined."""
        for side, layout in (("our", local), ("the peer's", remote)):
            if layout.flaw is not None:
                raise IncompatiblePeerError(f"{side} KV layout is impossible: {layout.flaw}")
        difference = region_difference(local.model, remote.model)
        if difference is None and local.has_states and local.block_size != remote.block_size:
            difference = (
                f"states lie at the ends of blocks: block_size is {remote.block_size} there, {local.block_size} here"
            )
        if difference is not None:
            raise IncompatiblePeerError(f"the KV layouts cannot be joined: {difference}")
        self.local = local
        self.remote = remote
        self._has_equal_blocks = local.block_size == remote.block_size
        self._known_cells: dict[TransferOp, _Cells] = {}
        self.unit_tokens = math.gcd(local.block_size, remote.block_size)

    def __repr__(self) -> str:
        return f"LayoutMapping({_name(self.local)} here, {_name(self.remote)} there)"

    @property
    def is_plain(self) -> bool:
        """Whether a block is one piece on both sides, with its bytes in the same order."""
        return self._has_equal_blocks and self._cells(TransferOp.WRITE).pieces.num_pieces == 1

    def pieces(
        self, op: TransferOp, local: BlockRun, remote: BlockRun, first_token: int = 0, end_token: int | None = None
    ) -> Pieces:
        """The tokens that both runs hold, of [first_token, end_token) if given; offsets in the workers' pools.

        A worker's pool is one memory over all its ranks. Raises TransferError for invalid block ids, and for limits
        that lie within a unit.
        """
        span = self._span(local, remote, first_token, end_token)
        return NO_PIECES if span is None else self._of_span(op, self._cells(op), span)

    # -- tokens -------------------------------------------------------------------------------------------------------

    def _span(self, local: BlockRun, remote: BlockRun, first_token: int, end_token: int | None) -> _Span | None:
        here, there = self.local.block_size, self.remote.block_size
        local_ids, remote_ids = checked_block_ids(local.block_ids), checked_block_ids(remote.block_ids)
        begin = max(first_token, local.first_block * here, remote.first_block * there)
        end = min((local.first_block + len(local_ids)) * here, (remote.first_block + len(remote_ids)) * there)
        if end_token is not None:
            end = min(end, end_token)
        if begin < 0 or begin % self.unit_tokens or (end > begin and end % self.unit_tokens):
            raise TransferError(f"tokens {begin} to {end} are not whole units of {self.unit_tokens} tokens")
        if end <= begin:
            return None
        cuts = np.concatenate([[begin], np.arange(begin - begin % here + here, end, here), [end]])
        if here != there:
            cuts = np.union1d(cuts, np.arange(begin - begin % there + there, end, there))
        starts = cuts[:-1].astype(np.int64)
        return _Span(
            local_ids[starts // here - local.first_block],
            remote_ids[starts // there - remote.first_block],
            starts % here,
            starts % there,
            np.diff(cuts).astype(np.int64),
        )

    # -- pieces -------------------------------------------------------------------------------------------------------

    def _of_span(self, op: TransferOp, cells: _Cells, span: _Span) -> Pieces:
        local = (span.local_ids * self.local.block_bytes)[:, None] + cells.pieces.local_offsets
        remote = (span.remote_ids * self.remote.block_bytes)[:, None] + cells.pieces.remote_offsets
        if self._has_equal_blocks:  # every run is a whole block
            lengths = np.broadcast_to(cells.pieces.lengths, local.shape)
        else:
            local += span.local_tokens[:, None] // cells.entry_tokens * cells.entry_bytes
            remote += span.remote_tokens[:, None] // cells.entry_tokens * cells.entry_bytes
            lengths = span.num_tokens[:, None] // cells.entry_tokens * cells.entry_bytes
        return _merged(op, local.ravel(), remote.ravel(), lengths.ravel())

    def _cells(self, op: TransferOp) -> _Cells:
        if op not in self._known_cells:
            local, remote, regions = self._pairs(op)
            size, cuts = self.local.block_size, self.local.regions
            lengths = np.array([cut.cell_bytes(size) for cut in cuts], dtype=np.int64)[regions]
            pieces = _merged(op, local, remote, lengths) if self._has_equal_blocks else Pieces(local, remote, lengths)
            entries = np.array([(cut.region.entry_tokens, cut.region.entry_bytes) for cut in cuts], dtype=np.int64)
            self._known_cells[op] = _Cells(pieces, entries[regions, 0], entries[regions, 1])
        return self._known_cells[op]

    def _pairs(self, op: TransferOp) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Offsets of cells here and there within a worker's block, and their regions' numbers, pair by pair."""
        is_write = op is TransferOp.WRITE
        source, target = (self.local, self.remote) if is_write else (self.remote, self.local)
        paired = [_paired(source, target, number) for number in range(len(source.regions))]
        sources, targets = (np.concatenate([pair[side] for pair in paired]) for side in range(2))
        regions = np.repeat(np.arange(len(paired)), [len(pair[0]) for pair in paired])
        return (sources, targets, regions) if is_write else (targets, sources, regions)


def _cell_offsets(layout: KVLayout, number: int) -> Int64Array:
    """Byte offset of each cell of region ``number`` in a worker's block, [layer, vector, slot]."""
    cut = layout.regions[number]
    cell_bytes = cut.cell_bytes(layout.block_size)
    offsets = np.empty((cut.region.num_layers, cut.region.num_vectors, cut.num_slots), dtype=np.int64)
    for part in layout.parts(number):
        shape = part.shape[:3]
        offsets[part.layers, :, part.slots] = part.offset + cell_bytes * np.arange(math.prod(shape)).reshape(shape)
    return offsets


def _paired(source: KVLayout, target: KVLayout, number: int) -> tuple[Int64Array, Int64Array]:
    """For each cell of the target, in the order of its memory, the cell of the source that fills it: their offsets.

    Only a head that the source holds repeatedly leaves a choice.
    """
    ours, theirs = source.regions[number], target.regions[number]
    slots = np.arange(theirs.num_slots)
    if ours.head_replicas == theirs.head_replicas and source.tp_size == target.tp_size:
        candidates = slots[:, None]
    else:
        candidates = (slots // theirs.head_replicas * ours.head_replicas)[:, None] + np.arange(ours.head_replicas)
    targets = _cell_offsets(target, number).ravel()
    order = np.argsort(targets)
    sources = _cell_offsets(source, number)[:, :, candidates].reshape(len(targets), -1)[order]
    return _fewest_breaks(sources, ours.cell_bytes(source.block_size)), targets[order]


def _fewest_breaks(candidates: Int64Array, cell_bytes: int) -> Int64Array:
    """One of each row's candidates, so that as many as possible follow the one chosen in the row before."""
    if candidates.shape[1] == 1:
        return candidates[:, 0]
    joins = np.zeros(candidates.shape[1], dtype=np.int64)  # the most joins so far, by the candidate that is taken
    came_from = []
    for before, now in itertools.pairwise(candidates):
        totals = joins[:, None] + (now[None, :] == before[:, None] + cell_bytes)
        came_from.append(totals.argmax(axis=0))
        joins = totals.max(axis=0)
    taken = [int(joins.argmax())]
    for previous in reversed(came_from):
        taken.append(int(previous[taken[-1]]))
    return candidates[np.arange(len(candidates)), taken[::-1]]


def _merged(op: TransferOp, local: Int64Array, remote: Int64Array, lengths: Int64Array) -> Pieces:
    """Sorted by target, whose pieces never overlap, so that pieces which can be one follow each other."""
    order = np.argsort(remote if op is TransferOp.WRITE else local, kind="stable")
    return merge_pieces(local[order], remote[order], lengths[order])


def _name(layout: KVLayout) -> str:
    return f"tp {layout.tp_size} pp {layout.pp_size} block {layout.block_size}"
