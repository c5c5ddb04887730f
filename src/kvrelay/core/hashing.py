"""Block hashes: the names under which engine, router and bench know a block of tokens.

A block's *local* hash covers its own tokens; its *sequence* hash chains the local hash to all that precedes it, so
equal sequence hashes mean equal prefixes (up to collisions, which the engine's token comparison makes harmless).
Local hashes are those of Dynamo: xxh3-64 over the tokens as little-endian u32, seed 1337 (mission, section 5).

Every prompt passes through here, so the loops run inside C calls where they can: the tokens become bytes at once, one
``map`` hashes the blocks. Only the chain, each link of which needs the one before, is a loop in Python. Token ids in a
numpy array save the conversion, which is a third of the time for a list.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import islice, repeat

import numpy as np
import numpy.typing as npt
import xxhash

from kvrelay.errors import InvalidInputError

HASH_SEED = 1337

TokenArray = npt.NDArray[np.integer]

_digest = xxhash.xxh3_64_intdigest
_pack_pair = struct.Struct("<QQ").pack


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
    tokens: Sequence[int] | TokenArray, block_size: int, seed: int = HASH_SEED, lora: str | None = None
) -> BlockHashes:
    """Hash every complete block of ``tokens``; the incomplete last chunk is dropped.

    ``lora`` names the adapter: its hash joins the seed, so equal tokens under different adapters never match.
    Raises InvalidInputError for a token id that is not an unsigned 32-bit integer.
    """
    local = compute_local_hashes(tokens, block_size, seed, lora)
    return BlockHashes((local, chain_hashes(local, seed)))


def compute_local_hashes(
    tokens: Sequence[int] | TokenArray, block_size: int, seed: int = HASH_SEED, lora: str | None = None
) -> tuple[int, ...]:
    """The local hashes alone, as ``compute_block_hashes`` gives them."""
    num_blocks = len(tokens) // block_size
    if num_blocks == 0:
        return ()
    data = np.frombuffer(_token_bytes(tokens), dtype=f"V{4 * block_size}", count=num_blocks)
    return tuple(map(_digest, data.tolist(), repeat(local_seed(seed, lora))))


def local_seed(seed: int = HASH_SEED, lora: str | None = None) -> int:
    """The seed of local hashes under adapter ``lora``."""
    return seed if lora is None else int(_digest(lora.encode(), seed))


def chain_hashes(local: Sequence[int], seed: int = HASH_SEED, parent: int | None = None) -> tuple[int, ...]:
    """Sequence hashes of consecutive blocks after the block whose sequence hash is ``parent`` (None: from the root).

    The first block's sequence hash is its local hash; each later one hashes (parent's sequence hash, local hash).
    """
    digest, pack = _digest, _pack_pair
    if parent is not None:
        return tuple([parent := digest(pack(parent, block), seed) for block in local])
    if not local:
        return ()
    parent = local[0]
    return (parent, *[parent := digest(pack(parent, block), seed) for block in islice(local, 1, None)])


def _token_bytes(tokens: Sequence[int] | TokenArray) -> bytes:
    """The tokens as little-endian u32; at least all complete blocks of them."""
    try:
        if isinstance(tokens, np.ndarray):
            return _array_bytes(tokens)
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except (struct.error, OverflowError) as exc:
        raise InvalidInputError(f"token ids must be unsigned 32-bit integers: {exc}", param="tokens") from exc


def _array_bytes(tokens: TokenArray) -> bytes:
    if tokens.dtype.kind not in "iu":
        raise InvalidInputError(f"token ids must be integers, got an array of {tokens.dtype}", param="tokens")
    if tokens.dtype != np.uint32 and (int(tokens.min()) < 0 or int(tokens.max()) > 0xFFFFFFFF):
        raise InvalidInputError("token ids must be unsigned 32-bit integers", param="tokens")
    return tokens.astype("<u4", copy=False).tobytes()
