"""The blocks of one request: given back, offered to the prefix cache, or still touched by a transfer."""

from __future__ import annotations

from kvrelay.core.status import RequestStatus
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.request import PrefillMode, Request


def free_blocks(pool: BlockPool, request: Request) -> None:
    """Give all of them back; nothing of the request is computed any more."""
    pool.release(request.block_ids)
    request.block_ids = []
    request.num_computed_tokens = 0
    request.num_cached_blocks = 0


def cache_full_blocks(pool: BlockPool, request: Request) -> None:
    """Offer the blocks that have become full and computed to the prefix cache."""
    first = request.num_cached_blocks
    size = pool.block_size
    end = request.num_computed_tokens // size
    if end <= first or not pool.enable_prefix_caching:
        return
    request.hash_blocks(end, size)
    pool.cache_blocks(
        request.block_ids[first:end],
        request.sequence_hashes[first - 1] if first else None,
        request.sequence_hashes[first:end],
        request.local_hashes[first:end],
        request.token_ids[first * size : end * size],
    )
    request.num_cached_blocks = end


def transfer_may_run(request: Request, block_size: int) -> bool:
    """Whether a transfer may touch its blocks now."""
    if request.status in (RequestStatus.LOADING_KV, RequestStatus.PREFILL_SENDING):
        return True
    held_elsewhere = request.num_load_tokens // block_size
    return request.mode is PrefillMode.HANDOFF and request.num_sent_blocks > held_elsewhere
