"""Which waiting request gets blocks next.

It owns the two queues and their rule: a request gets blocks for all its known tokens at once (adjacent where possible,
after its prefix hit), or it waits. It does not know slots or steps.

There is one queue per kind of need. Requests that are computed here also wait for their share of the token budget:
admitting them earlier would bind blocks early, and would miss prefix hits on prompts that are being computed. Requests
whose next step is a transfer (a remote prefill, a KV load) do not wait for the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.core.status import RequestStatus
from kvrelay.engine.admission.waiting import WaitingQueue
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.request import PrefillMode, Request, service_order


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's present load: admitted requests, those of them with a slot, prompt tokens still to compute."""

    num_admitted: int
    num_running: int
    num_backlog_tokens: int


class AdmissionQueue:
    """The waiting requests of one engine.

    ``max_backlog_tokens``: with that many prompt tokens still to compute, no request that needs computing is admitted.
    """

    def __init__(self, pool: BlockPool, max_backlog_tokens: int) -> None:
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_waiting_blocks = 0
        """Blocks that the known tokens of all waiting requests need. Prefix hits are not deducted: they may be lost."""
        self._pool = pool
        self._max_backlog_tokens = max_backlog_tokens
        self._watermark = max(1, pool.num_blocks // 100)
        self._here = WaitingQueue()
        self._elsewhere = WaitingQueue()
        self._blocked: tuple[Request, int, int] | None = None
        """The request that did not fit, and the numbers of free blocks and of admitted requests at that time."""

    def __repr__(self) -> str:
        num_here, num_elsewhere = len(self._here), len(self._elsewhere)
        return f"AdmissionQueue({num_here} to compute, {num_elsewhere} others, {self.num_waiting_blocks} blocks)"

    def __len__(self) -> int:
        return len(self._here) + len(self._elsewhere)

    @property
    def is_short_of_blocks(self) -> bool:
        return self._blocked is not None

    def push(self, request: Request) -> None:
        self._queue_of(request).push(request)
        self.num_waiting_blocks += self._pool.blocks_for(len(request.token_ids))

    def discard(self, request: Request) -> None:
        """Remove ``request`` if it waits."""
        queue = self._queue_of(request)
        if request in queue:
            queue.remove(request)
            self.num_waiting_blocks -= self._pool.blocks_for(len(request.token_ids))

    def cancel_remote_prefills(self) -> None:
        """Requests that wait for a remote prefill are to be computed here, unless a prefill worker has them already."""
        for request in self._elsewhere.members():
            if request.mode is PrefillMode.REMOTE and not request.handoff_number:
                self._elsewhere.remove(request)
                request.mode = PrefillMode.LOCAL
                self._here.push(request)
        self._blocked = None

    def may_admit(self, load: EngineLoad) -> bool:
        """Whether ``admit`` may succeed: a request waits, and is not known not to fit."""
        return self._first(load) is not None and not self._is_blocked(load)

    def admit(self, load: EngineLoad) -> Request | None:
        """Admit the most urgent request, with its blocks and its prefix hit; None if it does not fit or none waits.

        No request overtakes one that waits for blocks, so that long prompts do not starve.
        """
        request = self._first(load)
        if request is None or self._is_blocked(load):
            return None
        hit = self.find_hit(request)
        num_needed = self._pool.blocks_for(len(request.token_ids)) - len(hit)
        num_available = self._pool.num_free - self._pool.num_free_among(hit)
        if num_needed > num_available - self._reserve_for(request, load):
            self._blocked = (request, self._pool.num_free, load.num_admitted)
            return None
        self.discard(request)
        self._give_blocks(request, hit, num_needed)
        return request

    def _queue_of(self, request: Request) -> WaitingQueue:
        by_transfer = request.mode is PrefillMode.REMOTE or request.num_load_tokens > 0
        return self._elsewhere if by_transfer else self._here

    def _first(self, load: EngineLoad) -> Request | None:
        """The most urgent request among those that the load permits."""
        elsewhere = self._elsewhere.peek()
        here = self._here.peek() if load.num_backlog_tokens < self._max_backlog_tokens else None
        if elsewhere is None or here is None:
            return elsewhere or here
        return min(elsewhere, here, key=service_order)

    def _is_blocked(self, load: EngineLoad) -> bool:
        """Whether the first request is known not to fit, and no block has become free since."""
        if self._blocked is None:
            return False
        request, num_free, num_admitted = self._blocked
        unchanged = self._pool.num_free <= num_free and load.num_admitted >= num_admitted
        if unchanged and request is self._first(load):
            return True
        self._blocked = None
        return False

    def find_hit(self, request: Request) -> list[int]:
        """The cached blocks that ``request`` begins with; its last token is always left to compute."""
        if not self._pool.enable_prefix_caching or request.wants_prompt_logprobs:
            return []
        request.hash_blocks((len(request.token_ids) - 1) // self._pool.block_size, self._pool.block_size)
        return self._pool.find_prefix(request.token_ids, request.sequence_hashes)

    def _reserve_for(self, request: Request, load: EngineLoad) -> int:
        """Blocks to leave free, against thrashing. A preempted request returns only if every running sequence could
        fill one more block. A request that would run alone needs no reserve."""
        if not load.num_admitted:
            return 0
        return self._watermark + (load.num_running if request.status is RequestStatus.PREEMPTED else 0)

    def _give_blocks(self, request: Request, hit: list[int], num_fresh: int) -> None:
        self._pool.acquire(hit)
        fresh = self._pool.allocate(num_fresh, after=hit[-1] if hit else None)
        assert fresh is not None, "as many blocks were free a moment ago"
        request.block_ids = hit + fresh
        request.num_cached_blocks = len(hit)
        request.num_computed_tokens = len(hit) * self._pool.block_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            self.num_queried_tokens += len(request.token_ids)
            self.num_hit_tokens += request.num_computed_tokens
