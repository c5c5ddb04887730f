"""One hand-off at the decode worker: which claim gets a grant."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.core.handoff import HandoffGrant, KvDirection
from kvrelay.handoff.base import EndReason, RefusalReason
from kvrelay.handoff.decode_ends import DecodeEnds
from kvrelay.handoff.decode_events import Allocate, Allocated, ChecksumHits, Claimed, SendGrant
from kvrelay.handoff.decode_state import DecodeState, Grant, GrantState, Turn, refuse


@dataclass(slots=True)
class DecodeClaims(DecodeEnds):
    """Claims and grants. A later claimant gets other blocks."""

    def claimed(self, event: Claimed, turn: Turn) -> None:
        """Grant the claim or refuse it. A later claimant gets other blocks, because the first may still write to the
        old ones."""
        worker_id = event.claim.prefill_worker_id
        if worker_id in self.given_up_by:
            refuse(event, RefusalReason.GIVEN_UP, turn)
        elif self.claimant not in (None, worker_id):
            refuse(event, RefusalReason.ANOTHER_CLAIMANT, turn)
        elif self._is_served(worker_id):
            return  # a duplicate of a claim that is being answered
        elif self.state is DecodeState.CLOSED:
            refuse(event, RefusalReason.UNKNOWN, turn)
        elif self.state not in (DecodeState.OPEN, DecodeState.GRANTED):
            refuse(event, RefusalReason.BUSY, turn)
        elif self.generation >= turn.rules.max_attempts:
            refuse(event, RefusalReason.EXHAUSTED, turn)
            self.compute_here(EndReason.CLAIMS_EXHAUSTED, turn)
        elif self.state is DecodeState.OPEN or self.direction is KvDirection.PULL:
            self._abandon_holder(turn)
            self._grant(event, turn)
        else:
            self._move(DecodeState.RENEWING)
            self.waiting = event
            self._allocate(turn)

    def _is_served(self, worker_id: str) -> bool:
        """Whether ``worker_id`` holds or awaits a grant: each worker claims a hand-off once."""
        waits = self.waiting is not None and self.waiting.claim.prefill_worker_id == worker_id
        return waits or any(grant.worker_id == worker_id for grant in self.grants)

    def _abandon_holder(self, turn: Turn) -> None:
        if self.holder is not None:
            self._abandon(self.holder, turn)

    def _allocate(self, turn: Turn) -> None:
        """Request the next loan from the engine, unless a request is pending."""
        if not self.allocating:
            self.allocating = self.loan + 1
            turn.out.append(Allocate(self.handoff_id, self.allocating))

    def _renewed(self, event: Allocated, waiting: Claimed, turn: Turn) -> None:
        if event.block_ids is not None:
            self._abandon_holder(turn)
            self.loan, self.block_ids = event.loan, event.block_ids
            self._grant(waiting, turn)
            return
        refuse(waiting, RefusalReason.NO_BLOCKS, turn)
        self._move(DecodeState.GRANTED)
        if self.holder is None:
            self.compute_here(EndReason.RELEASED, turn)

    def _grant(self, event: Claimed, turn: Turn) -> None:
        worker_id = event.claim.prefill_worker_id
        self.generation += 1
        self.deadline_s = turn.now_s + turn.rules.grant_timeout_s
        self.granted_s, self.is_overtaken = turn.now_s, False
        if self.state is not DecodeState.GRANTED:
            self._move(DecodeState.GRANTED)
        turn.counters.num_granted += 1
        with_checksums = event.claim.wants_checksums or turn.rules.checksums
        must_prepare = with_checksums and self.num_hit_blocks > 0
        state = GrantState.PREPARING if must_prepare else GrantState.OUT
        size, secret = event.claim.block_size, turn.new_secret()
        grant = Grant(worker_id, event.connection, self.generation, self.loan, state, size, secret=secret)
        self.grants = (*self.grants, grant)
        if must_prepare:
            turn.out.append(ChecksumHits(self.handoff_id, self.generation, self.block_ids[: self.num_hit_blocks]))
        else:
            self._send_grant(grant, () if with_checksums else None, turn)

    def hits_checksummed(self, generation: int, checksums: tuple[int, ...] | None, turn: Turn) -> None:
        """The grant of ``generation`` can be sent, if it is still needed."""
        grant = self.find(generation)
        if grant is None:
            return
        if grant.state is GrantState.WITHDRAWN:
            self._end_grant(grant)
        elif grant.state is GrantState.PREPARING:
            grant = self._change(grant, GrantState.OUT, turn.now_s)
            self._send_grant(grant, checksums, turn)

    def _send_grant(self, grant: Grant, checksums: tuple[int, ...] | None, turn: Turn) -> None:
        self.heard_s = turn.now_s
        pushed = self.direction is KvDirection.PUSH
        message = HandoffGrant(
            handoff_id=self.handoff_id,
            generation=grant.generation,
            block_ids=self.block_ids if pushed else self.block_ids[: self.num_hit_blocks],
            num_cached_tokens=self.num_hit_blocks * turn.rules.block_size,
            checksums=checksums,
            direction=self.direction,
            term=self.term,
            block_size=turn.rules.block_size,
            secret=grant.secret,
        )
        turn.out.append(SendGrant(grant.worker_id, grant.connection, message))

    def not_sent(self, generation: int, turn: Turn) -> None:
        """The grant was not sent: its claimant will write nothing."""
        grant = self.find(generation)
        if grant is not None:
            self._end_grant(grant)
            self._compute_unless_held(EndReason.GRANT_NOT_SENT, turn)
