"""Joins the layouts of two pools: which bytes of one become which bytes of the other. Pure arithmetic on integers.

A *cell* is K or V of one layer and one head in one rank's part of a block; a block is the same cells on every block:

    block of tp 2, pp 2 =  [ stage 0: rank 0 | rank 1 ][ stage 1: rank 0 | rank 1 ]
    rank's part         =  [ layer ][ K | V ][ head ][ token ][ head_dim ]            a cell is the last two

Each cell of the target gets its bytes from one cell of the source with the same layer and head. So every rank that
holds a repeated head gets its own copy, and reads come from one rank of several. If the block sizes differ, a cell is
cut into runs of tokens that lie within one block on each side. Pieces are sorted by target and merged, so no two of
them could be one; where a head is repeated in the source, the copy is taken that leaves the fewest pieces.

The module knows neither memory addresses nor requests. Tokens move in whole units of ``unit_tokens``: the last block of
a sequence may be partly filled, and its rest moves with it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from kvrelay.core.layout import BlockRun, KVLayout
from kvrelay.errors import IncompatiblePeerError, TransferError
from kvrelay.transfer.pieces import NO_PIECES, checked_block_ids, merge_pieces
from kvrelay.transfer.values import Int64Array, Pieces, TransferOp


@dataclass(frozen=True, slots=True)
class _Span:
    """Runs of tokens, one entry each: the blocks that hold a run, its first token within them, its length."""

    local_ids: Int64Array
    remote_ids: Int64Array
    local_tokens: Int64Array
    remote_tokens: Int64Array
    num_tokens: Int64Array


class LayoutMapping:
    """Between one pair of pools: which pieces of one are which of the other. Immutable; safe from any thread."""

    def __init__(self, local: KVLayout, remote: KVLayout) -> None:
        """Raises IncompatiblePeerError, naming the difference, if the two layouts cannot be joined."""
        for side, layout in (("our", local), ("the peer's", remote)):
            if layout.flaw is not None:
                raise IncompatiblePeerError(f"{side} KV layout is impossible: {layout.flaw}")
        for name, ours, theirs in (
            ("layers", local.num_layers, remote.num_layers),
            ("KV heads", local.num_model_heads, remote.num_model_heads),
            ("values per head", local.head_dim, remote.head_dim),
            ("dtype", local.dtype, remote.dtype),
        ):
            if ours != theirs:
                raise IncompatiblePeerError(f"the KV layouts cannot be joined: {name}: {theirs} there, {ours} here")
        self.local = local
        self.remote = remote
        self._has_equal_blocks = local.block_size == remote.block_size
        self._known_cells: dict[TransferOp, Pieces] = {}
        self.unit_tokens = math.gcd(local.block_size, remote.block_size)

    def __repr__(self) -> str:
        return f"LayoutMapping({_name(self.local)} here, {_name(self.remote)} there)"

    @property
    def is_plain(self) -> bool:
        """Whether a block is one piece on both sides, with its bytes in the same order."""
        return self._has_equal_blocks and self._cells(TransferOp.WRITE).num_pieces == 1

    def pieces(
        self, op: TransferOp, local: BlockRun, remote: BlockRun, first_token: int = 0, end_token: int | None = None
    ) -> Pieces:
        """The tokens that both runs hold, of [first_token, end_token) if given; offsets in the workers' pools.

        A worker's pool is one memory over all its ranks. Raises TransferError for invalid block ids, and for limits
        that lie within a unit.
        """
        span = self._span(local, remote, first_token, end_token)
        return NO_PIECES if span is None else self._of_span(op, self._cells(op), span)

    def rank_pairs(self, op: TransferOp) -> tuple[tuple[int, int], ...]:
        """(local rank, remote rank) of those that exchange anything. Equal ranks alone if TP and PP are equal."""
        local, remote = self._pairs(op)
        pairs = np.stack([local // self.local.of_rank.block_bytes, remote // self.remote.of_rank.block_bytes], axis=-1)
        return tuple((a, b) for a, b in np.unique(pairs, axis=0).tolist())

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
        cuts = np.unique(np.concatenate([[begin, end], np.arange(begin - begin % here + here, end, here)]))
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

    def _of_span(self, op: TransferOp, cells: Pieces, span: _Span) -> Pieces:
        token_bytes = self.local.token_head_bytes
        local = (span.local_ids * self.local.block_bytes + span.local_tokens * token_bytes)[
            :, None
        ] + cells.local_offsets
        remote = (span.remote_ids * self.remote.block_bytes + span.remote_tokens * token_bytes)[
            :, None
        ] + cells.remote_offsets
        # With equal block sizes every run is a whole block, with others it lies within one cell.
        lengths = cells.lengths if self._has_equal_blocks else (span.num_tokens * token_bytes)[:, None]
        return _merged(op, local.ravel(), remote.ravel(), np.broadcast_to(lengths, local.shape).ravel())

    def _cells(self, op: TransferOp) -> Pieces:
        """Whole cells here and there: offsets within a worker's block. With equal block sizes adjacent cells are merged
        already."""
        if op not in self._known_cells:
            local, remote = self._pairs(op)
            lengths = np.full(len(local), self.local.block_size * self.local.token_head_bytes, dtype=np.int64)
            cells = _merged(op, local, remote, lengths) if self._has_equal_blocks else Pieces(local, remote, lengths)
            self._known_cells[op] = cells
        return self._known_cells[op]

    def _pairs(self, op: TransferOp) -> tuple[Int64Array, Int64Array]:
        """Offsets of cells here and there within a worker's block, pair by pair."""
        if op is TransferOp.WRITE:
            return _paired(self.local, self.remote)
        there, here = _paired(self.remote, self.local)
        return here, there


def _cell_offsets(layout: KVLayout) -> Int64Array:
    """Byte offset of each cell in a worker's block, [layer, K or V, slot]."""
    part = layout.of_rank
    cell_bytes = layout.block_size * layout.token_head_bytes
    layer, kv, slot = np.ogrid[: layout.num_layers, :2, : layout.num_kv_heads]
    rank = layer // part.num_layers * layout.tp_size + slot // part.num_kv_heads
    within = (layer % part.num_layers * 2 + kv) * part.num_kv_heads + slot % part.num_kv_heads
    return np.asarray(rank * part.block_bytes + within * cell_bytes, dtype=np.int64)


def _paired(source: KVLayout, target: KVLayout) -> tuple[Int64Array, Int64Array]:
    """For each cell of the target, in the order of its memory, the cell of the source that fills it: their offsets.

    Only a head that the source holds repeatedly leaves a choice.
    """
    slots = np.arange(target.num_kv_heads)
    if source.tp_size == target.tp_size:
        candidates = slots[:, None]
    else:
        candidates = (slots // target.head_replicas * source.head_replicas)[:, None] + np.arange(source.head_replicas)
    targets = _cell_offsets(target).ravel()
    order = np.argsort(targets)
    sources = _cell_offsets(source)[:, :, candidates].reshape(len(targets), -1)[order]
    return _fewest_breaks(sources, source.block_size * source.token_head_bytes), targets[order]


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
