"""What a worker could get without computing, besides its own pool: from its tiers, and from another worker's pool.

``TierTable`` holds which blocks each worker's tiers have, by their events. ``tier_loads`` and ``peer_loads`` say, for
each candidate, what it could load and what that takes. Pure, but for the table's own state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from kvrelay.core.events import LoadCost
from kvrelay.core.tier_stats import PEER
from kvrelay.core.workers import WorkerInfo
from kvrelay.placement.seconds import FloatColumn, Loads


class TierTable:
    """Of each worker: by block, the media that have it. About 100 bytes a block."""

    def __init__(self) -> None:
        self.held: dict[str, dict[int, tuple[str, ...]]] = {}

    def __repr__(self) -> str:
        return f"TierTable({ {worker: len(held) for worker, held in self.held.items()} })"

    def store(self, worker_id: str, medium: str, block_hashes: Sequence[int]) -> None:
        held = self.held.setdefault(worker_id, {})
        for block in block_hashes:
            media = held.get(block, ())
            if medium not in media:
                held[block] = (*media, medium)

    def remove(self, worker_id: str, medium: str, block_hashes: Sequence[int]) -> None:
        held = self.held.get(worker_id, {})
        for block in block_hashes:
            rest = tuple(other for other in held.get(block, ()) if other != medium)
            if rest:
                held[block] = rest
            else:
                held.pop(block, None)

    def remove_worker(self, worker_id: str) -> None:
        self.held.pop(worker_id, None)

    def following(
        self, worker_id: str, sequence: Sequence[int], start: int, costs: Mapping[str, LoadCost]
    ) -> Counter[str]:
        """How many of the blocks from ``start`` on its tiers have, without a gap, by the medium that is the fastest by
        ``costs``. Media without a cost do not count."""
        held, found = self.held.get(worker_id, {}), Counter[str]()
        for at in range(start, len(sequence)):
            known = [costs[medium] for medium in held.get(sequence[at], ()) if medium in costs]
            if not known:
                break
            found[min(known, key=lambda cost: cost.token_s).medium] += 1
        return found


class Lender(msgspec.Struct, frozen=True):
    """A worker that does not compete, of the other stage or about to leave, whose prefix cache has the first
    ``num_blocks`` blocks of a prompt."""

    info: WorkerInfo
    num_blocks: int

    def lends_to(self, info: WorkerInfo) -> bool:
        """Whether that worker may read from this one."""
        is_open = self.info.reads_prefixes and info.reads_prefixes
        return is_open and self.info.kv_compatibility == info.kv_compatibility


class Lenders(msgspec.Struct, frozen=True):
    """Which rows exchange prefixes with which: those of equal KV. Made when the workers change."""

    groups: FloatColumn
    """By row: the number of its kind of KV; -1: it does not exchange prefixes."""

    @property
    def are_any(self) -> bool:
        return bool((self.groups >= 0.0).sum() > 1)

    @classmethod
    def of(cls, infos: Sequence[WorkerInfo]) -> Lenders:
        numbers: dict[str, int] = {}
        groups = [
            numbers.setdefault(info.kv_compatibility, len(numbers)) if info.reads_prefixes else -1 for info in infos
        ]
        return cls(np.array(groups, dtype=np.float64))

    def holders(self, held: FloatColumn) -> tuple[list[int], FloatColumn]:
        """For each row, which other row of its kind holds the most leading blocks, and how many. -1 and 0: none does.
        ``held``: by the workers' events, not by what was placed: it must be there already."""
        rows, depths = [-1] * len(held), np.zeros(len(held))
        for group in set(self.groups.tolist()) - {-1.0}:
            members = np.flatnonzero(self.groups == group).tolist()
            first, second, *_ = *sorted(members, key=lambda row: -held[row])[:2], -1, -1
            for row in members:
                best = second if row == first else first
                if best >= 0 and held[best] > 0:
                    rows[row], depths[row] = best, held[best]
        return rows, depths


def tier_loads(
    worker_ids: Sequence[str],
    sequence: Sequence[int],
    overlaps: FloatColumn,
    block_size: int,
    tiers: TierTable,
    costs: Mapping[str, Mapping[str, LoadCost]],
) -> Loads:
    """What each worker's own tiers would add to its overlap, and in how many seconds."""
    tokens, seconds = np.zeros(len(worker_ids)), np.zeros(len(worker_ids))
    for row, worker_id in enumerate(worker_ids):
        if worker_id not in tiers.held:
            continue
        known = costs.get(worker_id, {})
        for medium, count in tiers.following(worker_id, sequence, int(overlaps[row]), known).items():
            cost = known[medium]
            tokens[row] += count * block_size
            seconds[row] += cost.overhead_s + cost.token_s * count * block_size
    return Loads(tokens, seconds)


def peer_loads(
    worker_ids: Sequence[str],
    reached: FloatColumn,
    depths: FloatColumn,
    block_size: int,
    costs: Mapping[str, Mapping[str, LoadCost]],
) -> Loads:
    """What each worker could read from the one that holds ``depths`` blocks, beyond the ``reached`` tokens that it has.
    One whose costs are not known counts as the slowest of the others."""
    tokens = np.maximum(depths * block_size - reached, 0.0)
    published = [of_worker[PEER] for of_worker in costs.values() if PEER in of_worker]
    slowest = max(published, key=lambda cost: cost.token_s, default=None)
    known = [costs.get(worker_id, {}).get(PEER, slowest) for worker_id in worker_ids]
    token_s = np.array([np.inf if cost is None else cost.token_s for cost in known])
    overhead_s = np.array([0.0 if cost is None else cost.overhead_s for cost in known])
    with np.errstate(invalid="ignore"):
        seconds = np.where(tokens > 0, overhead_s + token_s * tokens, 0.0)
    return Loads(tokens, seconds)
