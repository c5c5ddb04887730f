"""The hit ratios of prefix caches of blocks: one of unlimited size, and LRU caches of given sizes.

A request is the sequence of its blocks' ids, chained so that equal ids mean equal prefixes. Requests are replayed in
order. Only leading blocks hit: after the first miss all blocks are computed and enter the cache. The ratio is hits
over all blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence

import msgspec
import xxhash

from kvrelay.errors import InvalidInputError


class CacheHits(msgspec.Struct, frozen=True):
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
    """The unlimited cache first, then LRU caches of the given sizes (in blocks, above zero)."""
    return tuple(CacheHits(size, _hit_ratio(requests, size)) for size in (None, *cache_blocks))


def leading_hits(blocks: Sequence[int], cache: Container[int]) -> int:
    """The number of leading blocks that the cache holds."""
    return next((at for at, block in enumerate(blocks) if block not in cache), len(blocks))


def _hit_ratio(requests: Sequence[Sequence[int]], size: int | None) -> float:
    if size is not None and size < 1:
        raise InvalidInputError(f"a cache needs at least 1 block, not {size}", param="cache_blocks")
    known: set[int] = set()
    cache: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for blocks in requests:
        hits += leading_hits(blocks, known if size is None else cache)
        total += len(blocks)
        if size is None:
            known.update(blocks)
            continue
        for block in blocks:
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > size:
                cache.popitem(last=False)
    return hits / total if total else 0.0
