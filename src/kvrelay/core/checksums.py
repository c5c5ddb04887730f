"""Checksums of KV blocks: does a block hold, after its transfer, the bytes that were sent?

Pure functions. The worker decides when to compute them and what to do about a difference. xxh3-64 finds accidents (a
bad cable, a bad driver, a write to the wrong place), not forgeries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash


def block_checksum(block: npt.NDArray[np.uint8]) -> int:
    """xxh3-64, seed 0, over a block's bytes; ``block`` is contiguous, [block_bytes] uint8, and is not copied."""
    return int(xxhash.xxh3_64_intdigest(block.data))


def find_damage(block_ids: Sequence[int], sent: Sequence[int] | None, found: Sequence[int]) -> str | None:
    """None if ``found[i]``, the checksum of block i of ``block_ids``, equals ``sent[i]`` for all i.

    Otherwise the reason not to trust the blocks. ``sent`` comes from a peer and may be missing or of any length.
    """
    if sent is None:
        return "no checksums came with it"
    if len(sent) != len(block_ids):
        return f"{len(sent)} checksums came for {len(block_ids)} blocks"
    damaged = [block_id for block_id, before, after in zip(block_ids, sent, found, strict=True) if before != after]
    if not damaged:
        return None
    return f"{len(damaged)} of {len(block_ids)} blocks changed on the way, block {damaged[0]} first"
