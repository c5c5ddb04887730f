"""One hand-off at the decode worker: its record, its grants, and every way in which it ends.

A hand-off ends when its request needs it no more. A grant ends when its holder is known to have stopped, and a loan
when nothing needs it any more, which may be much later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrelay.core.handoff import HandoffAbandon, HandoffDone, HandoffId, HandoffReady, KvDirection
from kvrelay.errors import IllegalTransitionError
from kvrelay.handoff.base import Connection, EndReason, RefusalReason, count_end
from kvrelay.handoff.decode_events import Claimed, ComputeHere, EndLoan, Send
from kvrelay.handoff.decode_state import (
    TRANSITIONS,
    WAITING_FOR_CLAIMANT,
    DecodeRules,
    DecodeState,
    Grant,
    GrantState,
    Turn,
    refuse,
)


@dataclass(slots=True)
class DecodeEnds:
    """The record and its ends. Every field holds an immutable value."""

    handoff_id: HandoffId
    request_id: str
    direction: KvDirection
    claimant: str | None
    block_ids: tuple[int, ...]
    num_hit_blocks: int
    deadline_s: float
    term: int = 0
    """Our own term when it was opened."""
    num_tokens: int = 0
    """Tokens to be prefilled; 0: as many as the blocks hold."""
    loans: tuple[int, ...] = ()
    """Loans that the engine has not got back."""
    loan: int = 0
    """The current loan, of ``block_ids``; 0: none yet."""
    state: DecodeState = DecodeState.OPEN
    generation: int = 0
    grants: tuple[Grant, ...] = ()
    given_up_by: frozenset[str] = frozenset()
    """Workers that have released it: a later claim of theirs was sent before the release."""
    waiting: Claimed | None = None
    """RENEWING: the claim to be granted."""
    allocating: int = 0
    """The loan that was requested from the engine; 0: none."""
    arrived: HandoffDone | HandoffReady | None = None
    is_touched: bool = False
    """Whether our own reads or checksums touch the current loan."""
    heard_s: float = 0.0
    """The time of the current claimant's grant or of its last sign of progress."""
    granted_s: float = 0.0
    """The time of the current claimant's claim."""
    is_queued: bool = False
    """Decode-first, and pushed to the queue."""
    is_overtaken: bool = False
    owed: EndReason | None = None
    """Why the request will be computed here, until the engine has been told."""

    # -- ends ---------------------------------------------------------------------------------------------------------

    def closed(self, turn: Turn) -> None:
        """The request no longer waits. Tell claimants to stop; their grants stay until they have."""
        self.owed = None
        if self.state is DecodeState.CLOSED:
            return
        self._move(DecodeState.CLOSED)
        if self.waiting is not None:
            refuse(self.waiting, RefusalReason.UNKNOWN, turn)
            self.waiting = None
        for grant in self.grants:
            self._abandon(grant, turn)

    def compute_here(self, reason: EndReason, turn: Turn) -> None:
        """No KV will arrive. Tell the engine at once, or, if it cannot use other blocks, when the loans have ended."""
        if self.state is not DecodeState.CLOSED:
            self.closed(turn)
            self.owed = reason
            count_end(turn.counters.ends, reason)

    def declined(self, worker_id: str, reason: EndReason, turn: Turn) -> None:
        """A claim was refused, and the queue entry is gone: unless another claimant computes it, the request is
        computed here."""
        self.given_up_by |= {worker_id}
        self._compute_unless_held(reason, turn)

    def released(self, worker_id: str, reason: EndReason, turn: Turn) -> None:
        """``worker_id`` touches no block of it any more, under any grant, and will not compute it.

        Its queue entry is gone: if no other claimant computes it now, none will.
        """
        mine = [grant for grant in self.grants if grant.worker_id == worker_id]
        turn.counters.num_released += len(mine)
        turn.counters.num_stale += not mine and worker_id in self.given_up_by
        self.given_up_by |= {worker_id}
        holder = self.holder
        if holder is not None and holder.worker_id == worker_id and self.state in WAITING_FOR_CLAIMANT:
            self._failed(turn)
        for grant in mine:
            self._stopped(grant)
        self._drop_waiting(self.waiting is not None and self.waiting.claim.prefill_worker_id == worker_id)
        self._compute_unless_held(reason, turn)

    def fenced(self, worker_id: str, turn: Turn) -> None:
        """``worker_id`` is fenced: it can write no more, alive or not."""
        for grant in self.grants:
            if grant.worker_id == worker_id:
                turn.counters.num_fenced += 1
                self._stopped(grant)
        if self.state is not DecodeState.OPEN:
            self._compute_unless_held(EndReason.CLAIMANT_LEASE_ENDED, turn)

    def claimant_gone(self, turn: Turn) -> None:
        """Its only claimant will not claim it. If it has claimed already, its connection and its lease decide."""
        if self.state is DecodeState.OPEN:
            self.compute_here(EndReason.CLAIMANT_LOST, turn)

    def lease_ended(self, worker_id: str, turn: Turn) -> None:
        """Stop waiting for ``worker_id``. Its writes may continue, so its grants stay until it releases them or is
        fenced."""
        if self.state is DecodeState.OPEN and self.claimant == worker_id:
            self.compute_here(EndReason.CLAIMANT_LEASE_ENDED, turn)
            return
        waiting, holder = self.waiting, self.holder
        self._drop_waiting(waiting is not None and waiting.claim.prefill_worker_id == worker_id)
        if holder is not None and holder.worker_id == worker_id:
            self._lose_holder(EndReason.CLAIMANT_LEASE_ENDED, turn)

    def connection_lost(self, connection: Connection, turn: Turn) -> None:
        """The same for a claimant whose connection has ended."""
        waiting, holder = self.waiting, self.holder
        self._drop_waiting(waiting is not None and waiting.connection == connection)
        if holder is not None and holder.connection == connection:
            self._lose_holder(EndReason.CLAIMANT_LOST, turn)

    def _lose_holder(self, reason: EndReason, turn: Turn) -> None:
        if self.state in WAITING_FOR_CLAIMANT:
            self._failed(turn)
        if self.state in WAITING_FOR_CLAIMANT and self.waiting is None:
            self.compute_here(reason, turn)

    def _drop_waiting(self, is_lost: bool) -> None:
        """Forget the claim that waits for blocks."""
        if is_lost:
            self.waiting = None
            self._move(DecodeState.GRANTED)

    def _compute_unless_held(self, reason: EndReason, turn: Turn) -> None:
        if self.state in WAITING_FOR_CLAIMANT and self.holder is None and self.waiting is None:
            self.compute_here(reason, turn)

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self, turn: Turn) -> None:
        """Check deadlines, and repeat abandons that are not answered."""
        if self.deadline_s <= turn.now_s and self.state in WAITING_FOR_CLAIMANT:
            self._expire(EndReason.OVERTAKEN if self.is_overtaken else EndReason.DEADLINE, turn)
        elif self.is_awaited and self.heard_s + turn.rules.silence_timeout_s <= turn.now_s:
            self._expire(EndReason.CLAIMANT_SILENT, turn)
        for grant in self.grants:
            if grant.state is GrantState.ABANDONED and grant.told_s + turn.rules.abandon_repeat_s <= turn.now_s:
                self.tell_to_stop(grant, turn)

    def _expire(self, reason: EndReason, turn: Turn) -> None:
        turn.counters.num_expired += 1
        self._failed(turn)
        self.compute_here(reason, turn)

    def _failed(self, turn: Turn) -> None:
        """The holder has had its grant for long, and has not done what it is for."""
        holder = self.holder
        if holder is not None and holder.state is GrantState.OUT and self.granted_s + turn.rules.held_s < turn.now_s:
            turn.conduct.failed(holder.worker_id, turn.now_s, turn.rules.avoid_s)

    def avoid(self, worker_ids: frozenset[str], turn: Turn) -> None:
        """Do not wait for these workers."""
        holder = self.holder
        if self.state is DecodeState.GRANTED and holder is not None and holder.worker_id in worker_ids:
            self.compute_here(EndReason.CLAIMANT_AVOIDED, turn)

    def overtaken(self, turn: Turn) -> None:
        """A later one of the same queue has been claimed: whoever has pulled this one, if anyone has, keeps silent."""
        if self.state is DecodeState.OPEN and turn.now_s + turn.rules.overtaken_s < self.deadline_s:
            self.deadline_s = turn.now_s + turn.rules.overtaken_s
            self.is_overtaken = True

    def next_s(self, rules: DecodeRules) -> float | None:
        """When ``tick`` is due next."""
        times = [g.told_s + rules.abandon_repeat_s for g in self.grants if g.state is GrantState.ABANDONED]
        if self.state in WAITING_FOR_CLAIMANT:
            times.append(self.deadline_s)
        if self.is_awaited:
            times.append(self.heard_s + rules.silence_timeout_s)
        return min(times, default=None)

    @property
    def is_awaited(self) -> bool:
        """Whether the claimant has its grant, and only its computation is missing."""
        holder = self.holder
        return self.state is DecodeState.GRANTED and holder is not None and holder.state is GrantState.OUT

    # -- loans --------------------------------------------------------------------------------------------------------

    def settle(self, turn: Turn) -> None:
        """End every loan that nothing needs any more."""
        needed = {grant.loan for grant in self.grants}
        if self.state is not DecodeState.CLOSED or self.is_touched:
            needed.add(self.loan)
        for loan in self.loans:
            if loan not in needed:
                turn.out.append(EndLoan(self.handoff_id, loan))
        self.loans = tuple(loan for loan in self.loans if loan in needed)
        self._pay(turn)

    def _pay(self, turn: Turn) -> None:
        if self.owed is not None and (turn.rules.can_replace_blocks or not self.loans):
            turn.out.append(ComputeHere(self.handoff_id, self.request_id, self.owed))
            self.owed = None

    @property
    def is_over(self) -> bool:
        """Whether the hand-off can be forgotten."""
        return (
            self.state is DecodeState.CLOSED
            and not self.grants
            and not self.loans
            and not self.allocating
            and not self.is_touched
        )

    # -- grants -------------------------------------------------------------------------------------------------------

    @property
    def holder(self) -> Grant | None:
        """The grant of the current generation, if its claimant is expected to compute."""
        grant = self.find(self.generation)
        return grant if grant is not None and grant.state in (GrantState.PREPARING, GrantState.OUT) else None

    def find(self, generation: int) -> Grant | None:
        """The grant of that generation, if it has not ended."""
        return next((grant for grant in self.grants if grant.generation == generation), None)

    def _change(self, grant: Grant, state: GrantState, now_s: float) -> Grant:
        changed = replace(grant, state=state, told_s=now_s)
        self.grants = tuple(changed if other is grant else other for other in self.grants)
        return changed

    def _end_grant(self, grant: Grant) -> None:
        self.grants = tuple(other for other in self.grants if other is not grant)

    def _stopped(self, grant: Grant) -> None:
        """End a grant: its claimant does nothing more. Our own running checksums and reads keep it."""
        if grant.state is GrantState.PREPARING:
            self._change(grant, GrantState.WITHDRAWN, 0.0)
        elif grant.state is not GrantState.WITHDRAWN and not self._is_read_from(grant):
            self._end_grant(grant)

    def _abandon(self, grant: Grant, turn: Turn) -> None:
        if grant.state is GrantState.PREPARING:
            self._change(grant, GrantState.WITHDRAWN, 0.0)
        elif grant.state is GrantState.OUT and not self._is_read_from(grant):
            turn.counters.num_abandoned += 1
            self.tell_to_stop(grant, turn)

    def _is_read_from(self, grant: Grant) -> bool:
        """Pull: P must keep its blocks while we read them; HandoffFetched follows the read."""
        return self.is_touched and self.direction is KvDirection.PULL and grant.generation == self.generation

    def tell_to_stop(self, grant: Grant, turn: Turn) -> None:
        """Send an abandon, over the claimant's current connection, if it has one."""
        self._change(grant, GrantState.ABANDONED, turn.now_s)
        connection = turn.connections.get(grant.worker_id)
        if connection is not None:
            abandon = HandoffAbandon(self.handoff_id, grant.generation)
            turn.out.append(Send(connection, abandon))

    def _move(self, state: DecodeState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(f"hand-off {self.handoff_id} cannot go from {self.state} to {state}")
        self.state = state
