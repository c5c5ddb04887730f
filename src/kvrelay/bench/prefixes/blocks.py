"""What a prefix cache of blocks would hit: one of unlimited size, and LRU caches of given sizes.

A request is the sequence of its blocks' ids, chained so that equal ids mean equal prefixes. Requests are replayed in
order. Only leading blocks hit: after the first miss all blocks are computed and enter the cache. The ratio is hits
over all blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from kvrelay.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class CacheHits:
    """``num_blocks`` None means unlimited. ``hit_ratio`` is 0 to 1."""

    num_blocks: int | None
    hit_ratio: float


def chained_blocks(content: bytes, block_bytes: int) -> tuple[int, ...]:
    """64-bit chained hashes of the complete blocks of ``content``; the incomplete last block is dropped."""
    digest, parent, ids = xxhash.xxh3_64_intdigest, 0, []
    for at in range(0, len(content) - block_bytes + 1, block_bytes):
        parent = digest(content[at : at + block_bytes], parent)
        ids.append(parent)
    return tuple(ids)


def hit_ratios(requests: Sequence[Sequence[int]], cache_blocks: Iterable[int]) -> tuple[CacheHits, ...]:
    """The unlimited cache first, then LRU caches of the sizes given (in blocks, above zero)."""
    return (_unlimited(requests), *(_lru(requests, size) for size in cache_blocks))


def _unlimited(requests: Sequence[Sequence[int]]) -> CacheHits:
    known: set[int] = set()
    hits = total = 0
    for blocks in requests:
        leading = _leading(blocks, known)
        known.update(blocks[leading:])
        hits += leading
        total += len(blocks)
    return CacheHits(None, hits / total if total else 0.0)


def _lru(requests: Sequence[Sequence[int]], size: int) -> CacheHits:
    if size < 1:
        raise InvalidInputError(f"a cache of {size} blocks is no cache", param="cache_blocks")
    cache: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for blocks in requests:
        hits += _leading(blocks, cache)
        total += len(blocks)
        for block in blocks:
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > size:
                cache.popitem(last=False)
    return CacheHits(size, hits / total if total else 0.0)


def _leading(blocks: Sequence[int], known: set[int] | OrderedDict[int, None]) -> int:
    return next((at for at, block in enumerate(blocks) if block not in known), len(blocks))
