"""Block hashes: the names under which engine, router and bench know a block of tokens.

A block's *local* hash covers its own tokens: xxh3-64 over the tokens as little-endian u32, seed 1337, the same as in
NVIDIA Dynamo. Its *sequence* hash covers its whole prefix as well: the same function, seeded with the sequence hash of
the block before. So equal sequence hashes mean equal prefixes (up to collisions, which the engine's token comparison
makes harmless).

    sequence[0] = xxh3_64(block 0, 1337)        sequence[i] = xxh3_64(block i, sequence[i - 1])

Every prompt passes through here, so C calls do the work: one converts all tokens to bytes, one cuts the bytes into
blocks, and one per block and hash computes the hash. For a list, most of the time goes into the first call; an array
avoids it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvrelay.errors import InvalidInputError

HASH_SEED = 1337

TokenArray = npt.NDArray[np.integer]

_digest = xxhash.xxh3_64_intdigest


class BlockHashes(NamedTuple):
    """``local[i]`` and ``sequence[i]`` of each complete block i, as unsigned 64-bit integers."""

    local: tuple[int, ...]
    sequence: tuple[int, ...]


def compute_block_hashes(
    tokens: Sequence[int] | TokenArray,
    block_size: int,
    seed: int = HASH_SEED,
    lora: str | None = None,
    parent: int | None = None,
    salt: str | None = None,
) -> BlockHashes:
    """Hash every complete block of ``tokens``; the incomplete last chunk is dropped. An ``array`` has type code "I".

    ``lora`` names the adapter: its hash joins the seed, so equal tokens under different adapters never match. So does
    ``salt``: requests with different salts share no blocks. ``parent`` is the sequence hash of the block before the
    first one (None: the tokens begin the sequence).
    Raises InvalidInputError for a token id that is not an unsigned 32-bit integer.
    """
    blocks = token_blocks(tokens, block_size)
    first_seed = local_seed(seed, lora, salt)
    return BlockHashes(tuple(map(_digest, blocks, repeat(first_seed))), _chain(blocks, first_seed, parent))


def compute_sequence_hashes(
    tokens: Sequence[int] | TokenArray,
    block_size: int,
    seed: int = HASH_SEED,
    lora: str | None = None,
    parent: int | None = None,
    salt: str | None = None,
) -> tuple[int, ...]:
    """Only the sequence hashes of ``compute_block_hashes``, with half of the calls."""
    return _chain(token_blocks(tokens, block_size), local_seed(seed, lora, salt), parent)


def local_seed(seed: int = HASH_SEED, lora: str | None = None, salt: str | None = None) -> int:
    """The seed of local hashes, and of a first block's sequence hash, under adapter ``lora`` and with ``salt``."""
    if lora is not None:
        seed = int(_digest(lora.encode(), seed))
    return seed if salt is None else int(_digest(b"salt:" + salt.encode("utf-8", "surrogatepass"), seed))


def _chain(blocks: Sequence[bytes], first_seed: int, parent: int | None) -> tuple[int, ...]:
    digest, link = _digest, first_seed if parent is None else parent
    return tuple([link := digest(block, link) for block in blocks])


def token_blocks(tokens: Sequence[int] | TokenArray, block_size: int) -> list[bytes]:
    """The bytes of each complete block: its tokens as little-endian u32. Raises InvalidInputError."""
    num_blocks = len(tokens) // block_size
    if num_blocks == 0:
        return []
    cut: list[bytes] = np.frombuffer(_token_bytes(tokens), _block_type(block_size), count=num_blocks).tolist()
    return cut


@lru_cache(maxsize=16)
def _block_type(block_size: int) -> np.dtype[np.void]:
    """A block as an opaque item of an array. Cached, because making the type takes longer than using it."""
    return np.dtype((np.void, 4 * block_size))


def _token_bytes(tokens: Sequence[int] | TokenArray) -> bytes | array[int]:
    """The tokens as little-endian u32."""
    try:
        if isinstance(tokens, np.ndarray):
            return _array_bytes(tokens)
        if isinstance(tokens, array) and sys.byteorder == "little":
            return tokens
        return _list_bytes(tokens if isinstance(tokens, list) else list(tokens))
    except (OverflowError, TypeError) as exc:
        raise InvalidInputError(f"token ids must be unsigned 32-bit integers: {exc}", param="tokens") from exc


def _list_bytes(tokens: list[int]) -> array[int]:
    """The bytes of a list, without the tuple that a call with many arguments needs."""
    words = array("I")
    words.fromlist(tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return words


def _array_bytes(tokens: TokenArray) -> bytes:
    if tokens.dtype.kind not in "iu":
        raise InvalidInputError(f"token ids must be integers, got an array of {tokens.dtype}", param="tokens")
    if tokens.dtype != np.uint32 and (int(tokens.min()) < 0 or int(tokens.max()) > 0xFFFFFFFF):
        raise InvalidInputError("token ids must be unsigned 32-bit integers", param="tokens")
    return tokens.astype("<u4", copy=False).tobytes()
