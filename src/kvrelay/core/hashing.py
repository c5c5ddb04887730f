"""Block hashes: the names under which engine, router and bench know a block of tokens.

A block's *local* hash covers its own tokens: xxh3-64 over the tokens as little-endian u32, seed 1337, the same as in
NVIDIA Dynamo. Its *sequence* hash covers its whole prefix as well: the same function, seeded with the sequence hash of
the block before. So equal sequence hashes mean equal prefixes (up to collisions, which the engine's token comparison
makes harmless). A first block's sequence hash is its local one; no other local hash is needed anywhere.

    sequence[0] = xxh3_64(block 0, 1337)        sequence[i] = xxh3_64(block i, sequence[i - 1])

Every prompt passes through here, so C calls do the work: one converts all tokens to bytes, one cuts the bytes into
blocks, and one per block computes the hash. For a list, most of the time goes into the first call; an array avoids it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import xxhash

from kvrelay.errors import InvalidInputError

HASH_SEED = 1337

_digest = xxhash.xxh3_64_intdigest


def compute_sequence_hashes(
    tokens: Sequence[int], block_size: int, lora: str | None = None, parent: int | None = None, salt: str | None = None
) -> tuple[int, ...]:
    """The hash of every complete block of ``tokens``, as unsigned 64-bit integers; the incomplete last chunk is
    dropped. An ``array`` has type code "I".

    ``lora`` names the adapter: its hash joins the seed, so equal tokens under different adapters never match. So does
    ``salt``: requests with different salts share no blocks. ``parent`` is the sequence hash of the block before the
    first one (None: the tokens begin the sequence).
    Raises InvalidInputError for a token id that is not an unsigned 32-bit integer.
    """
    digest, link = _digest, _first_seed(lora, salt) if parent is None else parent
    return tuple([link := digest(block, link) for block in token_blocks(tokens, block_size)])


def _first_seed(lora: str | None, salt: str | None) -> int:
    """The seed of a first block."""
    seed = HASH_SEED if lora is None else int(_digest(lora.encode(), HASH_SEED))
    return seed if salt is None else int(_digest(b"salt:" + salt.encode("utf-8", "surrogatepass"), seed))


def token_blocks(tokens: Sequence[int], block_size: int) -> list[bytes]:
    """The bytes of each complete block: its tokens as little-endian u32. Raises InvalidInputError."""
    num_blocks = len(tokens) // block_size
    if num_blocks == 0:
        return []
    cut: list[bytes] = np.frombuffer(_words(tokens), _block_type(block_size), count=num_blocks).tolist()
    return cut


@lru_cache(maxsize=16)
def _block_type(block_size: int) -> np.dtype[np.void]:
    """A block as an opaque item of an array. Cached, because making the type takes longer than using it."""
    return np.dtype((np.void, 4 * block_size))


def _words(tokens: Sequence[int]) -> array[int]:
    """The tokens as little-endian u32, without the tuple that a call with many arguments needs."""
    if isinstance(tokens, array) and sys.byteorder == "little":
        return tokens
    words = array("I")
    try:
        words.fromlist(tokens if isinstance(tokens, list) else list(tokens))
    except (OverflowError, TypeError) as exc:
        raise InvalidInputError(f"token ids must be unsigned 32-bit integers: {exc}", param="tokens") from exc
    if sys.byteorder == "big":
        words.byteswap()
    return words
