"""Checksums of KV blocks: does a block hold, after its transfer, the values that were sent?

Two workers may cut their KV differently: by TP, PP and block size. So a checksum covers a *unit* of tokens in the one
order that all share: ``[layer, K or V, head of the model, token, head_dim]``. A block of 16 tokens on one rank is that
already; others are copied into it first.

Pure functions. The worker decides when to compute them and what to do about a difference. xxh3-64 finds accidents (a
bad cable, a bad driver, a write to the wrong place), not forgeries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvrelay.core.layout import KVLayout


def block_checksum(block: npt.NDArray[np.uint8]) -> int:
    """xxh3-64, seed 0, over a block's bytes; ``block`` is contiguous, [block_bytes] uint8, and is not copied."""
    return int(xxhash.xxh3_64_intdigest(block.data))


MAX_UNIT_TOKENS = 16
_ALL_BITS = 2**64 - 1


def unit_tokens(block_size: int) -> int:
    """Tokens that one checksum covers. Equal for all block sizes that 16 divides, so that these can be compared."""
    return math.gcd(block_size, MAX_UNIT_TOKENS)


def unit_checksums(block: npt.NDArray[np.uint8], layout: KVLayout) -> tuple[int, ...]:
    """Of each unit of tokens, in order; ``block`` is contiguous, [block_bytes] uint8.

    If ranks hold copies of a head and the copies differ, the checksum is one that no sound block has.
    """
    unit = unit_tokens(layout.block_size)
    if layout.is_whole and unit == layout.block_size:
        return (block_checksum(block),)
    part, num_units, run_bytes = layout.of_rank, layout.block_size // unit, unit * layout.token_head_bytes
    cells = block.reshape(layout.pp_size, layout.tp_size, part.num_layers, 2, part.num_kv_heads, num_units, run_bytes)
    # Stages next to layers, ranks next to heads, copies of a head last.
    shape = layout.num_layers, 2, layout.num_model_heads, layout.head_replicas, run_bytes
    ordered = cells.transpose(5, 0, 2, 3, 1, 4, 6).reshape(num_units, *shape)
    return tuple(_checksum_of_copies(each) for each in ordered)


def _checksum_of_copies(unit: npt.NDArray[np.uint8]) -> int:
    first = unit[:, :, :, 0]
    checksum = block_checksum(np.ascontiguousarray(first).reshape(-1))
    return checksum if (unit == first[:, :, :, None]).all() else checksum ^ _ALL_BITS


def find_damage(block_ids: Sequence[int], sent: Sequence[int] | None, found: Sequence[int]) -> str | None:
    """None if ``found``, the checksums of the units of ``block_ids``, equal those that were ``sent``.

    Otherwise the reason not to trust the blocks. ``sent`` comes from a peer and may be missing or of any length.
    """
    if sent is None:
        return "no checksums came with it"
    if len(sent) != len(found):
        return f"{len(sent)} checksums came for {len(found)} units of tokens"
    per_block = -(-len(found) // max(1, len(block_ids)))
    damaged = [i // per_block for i, (before, after) in enumerate(zip(sent, found, strict=True)) if before != after]
    if not damaged:
        return None
    return f"{len(set(damaged))} of {len(block_ids)} blocks changed on the way, block {block_ids[damaged[0]]} first"
