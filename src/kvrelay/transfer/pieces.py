"""Pieces of memory to move: between equal layouts, merged, cut and checked. Pure arithmetic on integers.

This module does not know memory addresses, connections or requests. The number of pieces, not the bandwidth, makes
transfers slow, so pieces that are adjacent on both sides become one. ``transfer.layout_mapping`` joins unequal layouts.

    equal layouts                              local ids   4  5  6  9        one piece of three blocks,
    one piece per run of adjacent blocks       remote ids  0  1  2  7        one piece of one block
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvrelay.core.layout import KVLayout
from kvrelay.errors import TransferError
from kvrelay.transfer.values import Int64Array, Pieces

MAX_BLOCK_ID = 2**31 - 1
MAX_NOTIFY_BYTES = 1 << 20

NO_PIECES = Pieces(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))
"""Moves nothing. Posted with a notification, it only delivers the notification."""


def block_pieces(layout: KVLayout, local_block_ids: Sequence[int], remote_block_ids: Sequence[int]) -> Pieces:
    """Local block i to or from remote block i, whole blocks, both pools of ``layout``.

    One piece per run of blocks that are adjacent on both sides, listed in any order. Raises TransferError for lists of
    different lengths and for invalid ids.
    """
    local, remote = checked_block_ids(local_block_ids), checked_block_ids(remote_block_ids)
    if len(local) != len(remote):
        raise TransferError(f"{len(local)} local blocks do not pair with {len(remote)} remote blocks")
    if len(local) == 0:
        return NO_PIECES
    block_bytes = layout.block_bytes
    if not _ascends(local):
        # A pool that allocates its free list backwards also gives runs, only in descending order.
        order = np.argsort(local, kind="stable")
        local, remote = local[order], remote[order]
    starts = np.flatnonzero(np.concatenate(([True], (np.diff(local) != 1) | (np.diff(remote) != 1))))
    num_blocks = np.diff(np.concatenate((starts, [len(local)])))
    return Pieces(local[starts] * block_bytes, remote[starts] * block_bytes, num_blocks * block_bytes)


def merge_pieces(local_offsets: Int64Array, remote_offsets: Int64Array, lengths: Int64Array) -> Pieces:
    """Join each piece to the one before it if both sides continue where that one ended."""
    if len(lengths) == 0:
        return NO_PIECES
    breaks = (local_offsets[1:] != local_offsets[:-1] + lengths[:-1]) | (
        remote_offsets[1:] != remote_offsets[:-1] + lengths[:-1]
    )
    starts = np.flatnonzero(np.concatenate(([True], breaks)))
    return Pieces(local_offsets[starts], remote_offsets[starts], np.add.reduceat(lengths, starts))


def split_pieces(pieces: Pieces, max_bytes: int) -> Iterator[Pieces]:
    """The same pieces in parts of at most ``max_bytes`` each; longer pieces are cut."""
    if pieces.num_bytes <= max_bytes:
        yield pieces
        return
    cuts = -(-pieces.lengths // max_bytes)
    index = np.repeat(np.arange(pieces.num_pieces), cuts)
    step = np.arange(len(index)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    shift = step * max_bytes
    lengths = np.minimum(pieces.lengths[index] - shift, max_bytes)
    local, remote = pieces.local_offsets[index] + shift, pieces.remote_offsets[index] + shift
    begin = 0
    ends = np.cumsum(lengths)
    while begin < len(lengths):
        base = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, base + max_bytes, side="right")))
        yield Pieces(local[begin:end], remote[begin:end], lengths[begin:end])
        begin = end


def check_bounds(pieces: Pieces, local_bytes: int, remote_bytes: int, peer: str) -> None:
    """Raise TransferError unless every piece lies within both pools (sizes in bytes)."""
    if not len(pieces.lengths) == len(pieces.local_offsets) == len(pieces.remote_offsets):
        raise TransferError("the pieces' arrays differ in length", peer=peer)
    if pieces.num_pieces == 0:
        return
    if int(pieces.lengths.min()) <= 0:
        raise TransferError("there is a piece whose length is not positive", peer=peer)
    for offsets, limit, side in (
        (pieces.local_offsets, local_bytes, "the local"),
        (pieces.remote_offsets, remote_bytes, f"worker {peer}'s"),
    ):
        # limit - length cannot overflow, offset + length could.
        if bool(((offsets < 0) | (offsets > limit - pieces.lengths)).any()):
            raise TransferError(f"a transfer with worker {peer} would leave {side} KV pool", peer=peer)


def check_post(pieces: Pieces, local_bytes: int, remote_bytes: int, peer: str, notify: bytes | None) -> None:
    """What every transport checks before it moves a byte: ``check_bounds``, and that a notification is not too long.

    Raises TransferError.
    """
    check_bounds(pieces, local_bytes, remote_bytes, peer)
    if notify is not None and len(notify) > MAX_NOTIFY_BYTES:
        raise TransferError(f"a notification of {len(notify)} bytes is too long", peer=peer)


def checked_block_ids(ids: Sequence[int]) -> Int64Array:
    """Block ids as an array. Raises TransferError for ids outside 0..MAX_BLOCK_ID."""
    try:
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
    except (OverflowError, ValueError, TypeError) as exc:
        raise TransferError("a block id is not a 64-bit integer") from exc
    if len(array) and (int(array.min()) < 0 or int(array.max()) > MAX_BLOCK_ID):
        raise TransferError(f"a block id lies outside 0..{MAX_BLOCK_ID}")
    return array


def _ascends(ids: Int64Array) -> bool:
    return bool((np.diff(ids) > 0).all())
