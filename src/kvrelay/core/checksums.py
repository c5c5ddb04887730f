"""Checksums of KV blocks: does a block hold, after its transfer, the values that were sent?

Two workers may cut their KV differently: by TP, PP and block size. So a checksum covers a *unit* of tokens in the one
order that all share: region by region, ``[layer, vector, head of the model, entry, value]``. A block of 16 tokens on
one rank is that already; others are copied into it first.

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


def unit_tokens(block_size: int, entry_tokens: int = 1) -> int:
    """Tokens that one checksum covers. Equal for all block sizes that 16 divides, so that these can be compared; whole
    entries, of ``entry_tokens`` each (``KVLayout.entry_tokens``)."""
    return math.gcd(block_size, math.lcm(MAX_UNIT_TOKENS, entry_tokens))


def unit_checksums(block: npt.NDArray[np.uint8], layout: KVLayout) -> tuple[int, ...]:
    """Of each unit of tokens, in order; ``block`` is contiguous, [block_bytes] uint8. A state counts in the last one.

    If ranks hold copies of a head and the copies differ, the checksum is one that no sound block has.
    """
    num_units = layout.block_size // unit_tokens(layout.block_size, layout.entry_tokens)
    if layout.is_whole and num_units == 1:
        return (block_checksum(block),)
    regions = [_by_unit(block, layout, number, num_units) for number in range(len(layout.regions))]
    return tuple(
        _checksum_of_copies([units[at - num_units] for units in regions if at >= num_units - len(units)])
        for at in range(num_units)
    )


def _by_unit(block: npt.NDArray[np.uint8], layout: KVLayout, number: int, num_units: int) -> npt.NDArray[np.uint8]:
    """A region as [unit, layer, vector, head of the model, copy, bytes]; a state has one unit, the last."""
    cut = layout.regions[number]
    cells = layout.cells(block, number)
    num_units = num_units if cut.region.entry_tokens else 1
    shape = (*cells.shape[:2], cut.region.num_heads, cut.head_replicas, num_units, -1)
    return cells.reshape(shape).transpose(4, 0, 1, 2, 3, 5)


def _checksum_of_copies(regions: Sequence[npt.NDArray[np.uint8]]) -> int:
    """Of one unit's part of each region, [layer, vector, head, copy, bytes]."""
    digest = xxhash.xxh3_64(seed=0)
    for unit in regions:
        digest.update(np.ascontiguousarray(unit[:, :, :, 0]).reshape(-1).data)
    is_sound = all((unit == unit[:, :, :, :1]).all() for unit in regions)
    return digest.intdigest() if is_sound else digest.intdigest() ^ _ALL_BITS


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
