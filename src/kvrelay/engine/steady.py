"""Many steps at once in which the same answers get a token each: what the simulator jumps over.

While nothing waits, is prefilled, copied or to be reported, each step's schedule follows from the one before. So the
state after ``n`` such steps is that after ``n`` calls of ``schedule`` and ``update``, and only the steps that fill or
take blocks need any work. Whoever runs them knows how long they take, and delivers the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrelay.engine.allocation import DecodeAllocator, cache_full_blocks
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.request import Request
from kvrelay.engine.scheduled_batch import TokenBudget


class SteadyDecodes:
    """The next steps of one scheduler, until something is called on it. ``requests``: the rows. ``num_steps``: how many
    steps may follow for certain; in the one after them an answer may end, or blocks may be short. ``count(steps)``
    counts forward passes."""

    def __init__(
        self,
        requests: list[Request],
        pool: BlockPool,
        allocator: DecodeAllocator,
        budget: TokenBudget,
        count: Callable[[int], None],
    ) -> None:
        self.requests = requests
        self._pool, self._allocator, self._budget, self._count = pool, allocator, budget, count
        self._done = 0
        self._applied = dict.fromkeys(requests, 0)
        """How many of the steps each row shows."""
        size = pool.block_size
        self._filling: dict[int, list[Request]] = {}
        """Rows whose block becomes full in the steps of this number, modulo the block size, from 1."""
        for request in requests:
            self._filling.setdefault((1 - len(request.token_ids)) % size, []).append(request)
        ends = min(request.length_limit - len(request.token_ids) for request in requests) - 1
        # Each row takes a block in so many steps at most. What gives way to it is offered to tiers, at that moment.
        num_free = pool.num_free if pool.on_evicted is None else pool.num_plain
        num_rounds = (num_free - len(allocator.needing)) // len(requests)
        self.num_steps = max(min(ends, num_rounds * size), 0)

    @property
    def num_context(self) -> int:
        """Tokens of context of the next step."""
        return self._budget.num_context + len(self.requests)

    @property
    def num_until_change(self) -> int:
        """After so many steps blocks have been filled or taken: the events of the pool are those of the last of these
        steps alone."""
        if self._allocator.needing:
            return 1
        size, done = self._pool.block_size, self._done
        return min((phase - done - 1) % size + 1 for phase in self._filling)

    def compute(self, seconds: Sequence[float], token_id: int) -> None:
        """So many further steps have been computed, at most ``num_until_change``: each gave each row ``token_id``."""
        num_steps = len(seconds)
        self._allocator.grow()
        self._budget.decoded(seconds)
        self._count(num_steps)
        self._done += num_steps
        for request in self._filling.get(self._done % self._pool.block_size, ()):
            self._show(request, token_id)
            cache_full_blocks(self._pool, request)
            if request.num_computed_tokens == self._pool.block_size * len(request.block_ids):
                self._allocator.needing.append(request)

    def leave(self, token_id: int) -> None:
        """The next step is not one of these."""
        for request in self.requests:
            self._show(request, token_id)

    def _show(self, request: Request, token_id: int) -> None:
        """All steps so far on the request itself."""
        num_new = self._done - self._applied[request]
        self._applied[request] = self._done
        request.token_ids.extend([token_id] * num_new)
        request.num_computed_tokens += num_new
