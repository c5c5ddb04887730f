"""Who is let in next, and with which blocks.

It owns the two waiting lines and the rule that keeps a request out: it gets blocks for all its known tokens at once
(adjacent where possible, behind its prefix hit), or waits. It does not know slots or steps.

The lines are one per need. Requests to be computed here wait for their share of the token budget as well: letting them
in earlier would bind blocks early, and miss the prefix hits on what is being computed. Requests whose next step is a
transfer (a remote prefill, a KV load) do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.core.status import RequestStatus
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.request import PrefillMode, Request, service_order
from kvrelay.engine.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What is in the engine already: requests let in, those of them with a slot, prompt tokens still to compute."""

    num_admitted: int
    num_running: int
    num_backlog_tokens: int


class Admission:
    """The waiting lines of one engine.

    ``max_backlog_tokens``: with so much to compute nobody else who needs computing is let in.
    """

    def __init__(self, pool: BlockPool, max_backlog_tokens: int) -> None:
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_waiting_blocks = 0
        """Blocks that the known tokens of all who wait will take; prefix hits are not deducted, they may be lost."""
        self._pool = pool
        self._max_backlog_tokens = max_backlog_tokens
        self._watermark = max(1, pool.num_blocks // 100)
        self._here = WaitingQueue()
        self._elsewhere = WaitingQueue()
        self._blocked: tuple[Request, int, int] | None = None
        """The request that did not fit, and how many blocks were free and requests in the engine then."""

    def __repr__(self) -> str:
        return (
            f"Admission({len(self._here)} to compute, {len(self._elsewhere)} others, {self.num_waiting_blocks} blocks)"
        )

    def __len__(self) -> int:
        return len(self._here) + len(self._elsewhere)

    @property
    def is_short_of_blocks(self) -> bool:
        return self._blocked is not None

    def push(self, request: Request) -> None:
        self._line_of(request).push(request)
        self.num_waiting_blocks += self._pool.blocks_for(len(request.token_ids))

    def discard(self, request: Request) -> None:
        """Take ``request`` out if it waits."""
        line = self._line_of(request)
        if request in line:
            line.remove(request)
            self.num_waiting_blocks -= self._pool.blocks_for(len(request.token_ids))

    def keep_here(self) -> None:
        """Who waits for a remote prefill waits to be computed here instead."""
        for request in self._elsewhere.members():
            if request.mode is PrefillMode.REMOTE:
                self._elsewhere.remove(request)
                request.mode = PrefillMode.LOCAL
                self._here.push(request)
        self._blocked = None

    def may_admit(self, load: EngineLoad) -> bool:
        """Whether ``admit`` is worth a try: somebody waits, and is not known not to fit."""
        return self._first(load) is not None and not self._is_blocked(load)

    def admit(self, load: EngineLoad) -> Request | None:
        """Let the most urgent request in, with its blocks and its prefix hit; None if it does not fit or nobody waits.

        Nobody overtakes a request that waits for blocks, so that long ones do not starve.
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

    def _line_of(self, request: Request) -> WaitingQueue:
        by_transfer = request.mode is PrefillMode.REMOTE or request.num_load_tokens > 0
        return self._elsewhere if by_transfer else self._here

    def _first(self, load: EngineLoad) -> Request | None:
        """The most urgent request among those whom the load lets in."""
        elsewhere = self._elsewhere.peek()
        here = self._here.peek() if load.num_backlog_tokens < self._max_backlog_tokens else None
        if elsewhere is None or here is None:
            return elsewhere or here
        return min(elsewhere, here, key=service_order)

    def _is_blocked(self, load: EngineLoad) -> bool:
        """Whether the first in line is known not to fit, and nothing has come back since."""
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
        """Blocks to leave free against thrash. A preempted request comes back only when every running sequence could
        fill a block more; a lone one needs no reserve."""
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
