"""The blocks of a running request: given back, offered to the prefix cache, and one more when the last is full.

If the pool is empty, the least urgent sequence of the API key with the most blocks is preempted. ``DecodeAllocator``
owns the list of decodes that need a block, and the choice of the victim. A preempted sequence loses its slot and all
its blocks, waits again, and is prefilled again. A key below an equal share of slots and blocks need not wait until
answers of a key above it have ended: the same happens to those. What else happens in a step it does not know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from kvrelay.core.clock import Clock
from kvrelay.core.status import RequestStatus
from kvrelay.engine.batch import Batch
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.pauses import Pause
from kvrelay.engine.request import PrefillMode, Request, service_order


class Holdings:
    """What each API key holds of the slots and blocks. ``waiting``: keys that wait have a share, too."""

    def __init__(self, admitted: Iterable[Request], waiting: Iterable[str], num_slots: int, num_blocks: int) -> None:
        self._slots, self._blocks = Counter[str](), Counter[str]()
        for request in admitted:
            self._slots[request.tenant] += 1
            self._blocks[request.tenant] += len(request.block_ids)
        num_keys = max(len(self._slots.keys() | set(waiting)), 1)
        self._most_slots, self._most_blocks = num_slots // num_keys, num_blocks // num_keys

    def is_above(self, tenant: str) -> bool:
        """Whether the key holds more than an equal share."""
        return not self.allow(tenant, 0, 0)

    def allow(self, tenant: str, num_blocks: int, num_slots: int = 1) -> bool:
        """Whether the key, with that much more, holds an equal share at most."""
        has_slots = self._slots[tenant] + num_slots <= self._most_slots
        return has_slots and self._blocks[tenant] + num_blocks <= self._most_blocks


class DecodeAllocator:
    """``wait_again`` gets each preempted request, without blocks and in state PREEMPTED."""

    def __init__(self, pool: BlockPool, batch: Batch, clock: Clock, wait_again: Callable[[Request], None]) -> None:
        self.needing: list[Request] = []
        """Decodes whose last block is full. Some may have ended before the next call of ``grow``."""
        self.num_preemptions = 0
        self._pool = pool
        self._batch = batch
        self._clock = clock
        self._wait_again = wait_again

    def grow(self) -> bool:
        """Give a block to each decode that needs one, in order of service. Returns whether a sequence was preempted."""
        if not self.needing:
            return False
        num_before = self.num_preemptions
        needing, self.needing = self.needing, []
        for request in sorted(needing, key=service_order):
            while request.slot >= 0:
                block_ids = self._pool.allocate(1, after=request.block_ids[-1])
                if block_ids is not None:
                    self._batch.add_block(request, block_ids[0])
                    break
                self._preempt(self._choose_victim() or request)
        return self.num_preemptions > num_before

    def make_room(self, holdings: Holdings) -> bool:
        """Preempt a sequence of a key above its share. False: there is none."""
        victim = self._choose_victim(holdings.is_above)
        if victim is not None:
            self._preempt(victim)
        return victim is not None

    def _choose_victim(self, may_lose: Callable[[str], bool] = lambda _: True) -> Request | None:
        """The least urgent sequence of the API key that holds the most blocks: no key's priority takes blocks from
        another key. Hand-offs are exempt: a transfer may read their blocks."""
        victims: dict[str, Request] = {}
        num_blocks: Counter[str] = Counter()
        for other in self._batch:
            if other.mode is PrefillMode.HANDOFF:
                continue
            num_blocks[other.tenant] += len(other.block_ids)
            known = victims.setdefault(other.tenant, other)
            victims[other.tenant] = max(known, other, key=service_order)
        losing = filter(may_lose, victims)
        first = max(losing, key=lambda tenant: (num_blocks[tenant], victims[tenant].arrival), default=None)
        return None if first is None else victims[first]

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self._batch.leave(request)
        request.move(RequestStatus.PREEMPTED, self._clock.now())
        request.stay_here()
        free_blocks(self._pool, request)
        if request.wants_prompt_logprobs:
            request.prompt_logprobs.clear()
        self._wait_again(request)


def free_blocks(pool: BlockPool, request: Request, pause: Pause | None = None) -> None:
    """Give all of them back; nothing of the request is computed any more. ``pause``: what its session does next."""
    pool.release(request.block_ids, pause)
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
        request.packed()[first * size : end * size],
    )
    request.num_cached_blocks = end


def transfer_may_run(request: Request, block_size: int) -> bool:
    """Whether a transfer may touch its blocks now."""
    if request.status in (RequestStatus.LOADING_KV, RequestStatus.PREFILL_SENDING):
        return True
    held_elsewhere = request.num_load_tokens // block_size
    return request.mode is PrefillMode.HANDOFF and request.num_sent_blocks > held_elsewhere
