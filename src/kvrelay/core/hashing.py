"""Block hashes: the names under which engine, router and bench know a block of tokens.

A block's *local* hash covers its own tokens; its *sequence* hash chains the local hash to all that precedes it, so
equal sequence hashes mean equal prefixes (up to collisions, which the engine's token comparison makes harmless).
Local hashes are those of Dynamo: xxh3-64 over the tokens as little-endian u32, seed 1337 (mission, section 5).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

HASH_SEED = 1337


class BlockHashes(tuple[tuple[int, ...], tuple[int, ...]]):
    """``local[i]`` and ``sequence[i]`` of each complete block i, as unsigned 64-bit integers."""

    __slots__ = ()

    @property
    def local(self) -> tuple[int, ...]:
        return self[0]

    @property
    def sequence(self) -> tuple[int, ...]:
        return self[1]


def compute_block_hashes(
    tokens: Sequence[int], block_size: int, seed: int = HASH_SEED, lora: str | None = None
) -> BlockHashes:
    """Hash every complete block of ``tokens``; the incomplete last chunk is dropped.

    ``lora`` names the adapter: its hash joins the seed, so equal tokens under different adapters never match.
    """
    data = np.asarray(tokens, dtype="<u4").tobytes()
    step = 4 * block_size
    block_seed = local_seed(seed, lora)
    digest = xxhash.xxh3_64_intdigest
    local = tuple(digest(data[at : at + step], block_seed) for at in range(0, len(data) - step + 1, step))
    return BlockHashes((local, chain_hashes(local, seed)))


def local_seed(seed: int = HASH_SEED, lora: str | None = None) -> int:
    """The seed of local hashes under adapter ``lora``."""
    return seed if lora is None else int(xxhash.xxh3_64_intdigest(lora.encode(), seed))


def chain_hashes(local: Sequence[int], seed: int = HASH_SEED, parent: int | None = None) -> tuple[int, ...]:
    """Sequence hashes of consecutive blocks after the block whose sequence hash is ``parent`` (None: from the root).

    The first block's sequence hash is its local hash; each later one hashes (parent's sequence hash, local hash).
    """
    digest = xxhash.xxh3_64_intdigest
    chained = []
    for block in local:
        if parent is not None:
            block = digest(parent.to_bytes(8, "little") + block.to_bytes(8, "little"), seed)
        chained.append(block)
        parent = block
    return tuple(chained)
