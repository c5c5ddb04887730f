"""Whether an engine's blocks, requests and loans agree: every block has exactly the owners that it should have."""

from __future__ import annotations

from collections import Counter

from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.loans import Loans
from kvrelay.engine.scheduler import Scheduler
from kvrelay.errors import IntegrityError


def check_integrity(pool: BlockPool, loans: Loans, scheduler: Scheduler) -> None:
    """Raise IntegrityError unless the requests and loans account for every block and all counts are true."""
    pool.check_integrity()
    owners: Counter[int] = Counter()
    for request in scheduler.requests.values():
        owners.update(request.block_ids)
    quarantined: Counter[int] = Counter()
    for loan in loans:
        owners.update(loan.block_ids)
        quarantined.update(loan.quarantined)
    for block_id in range(pool.num_blocks):
        if pool.num_refs(block_id) != owners[block_id]:
            raise IntegrityError(f"block {block_id} has {owners[block_id]} owners: {pool.describe(block_id)}")
    waiting = (request for request in scheduler.requests.values() if request.is_waiting)
    num_waiting_blocks = sum(pool.blocks_for(len(request.token_ids)) for request in waiting)
    if num_waiting_blocks != scheduler.admission.num_waiting_blocks:
        raise IntegrityError(f"requests wait for {num_waiting_blocks} blocks: {scheduler.admission!r}")
    if quarantined.total() != pool.num_quarantined or set(quarantined.values()) - {1}:
        raise IntegrityError(f"loans cover {quarantined.total()} blocks, {pool.num_quarantined} quarantined")
