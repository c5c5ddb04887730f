"""Which bytes go where: block ids and layouts in, a TransferPlan out. Pure arithmetic on integers.

This module maps blocks between two pools and merges adjacent pieces. It does not know memory addresses, connections or
requests. The number of pieces, not the bandwidth, makes transfers slow, so pieces that are adjacent on both sides
become one.

    equal layouts                              local ids   4  5  6  9        one piece of three blocks,
    one piece per run of adjacent blocks       remote ids  0  1  2  7        one piece of one block

    unequal layouts: a pool cell is            [block][layer][K or V][head][token][head_dim]
    one piece per (token run, layer, K/V, head); a token run lies within one block on each side. Then pieces are merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.core.layout import DTYPE_BYTES, KVLayout
from kvrelay.errors import IncompatiblePeerError, TransferError
from kvrelay.transfer.base import Int64Array, TransferPlan

MAX_BLOCK_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PoolShard:
    """The part of the model in one rank's pool: its layout, and the positions of its first layer and KV head.

    ``layout.num_layers`` layers from ``first_layer`` (pipeline parallelism cuts layers) and ``layout.num_kv_heads``
    heads from ``first_head`` (tensor parallelism cuts heads; ranks may share a head when there are more ranks).
    """

    layout: KVLayout
    first_layer: int = 0
    first_head: int = 0


EMPTY_PLAN = TransferPlan(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))
"""Moves nothing. Posted with a notification, it only delivers the notification."""


def plan_blocks(layout: KVLayout, local_block_ids: Sequence[int], remote_block_ids: Sequence[int]) -> TransferPlan:
    """Local block i to or from remote block i, whole blocks, both pools of ``layout``.

    One piece per run of blocks that are adjacent on both sides, listed in any order. Raises TransferError for lists of
    different lengths and for invalid ids.
    """
    local, remote = checked_block_ids(local_block_ids), checked_block_ids(remote_block_ids)
    if len(local) != len(remote):
        raise TransferError(f"{len(local)} local blocks do not pair with {len(remote)} remote blocks")
    if len(local) == 0:
        return EMPTY_PLAN
    block_bytes = layout.block_bytes
    if not _ascends(local):
        # A pool that allocates its free list backwards also gives runs, only in descending order.
        order = np.argsort(local, kind="stable")
        local, remote = local[order], remote[order]
    starts = np.flatnonzero(np.concatenate(([True], (np.diff(local) != 1) | (np.diff(remote) != 1))))
    num_blocks = np.diff(np.concatenate((starts, [len(local)])))
    return TransferPlan(local[starts] * block_bytes, remote[starts] * block_bytes, num_blocks * block_bytes)


def plan_transfer(
    local: PoolShard,
    remote: PoolShard,
    local_block_ids: Sequence[int],
    remote_block_ids: Sequence[int],
    *,
    first_token: int,
    num_tokens: int,
) -> TransferPlan:
    """The cells that both shards hold of tokens [first_token, first_token + num_tokens) of one sequence.

    ``*_block_ids`` are the sequence's block tables on the two sides: block i of a side holds that side's tokens
    [i * block_size, (i + 1) * block_size). TP degrees, PP cuts and block sizes may differ; shards without a common
    layer or head give an empty plan. Raises TransferError if a table is too short, IncompatiblePeerError if dtype or
    head size differ.
    """
    if local.layout.dtype != remote.layout.dtype or local.layout.head_dim != remote.layout.head_dim:
        raise IncompatiblePeerError("the pools differ in dtype or head size")
    local_ids, remote_ids = checked_block_ids(local_block_ids), checked_block_ids(remote_block_ids)
    if first_token < 0 or num_tokens < 0:
        raise TransferError(f"invalid token range: {num_tokens} tokens from {first_token} on")
    end = first_token + num_tokens
    for ids, shard, side in ((local_ids, local, "local"), (remote_ids, remote, "remote")):
        if len(ids) * shard.layout.block_size < end:
            raise TransferError(f"{len(ids)} {side} blocks do not hold {end} tokens")
    layers = _common(local.first_layer, local.layout.num_layers, remote.first_layer, remote.layout.num_layers)
    heads = _common(local.first_head, local.layout.num_kv_heads, remote.first_head, remote.layout.num_kv_heads)
    if not len(layers) or not len(heads) or num_tokens == 0:
        return EMPTY_PLAN
    run_starts, run_lengths = _token_runs(first_token, end, local.layout.block_size, remote.layout.block_size)
    token_bytes = local.layout.head_dim * DTYPE_BYTES[local.layout.dtype]
    lengths = np.broadcast_to(
        (run_lengths * token_bytes)[:, None, None, None], (len(run_starts), len(layers), 2, len(heads))
    ).ravel()
    return merge_pieces(
        _cell_offsets(local, local_ids, run_starts, layers, heads),
        _cell_offsets(remote, remote_ids, run_starts, layers, heads),
        lengths,
    )


def merge_pieces(local_offsets: Int64Array, remote_offsets: Int64Array, lengths: Int64Array) -> TransferPlan:
    """Join each piece to the one before it if both sides continue where that one ended."""
    if len(lengths) == 0:
        return EMPTY_PLAN
    breaks = (local_offsets[1:] != local_offsets[:-1] + lengths[:-1]) | (
        remote_offsets[1:] != remote_offsets[:-1] + lengths[:-1]
    )
    starts = np.flatnonzero(np.concatenate(([True], breaks)))
    return TransferPlan(local_offsets[starts], remote_offsets[starts], np.add.reduceat(lengths, starts))


def split_plan(plan: TransferPlan, max_bytes: int) -> Iterator[TransferPlan]:
    """The same pieces in plans of at most ``max_bytes`` each; longer pieces are cut."""
    if plan.num_bytes <= max_bytes:
        yield plan
        return
    cuts = -(-plan.lengths // max_bytes)
    index = np.repeat(np.arange(plan.num_pieces), cuts)
    step = np.arange(len(index)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    shift = step * max_bytes
    lengths = np.minimum(plan.lengths[index] - shift, max_bytes)
    local, remote = plan.local_offsets[index] + shift, plan.remote_offsets[index] + shift
    begin = 0
    ends = np.cumsum(lengths)
    while begin < len(lengths):
        base = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, base + max_bytes, side="right")))
        yield TransferPlan(local[begin:end], remote[begin:end], lengths[begin:end])
        begin = end


def check_bounds(plan: TransferPlan, local_bytes: int, remote_bytes: int, peer: str) -> None:
    """Raise TransferError unless every piece lies within both pools (sizes in bytes)."""
    if not len(plan.lengths) == len(plan.local_offsets) == len(plan.remote_offsets):
        raise TransferError("a plan's arrays differ in length", peer=peer)
    if plan.num_pieces == 0:
        return
    if int(plan.lengths.min()) <= 0:
        raise TransferError("a plan holds a piece whose length is not positive", peer=peer)
    for offsets, limit, side in (
        (plan.local_offsets, local_bytes, "the local"),
        (plan.remote_offsets, remote_bytes, f"worker {peer}'s"),
    ):
        # limit - length cannot overflow, offset + length could.
        if bool(((offsets < 0) | (offsets > limit - plan.lengths)).any()):
            raise TransferError(f"a transfer with worker {peer} would leave {side} KV pool", peer=peer)


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


def _common(first_a: int, num_a: int, first_b: int, num_b: int) -> Int64Array:
    """Indices, counted in the whole model, that lie in both ranges."""
    return np.arange(max(first_a, first_b), min(first_a + num_a, first_b + num_b), dtype=np.int64)


def _token_runs(start: int, end: int, block_a: int, block_b: int) -> tuple[Int64Array, Int64Array]:
    """[start, end) cut at the block borders of both sides: first tokens and lengths."""
    borders = np.union1d(
        np.arange(start // block_a * block_a, end, block_a), np.arange(start // block_b * block_b, end, block_b)
    )
    cuts = np.concatenate(([start], borders[borders > start], [end])).astype(np.int64)
    return cuts[:-1], np.diff(cuts)


def _cell_offsets(
    shard: PoolShard, block_ids: Int64Array, run_starts: Int64Array, layers: Int64Array, heads: Int64Array
) -> Int64Array:
    """Byte offset of each (run, layer, K/V, head), run-major, in a pool ``[block, layer, 2, head, token, dim]``."""
    layout = shard.layout
    token_bytes = layout.head_dim * DTYPE_BYTES[layout.dtype]
    head_bytes = layout.block_size * token_bytes
    kv_bytes = layout.num_kv_heads * head_bytes
    runs = (
        block_ids[run_starts // layout.block_size] * layout.block_bytes + run_starts % layout.block_size * token_bytes
    )
    return np.asarray(
        runs[:, None, None, None]
        + ((layers - shard.first_layer) * 2 * kv_bytes)[None, :, None, None]
        + (np.arange(2, dtype=np.int64) * kv_bytes)[None, None, :, None]
        + ((heads - shard.first_head) * head_bytes)[None, None, None, :]
    ).ravel()
