"""How a decode worker's engine opens a hand-off: its id, the prefill that it asks for, and the blocks that it lends.

Peers may read or write lent blocks, so they are neither freed nor reused. The ledger in
``kvrelay/handoff`` decides when a loan ends; this module applies it to the pool. A loan has its own reference to each
of its blocks, so they outlive the request. Blocks that a peer may write are quarantined.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvrelay.core.handoff import HandoffId, RemotePrefillRequest, without_tail
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.request import Request


@dataclass(frozen=True, slots=True)
class Loan:
    """Blocks for a whole request: its prefix hits (``pinned``) and blocks that a peer may write (``quarantined``).
    ``pool``: whose blocks they are."""

    pinned: tuple[int, ...]
    quarantined: tuple[int, ...]
    pool: BlockPool = field(repr=False, compare=False)

    @property
    def block_ids(self) -> tuple[int, ...]:
        return self.pinned + self.quarantined


class Loans:
    """All loans of one engine, of its pool's blocks and its holding area's. A hand-off may have several: each later
    claimant gets other blocks."""

    def __init__(self) -> None:
        self._loans: dict[tuple[HandoffId, int], Loan] = {}

    def __len__(self) -> int:
        return len(self._loans)

    def __iter__(self) -> Iterator[Loan]:
        return iter(list(self._loans.values()))

    def find(self, handoff_id: HandoffId, number: int) -> Loan | None:
        return self._loans.get((handoff_id, number))

    def writable_blocks(self) -> dict[tuple[HandoffId, int], tuple[int, ...]]:
        """Of each loan, those that a peer may write to. From any thread."""
        return {key: loan.quarantined for key, loan in self._loans.copy().items()}

    @property
    def num_only_read(self) -> int:
        """Blocks of loans that no peer may write to: prefixes."""
        return sum(len(loan.pinned) for loan in self._loans.values() if not loan.quarantined)

    def lend(self, handoff_id: HandoffId, pool: BlockPool, block_ids: list[int], num_hit_blocks: int) -> Loan:
        """The first loan: the blocks of a waiting request, which also keeps its references."""
        loan = Loan(tuple(block_ids[:num_hit_blocks]), tuple(block_ids[num_hit_blocks:]), pool)
        pool.acquire(loan.block_ids)
        pool.quarantine(loan.quarantined)
        self._loans[handoff_id, 1] = loan
        return loan

    def lend_fresh(self, handoff_id: HandoffId, number: int, before: Loan) -> Loan | None:
        """A later loan: the hits of the loan before, and fresh blocks for the rest. None if too few blocks are free."""
        pinned, pool = before.pinned, before.pool
        fresh = pool.allocate(len(before.quarantined), after=pinned[-1] if pinned else None)
        if fresh is None:
            return None
        loan = Loan(pinned, tuple(fresh), pool)
        pool.acquire(pinned)
        pool.quarantine(loan.quarantined)
        self._loans[handoff_id, number] = loan
        return loan

    def end(self, handoff_id: HandoffId, number: int) -> None:
        """End a loan: no peer touches its blocks any more. Raises KeyError if it has ended already."""
        loan = self._loans.pop((handoff_id, number))
        loan.pool.lift_quarantine(loan.quarantined)
        loan.pool.release(loan.block_ids)


class HandoffIds:
    """``worker_id``: the decode worker's, which names its hand-offs."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._num_opened = 0

    def of(self, request: Request) -> HandoffId:
        """The id that the request came with, as half of a pair, or else a new one."""
        if request.handoff_number:
            return HandoffId(self._worker_id, request.handoff_number)
        self._num_opened += 1
        return HandoffId(self._worker_id, self._num_opened)


def remote_prefill(
    request: Request,
    handoff_id: HandoffId,
    sampling: SamplingParams,
    block_ids: tuple[int, ...] = (),
    num_cached_tokens: int = 0,
) -> RemotePrefillRequest:
    """The prefill of ``request`` into ``block_ids``, whose first ``num_cached_tokens`` tokens are there already."""
    prefill = RemotePrefillRequest(
        handoff_id=handoff_id,
        decode_worker_id=handoff_id.decode_worker_id,
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        num_output_tokens=request.num_output_tokens,
        sampling=sampling,
        block_ids=block_ids,
        num_cached_tokens=num_cached_tokens,
        priority=request.priority,
        tenant=request.tenant,
        traceparent=request.traceparent,
        holder=request.holder,
    )
    return without_tail(prefill, request.tail_tokens)
