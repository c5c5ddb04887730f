"""The decode side's ledger of hand-offs: who may write into which of our blocks, and until when.

It owns hand-off ids, generations, grants and their quarantines (design, section 4, rules 1-3 and 5). It does not know
the scheduler: it answers with the ids of requests whose prefill has to be computed here after all.

    opened ──claim──> granted (generation g, blocks quarantined) ──HandoffDone(g)──> done, blocks are ours
       │                 │  ^
       │                 │  └─ second claim: generation g+1 with fresh blocks, the old ones stay quarantined
       │                 └── closed here (abort, local prefill): the grant stays open until its holder has answered
       └── closed        HandoffReleased or HandoffDone of that generation, or is fenced (lease and connection ended)

A *grant* outlives its hand-off. It holds a reference to the prefix-hit blocks that the prefill worker may read, and
the quarantine of those that it may write.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.core.handoff import (
    HandoffAbandon,
    HandoffClaim,
    HandoffDone,
    HandoffGrant,
    HandoffRefused,
    HandoffReleased,
)
from kvrelay.engine.block_pool import BlockPool


@dataclass(slots=True)
class Handoff:
    """A prefill that is to come from elsewhere. ``generation`` 0: not claimed yet. Who is in ``given_up_by`` has said
    that it will not compute it: a claim of theirs that comes later was overtaken by that."""

    handoff_id: str
    request_id: str
    block_ids: tuple[int, ...]
    num_hit_blocks: int
    deadline_s: float
    generation: int = 0
    given_up_by: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Grant:
    """A prefill worker's permission to read ``pinned`` and to write ``quarantined``."""

    claimant: str
    pinned: tuple[int, ...]
    quarantined: tuple[int, ...]


@dataclass(slots=True)
class HandoffCounters:
    """Since start. Stale: named a hand-off or generation that is not current. Refused: claims that were turned down."""

    num_opened: int = 0
    num_granted: int = 0
    num_done: int = 0
    num_stale: int = 0
    num_refused: int = 0
    num_released: int = 0
    num_abandoned: int = 0
    num_expired: int = 0
    num_fenced: int = 0


class HandoffLedger:
    """All hand-offs of one decode worker.

    ``grant_timeout_s`` bounds how long a claimed hand-off may take before its request is computed here;
    ``max_attempts`` how many claims one hand-off may see.
    """

    def __init__(self, pool: BlockPool, worker_id: str, *, grant_timeout_s: float, max_attempts: int) -> None:
        self.counters = HandoffCounters()
        self._pool = pool
        self._worker_id = worker_id
        self._grant_timeout_s = grant_timeout_s
        self._max_attempts = max_attempts
        self._handoffs: dict[str, Handoff] = {}
        self._grants: dict[tuple[str, int], Grant] = {}
        self._abandons: list[tuple[str, HandoffAbandon]] = []

    def __repr__(self) -> str:
        return f"HandoffLedger({len(self._handoffs)} open, {len(self._grants)} grants, {self.counters})"

    @property
    def num_open(self) -> int:
        """Hand-offs whose requests wait for them."""
        return len(self._handoffs)

    @property
    def num_grants(self) -> int:
        """Permissions that are out: until these are zero, peers may touch our memory."""
        return len(self._grants)

    def grants(self) -> list[Grant]:
        return list(self._grants.values())

    def find(self, handoff_id: str) -> Handoff | None:
        return self._handoffs.get(handoff_id)

    def find_grant(self, handoff_id: str, generation: int) -> Grant | None:
        return self._grants.get((handoff_id, generation))

    def open(self, request_id: str, block_ids: tuple[int, ...], num_hit_blocks: int, deadline_s: float) -> Handoff:
        """A request waits for a remote prefill into ``block_ids``, the first ``num_hit_blocks`` of which are computed.

        ``deadline_s``: if nobody has claimed it by then it expires.
        """
        self.counters.num_opened += 1
        handoff_id = f"{self._worker_id}-{self.counters.num_opened}"
        handoff = Handoff(handoff_id, request_id, block_ids, num_hit_blocks, deadline_s)
        self._handoffs[handoff_id] = handoff
        return handoff

    def close(self, handoff_id: str) -> None:
        """Nobody waits for it any more. A claimant is told to stop; its blocks stay quarantined until it has."""
        handoff = self._handoffs.pop(handoff_id)
        self._abandon(handoff)

    def is_exhausted(self, handoff: Handoff) -> bool:
        """Whether no further claim of it will be granted."""
        return handoff.generation >= self._max_attempts

    def drain_abandons(self) -> list[tuple[str, HandoffAbandon]]:
        """Claimant and message, for each grant that was withdrawn since the last call."""
        abandons, self._abandons = self._abandons, []
        return abandons

    # -- what prefill workers say -------------------------------------------------------------------------------------

    def grant(self, claim: HandoffClaim, now_s: float) -> HandoffGrant | HandoffRefused:
        """Let the claimant compute, or say why not. A later claim than the first gets fresh blocks: the first claimant
        is not fenced and may still write to the old ones."""
        handoff = self._handoffs.get(claim.handoff_id)
        if handoff is None:
            return self._refuse(claim, "nobody waits for this hand-off")
        if claim.prefill_worker_id in handoff.given_up_by:
            return self._refuse(claim, "the claimant has given it up")
        if self.is_exhausted(handoff):
            return self._refuse(claim, f"claimed {handoff.generation} times already")
        if handoff.generation and not self._renew_blocks(handoff):
            return self._refuse(claim, "no free blocks to give to another claimant")
        handoff.generation += 1
        handoff.deadline_s = now_s + self._grant_timeout_s
        pinned = handoff.block_ids[: handoff.num_hit_blocks]
        written = handoff.block_ids[handoff.num_hit_blocks :]
        self._pool.acquire(pinned)
        self._pool.quarantine(written)
        self._grants[(handoff.handoff_id, handoff.generation)] = Grant(claim.prefill_worker_id, pinned, written)
        self.counters.num_granted += 1
        return HandoffGrant(
            handoff_id=handoff.handoff_id,
            generation=handoff.generation,
            block_ids=handoff.block_ids,
            num_cached_tokens=handoff.num_hit_blocks * self._pool.block_size,
        )

    def done(self, message: HandoffDone) -> Handoff | None:
        """The last write of a generation has arrived. Returns the hand-off, now closed, if it was the current one.

        One that comes late still ends its own grant: no write follows it.
        """
        known = self._end_grant(message.handoff_id, message.generation)
        handoff = self._handoffs.get(message.handoff_id)
        if not known or handoff is None or handoff.generation != message.generation:
            self.counters.num_stale += 1
            return None
        self.counters.num_done += 1
        del self._handoffs[message.handoff_id]
        return handoff

    def released(self, message: HandoffReleased) -> str | None:
        """The claimant has stopped. Returns the id of the request that is to be computed here, if one still waits.

        Nobody else can say so: another worker's word for it is stale."""
        if message.generation == 0:
            return self._given_up(message.handoff_id, message.prefill_worker_id)
        grant = self._grants.get((message.handoff_id, message.generation))
        is_claimant = grant is not None and grant.claimant == message.prefill_worker_id
        if not is_claimant or not self._end_grant(message.handoff_id, message.generation):
            self.counters.num_stale += 1
            return None
        self.counters.num_released += 1
        handoff = self._handoffs.get(message.handoff_id)
        if handoff is None or handoff.generation != message.generation:
            return None
        del self._handoffs[message.handoff_id]
        return handoff.request_id

    def _given_up(self, handoff_id: str, worker_id: str) -> str | None:
        """``worker_id`` touches nothing of this hand-off any more, whatever it was granted. If nobody else computes it,
        nobody will: the queue entry went with the claim."""
        keys = [key for key, grant in self._grants.items() if key[0] == handoff_id and grant.claimant == worker_id]
        for key in keys:
            self._end_grant(*key)
        self.counters.num_released += len(keys)
        handoff = self._handoffs.get(handoff_id)
        if handoff is None:
            self.counters.num_stale += not keys
            return None
        handoff.given_up_by.add(worker_id)
        if handoff.generation and (handoff_id, handoff.generation) not in keys:
            return None
        del self._handoffs[handoff_id]
        return handoff.request_id

    # -- failures -----------------------------------------------------------------------------------------------------

    def peer_gone(self, worker_id: str) -> list[str]:
        """``worker_id`` is fenced: its lease has ended and its connection is torn down. Ends its grants; returns the
        requests that waited for it."""
        waiting = self.claimed_by(worker_id)
        for key, grant in list(self._grants.items()):
            if grant.claimant == worker_id:
                self._end_grant(*key)
                self.counters.num_fenced += 1
        for handoff in waiting:
            del self._handoffs[handoff.handoff_id]
        return [handoff.request_id for handoff in waiting]

    def claimed_by(self, worker_id: str) -> list[Handoff]:
        """Open hand-offs whose current generation belongs to ``worker_id``."""
        found = []
        for handoff in self._handoffs.values():
            grant = self._grants.get((handoff.handoff_id, handoff.generation))
            if grant is not None and grant.claimant == worker_id:
                found.append(handoff)
        return found

    def unclaimed(self) -> list[Handoff]:
        """Open hand-offs that nobody has claimed yet."""
        return [handoff for handoff in self._handoffs.values() if handoff.generation == 0]

    def expired(self, now_s: float) -> list[Handoff]:
        """Open hand-offs past their deadline: unclaimed for too long, or claimed and not done. They stay open."""
        late = [handoff for handoff in self._handoffs.values() if handoff.deadline_s <= now_s]
        self.counters.num_expired += len(late)
        return late

    # -- inside -------------------------------------------------------------------------------------------------------

    def _refuse(self, claim: HandoffClaim, reason: str) -> HandoffRefused:
        self.counters.num_refused += 1
        return HandoffRefused(claim.handoff_id, reason)

    def _renew_blocks(self, handoff: Handoff) -> bool:
        """Exchange the blocks that the previous claimant may write to for fresh ones, and tell it to stop."""
        hit, old = handoff.block_ids[: handoff.num_hit_blocks], handoff.block_ids[handoff.num_hit_blocks :]
        fresh = self._pool.allocate(len(old), after=hit[-1] if hit else None)
        if fresh is None:
            return False
        self._pool.release(old)
        handoff.block_ids = (*hit, *fresh)
        self._abandon(handoff)
        return True

    def _abandon(self, handoff: Handoff) -> None:
        grant = self._grants.get((handoff.handoff_id, handoff.generation))
        if grant is not None:
            self.counters.num_abandoned += 1
            self._abandons.append((grant.claimant, HandoffAbandon(handoff.handoff_id, handoff.generation)))

    def _end_grant(self, handoff_id: str, generation: int) -> bool:
        grant = self._grants.pop((handoff_id, generation), None)
        if grant is None:
            return False
        self._pool.release(grant.pinned)
        self._pool.lift_quarantine(grant.quarantined)
        return True
