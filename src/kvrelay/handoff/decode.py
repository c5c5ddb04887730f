"""One hand-off at the decode worker: which peer may write its blocks, or is read from, and how its request
continues.

    OPEN ──claim──> GRANTED ──Done──────────────────> VERIFYING ──ok──> CLOSED (Resume)
      │              │  ^  └─Ready──> [OFFERED ──>] READING ──^  │
      │     2nd claim│  │blocks            │           │         └damaged─> CLOSED (ComputeHere)
      │              v  │                  │           └failed────────────> CLOSED (ComputeHere)
      │            RENEWING                │
      └──────────────┴─────────────────────┴── abort, release, lost claimant, deadline ──> CLOSED

Without checksums VERIFYING ends at once. OFFERED waits for blocks to read into.

A *grant* outlives its hand-off: it keeps its loan until its holder is known to have stopped.

A prefix that another worker reads is lent without a request: such a hand-off is CLOSED from the start, and lasts as
long as its grant.

    PREPARING ──hits checksummed──> OUT ──hand-off closed, another claimant──> ABANDONED ──Done, Released, fenced──> end
        └──no longer wanted──> WITHDRAWN ──hits checksummed──> end      (OUT ends in the same ways)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvrelay.core.handoff import HandoffId, KvDirection
from kvrelay.core.layout import BlockRun
from kvrelay.errors import IllegalTransitionError
from kvrelay.handoff import decode_events as de
from kvrelay.handoff import messages as hm
from kvrelay.handoff.base import Connection, EndReason, RefusalReason, count_end
from kvrelay.handoff.decode_state import (
    TRANSITIONS,
    WAITING_FOR_CLAIMANT,
    DecodeContext,
    DecodeRules,
    DecodeState,
    Grant,
    GrantState,
    acknowledge,
    refuse,
)


@dataclass(slots=True)
class DecodeHandoff:
    """The state machine. Methods are events; ``settle`` follows each of them. Every field holds an immutable value."""

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
    """Tokens to be prefilled."""
    loans: tuple[int, ...] = ()
    """Loans that the engine has not got back."""
    loan: int = 0
    """The current loan, of ``block_ids``; 0: none yet."""
    state: DecodeState = DecodeState.OPEN
    generation: int = 0
    grants: tuple[Grant, ...] = ()
    given_up_by: frozenset[str] = frozenset()
    """Workers that have released it: a later claim of theirs was sent before the release."""
    waiting: de.Claimed | None = None
    """RENEWING: the claim to be granted."""
    allocating: int = 0
    """The loan that was requested from the engine; 0: none."""
    arrived: hm.HandoffDone | hm.HandoffReady | None = field(default=None, repr=False)
    is_touched: bool = False
    """Whether our own reads or checksums touch the current loan."""
    last_heard_s: float = 0.0
    """The time of the current claimant's grant or of its last sign of progress."""
    granted_s: float = 0.0
    """The time of the current claimant's claim."""
    recall_s: float | None = None
    """When its holder is asked to give it back unless it has begun; None: not, or it was asked."""
    is_recalled: bool = False
    is_queued: bool = False
    """Decode-first, and pushed to the queue."""
    is_overtaken: bool = False
    is_prefix: bool = False
    """No request waits: a peer reads blocks of the prefix cache."""
    owed: EndReason | None = None
    """Why the request will be computed here, until the engine has been told."""

    # -- claims -------------------------------------------------------------------------------------------------------

    def claimed(self, event: de.Claimed, context: DecodeContext) -> None:
        """Grant the claim or refuse it. A later claimant gets other blocks, because the first may still write to the
        old ones."""
        worker_id = event.claim.prefill_worker_id
        if worker_id in self.given_up_by:
            refuse(event, RefusalReason.GIVEN_UP, context)
        elif self.claimant not in (None, worker_id):
            refuse(event, RefusalReason.ANOTHER_CLAIMANT, context)
        elif self._is_served(worker_id):
            return  # a duplicate of a claim that is being answered
        elif self.is_prefix and self.allocating:
            refuse(event, RefusalReason.BUSY, context)  # the engine lends it for a claim that is gone
        elif self.is_prefix and event.claim.prefix is not None and not self.generation:
            self.waiting, self.allocating = event, 1
            context.out.append(de.LendPrefix(self.handoff_id, event.claim.prefix))
        elif self.state is DecodeState.CLOSED:
            refuse(event, RefusalReason.UNKNOWN, context)
        elif self.state not in (DecodeState.OPEN, DecodeState.GRANTED):
            refuse(event, RefusalReason.BUSY, context)
        elif self.generation >= context.rules.max_attempts:
            refuse(event, RefusalReason.EXHAUSTED, context)
            self.compute_here(EndReason.CLAIMS_EXHAUSTED, context)
        elif self.state is DecodeState.OPEN or self.direction is KvDirection.PULL:
            self._abandon_holder(context)
            self._grant(event, context)
        else:
            self._move(DecodeState.RENEWING)
            self.waiting = event
            self._allocate(context)

    def _is_served(self, worker_id: str) -> bool:
        """Whether ``worker_id`` holds or awaits a grant: each worker claims a hand-off once."""
        waits = self.waiting is not None and self.waiting.claim.prefill_worker_id == worker_id
        return waits or any(grant.worker_id == worker_id for grant in self.grants)

    def _abandon_holder(self, context: DecodeContext) -> None:
        if self.holder is not None:
            self._abandon(self.holder, context)

    def _allocate(self, context: DecodeContext) -> None:
        """Request the next loan from the engine, unless a request is pending."""
        if not self.allocating:
            self.allocating = self.loan + 1
            context.out.append(de.AllocateLoan(self.handoff_id, self.allocating))

    def _renewed(self, event: de.LoanAllocated, waiting: de.Claimed, context: DecodeContext) -> None:
        if event.block_ids is not None:
            self._abandon_holder(context)
            self.loan, self.block_ids = event.loan, event.block_ids
            self._grant(waiting, context)
            return
        refuse(waiting, RefusalReason.NO_BLOCKS, context)
        self._move(DecodeState.GRANTED)
        if self.holder is None:
            self.compute_here(EndReason.RELEASED, context)

    def _grant(self, event: de.Claimed, context: DecodeContext) -> None:
        worker_id = event.claim.prefill_worker_id
        self.generation += 1
        self.deadline_s = context.now_s + context.rules.grant_timeout_s
        self.granted_s, self.is_overtaken = context.now_s, False
        if self.state not in (DecodeState.GRANTED, DecodeState.CLOSED):
            self._move(DecodeState.GRANTED)
        context.counters.num_granted += 1
        with_checksums = event.claim.wants_checksums or context.rules.checksums
        must_prepare = with_checksums and self.num_hit_blocks > 0
        state = GrantState.PREPARING if must_prepare else GrantState.OUT
        size, secret = event.claim.block_size, context.new_secret()
        grant = Grant(worker_id, event.connection, self.generation, self.loan, state, size, secret=secret)
        self.grants = (*self.grants, grant)
        if must_prepare:
            context.out.append(de.ChecksumHits(self.handoff_id, self.generation, self.block_ids[: self.num_hit_blocks]))
        else:
            self._send_grant(grant, () if with_checksums else None, context)

    def hits_checksummed(self, generation: int, checksums: tuple[int, ...] | None, context: DecodeContext) -> None:
        """The grant of ``generation`` can be sent, if it is still needed."""
        grant = self.find(generation)
        if grant is None:
            return
        if grant.state is GrantState.WITHDRAWN:
            self._end_grant(grant)
        elif grant.state is GrantState.PREPARING:
            grant = self._change(grant, GrantState.OUT, context.now_s)
            self._send_grant(grant, checksums, context)

    def _send_grant(self, grant: Grant, checksums: tuple[int, ...] | None, context: DecodeContext) -> None:
        self.last_heard_s = context.now_s
        pushed = self.direction is KvDirection.PUSH
        message = hm.HandoffGrant(
            handoff_id=self.handoff_id,
            generation=grant.generation,
            block_ids=self.block_ids if pushed else self.block_ids[: self.num_hit_blocks],
            num_cached_tokens=self.num_hit_blocks * context.rules.block_size,
            checksums=checksums,
            direction=self.direction,
            term=self.term,
            block_size=context.rules.block_size,
            secret=grant.secret,
            regions=context.rules.regions,
            tail_tokens=context.rules.tail_tokens,
        )
        context.out.append(de.SendGrant(grant.worker_id, grant.connection, message, grant.loan))

    def not_sent(self, generation: int, context: DecodeContext) -> None:
        """The grant was not sent: its claimant will write nothing."""
        grant = self.find(generation)
        if grant is not None:
            self._end_grant(grant)
            self._compute_unless_held(EndReason.GRANT_NOT_SENT, context)

    # -- what arrives -------------------------------------------------------------------------------------------------

    def progress(self, message: hm.HandoffProgress, context: DecodeContext) -> None:
        """The claimant lives and computes."""
        holder = self.holder
        if holder is not None and (message.generation, message.secret) == (holder.generation, holder.secret):
            self.last_heard_s = context.now_s
        else:
            context.counters.num_stale += 1

    def allocated(self, event: de.LoanAllocated, context: DecodeContext) -> None:
        """The engine's answer to a requested loan."""
        if event.loan != self.allocating:
            return
        self.allocating = 0
        if event.block_ids is not None:
            self.loans = (*self.loans, event.loan)
        waiting, self.waiting = self.waiting, None
        if self.state is DecodeState.OFFERED:
            self._read(event, context)
        elif self.state is DecodeState.RENEWING and waiting is not None:
            self._renewed(event, waiting, context)
        elif self.is_prefix and waiting is not None:
            self._lent(event, waiting, context)
        elif waiting is not None:
            refuse(waiting, RefusalReason.UNKNOWN, context)

    def _lent(self, event: de.LoanAllocated, waiting: de.Claimed, context: DecodeContext) -> None:
        if event.block_ids is None:
            refuse(waiting, RefusalReason.NO_PREFIX, context)
            return
        self.loan, self.block_ids, self.num_hit_blocks = event.loan, event.block_ids, len(event.block_ids)
        self._grant(waiting, context)
        self.deadline_s = context.now_s + context.rules.prefix_timeout_s

    # -- push ---------------------------------------------------------------------------------------------------------

    def done(self, message: hm.HandoffDone, connection: Connection | None, context: DecodeContext) -> None:
        """Push: a generation's last write has arrived. A late one still ends its own grant: no write follows it.

        ``connection``: the one of a repeated message; None: it was the notification.
        """
        grant = self.find(message.generation)
        if grant is None:
            context.counters.num_stale += 1
            acknowledge(message, connection, context)
            return
        is_known = grant.state in (GrantState.OUT, GrantState.ABANDONED)
        if not is_known or grant.secret != message.secret:
            context.counters.num_stale += 1
            return
        acknowledge(message, connection or context.connections.get(grant.worker_id, grant.connection), context)
        self._end_grant(grant)
        context.conduct.done(grant.worker_id)
        is_current = message.generation == self.generation
        if not is_current or self.state not in (DecodeState.GRANTED, DecodeState.RENEWING):
            context.counters.num_stale += 1
            return
        self._arrived(message, grant.worker_id, context)

    # -- pull ---------------------------------------------------------------------------------------------------------

    def ready(self, message: hm.HandoffReady, context: DecodeContext) -> bool:
        """Pull: P keeps the KV for us. False if it need not."""
        grant = self.find(message.generation)
        if grant is not None and self._is_read_from(grant):
            return True
        if grant is None or grant.state is not GrantState.OUT or message.generation != self.generation:
            return False
        if grant.secret != message.secret:
            return False
        if self.state is DecodeState.GRANTED:
            self.arrived = message
            if self.loan or message.kv_transfer_params is not None:
                self._start_read(message, grant, context)
            else:
                self._move(DecodeState.OFFERED)
                self._allocate(context)
        return self.state in (DecodeState.OFFERED, DecodeState.READING)

    def _read(self, event: de.LoanAllocated, context: DecodeContext) -> None:
        """Blocks to read into are available."""
        holder = self.holder
        if event.block_ids is None:
            self.compute_here(EndReason.NO_BLOCKS, context)
        elif holder is not None and isinstance(self.arrived, hm.HandoffReady):
            self.loan, self.block_ids = event.loan, event.block_ids
            self._start_read(self.arrived, holder, context)

    def _start_read(self, message: hm.HandoffReady, grant: Grant, context: DecodeContext) -> None:
        if message.kv_transfer_params is not None:
            self._move(DecodeState.READING)
            self.is_touched = True
            params = message.kv_transfer_params
            context.out.append(de.Fetch(self.handoff_id, grant.generation, grant.worker_id, kv_transfer_params=params))
            return
        ours, theirs = context.rules.block_size, grant.block_size or context.rules.block_size
        first = self.num_hit_blocks * ours // theirs if theirs > 0 else 0
        if theirs < 1 or len(message.block_ids) != -(-self.num_tokens // theirs) - first:
            self.compute_here(EndReason.READ_FAILED, context)
            return
        self._move(DecodeState.READING)
        self.is_touched = True
        here = BlockRun(self.num_hit_blocks, self.block_ids[self.num_hit_blocks :])
        there = BlockRun(first, message.block_ids)
        context.out.append(de.Fetch(self.handoff_id, grant.generation, grant.worker_id, here, there, theirs))

    def read_ended(self, generation: int, ok: bool, context: DecodeContext) -> None:
        """Pull: our read has ended, so P may free its blocks."""
        grant = self.find(generation)
        self.is_touched = False
        if grant is not None:
            # P's engine frees what ours has not read; if this message is lost, P says Ready again and is told again.
            kind = hm.HandoffAbandon if _is_by_engine(self.arrived) and not ok else hm.HandoffFetched
            context.out.append(de.SendToPrefill(grant.connection, kind(self.handoff_id, generation)))
            self._end_grant(grant)
            if ok:
                context.conduct.done(grant.worker_id)
        if self.state is not DecodeState.READING or self.arrived is None:
            return
        if ok:
            self._arrived(self.arrived, "" if grant is None else grant.worker_id, context)
        else:
            self.compute_here(EndReason.READ_FAILED, context)

    # -- everything has arrived ---------------------------------------------------------------------------------------

    def _arrived(self, message: hm.HandoffDone | hm.HandoffReady, worker_id: str, context: DecodeContext) -> None:
        self.arrived = message
        if self.waiting is not None:
            refuse(self.waiting, RefusalReason.BUSY, context)
            self.waiting = None
        self._move(DecodeState.VERIFYING)
        if _is_by_engine(message) or (message.checksums is None and not context.rules.checksums):
            self._resume(context)
            return
        self.is_touched = True
        blocks, size = self.block_ids[self.num_hit_blocks :], context.rules.block_size
        unit = context.rules.unit_tokens
        num_units = -(-self.num_tokens // unit) - self.num_hit_blocks * size // unit
        verify = de.Verify(self.handoff_id, message.generation, worker_id, blocks, message.checksums, num_units)
        context.out.append(verify)

    def verified(self, ok: bool, context: DecodeContext) -> None:
        """The received blocks were compared with their checksums."""
        self.is_touched = False
        if self.state is not DecodeState.VERIFYING:
            context.counters.num_stale += 1
        elif ok:
            self._resume(context)
        else:
            self.compute_here(EndReason.KV_DAMAGED, context)

    def _resume(self, context: DecodeContext) -> None:
        assert self.arrived is not None, "something has arrived"
        context.counters.num_done += 1
        self._move(DecodeState.CLOSED)
        context.out.append(de.Resume(self.handoff_id, self.request_id, self.loan, self.arrived))

    # -- ends ---------------------------------------------------------------------------------------------------------

    def closed(self, context: DecodeContext) -> None:
        """The request no longer waits. Tell claimants to stop; their grants stay until they have."""
        self.owed = None
        if self.state is DecodeState.CLOSED:
            return
        self._move(DecodeState.CLOSED)
        if self.waiting is not None:
            refuse(self.waiting, RefusalReason.UNKNOWN, context)
            self.waiting = None
        for grant in self.grants:
            self._abandon(grant, context)

    def compute_here(self, reason: EndReason, context: DecodeContext) -> None:
        """No KV will arrive. Tell the engine at once, or, if it cannot use other blocks, when the loans have ended."""
        if self.state is not DecodeState.CLOSED:
            self.closed(context)
            self.owed = reason
            count_end(context.counters.ends, reason)

    def declined(self, worker_id: str, reason: EndReason, context: DecodeContext) -> None:
        """A claim was refused, and the queue entry is gone: unless another claimant computes it, the request is
        computed here."""
        self.given_up_by |= {worker_id}
        self._compute_unless_held(reason, context)

    def released(self, worker_id: str, context: DecodeContext) -> None:
        """``worker_id`` touches no block of it any more, under any grant, and will not compute it.

        Its queue entry is gone: if no other claimant computes it now, none will.
        """
        mine = [grant for grant in self.grants if grant.worker_id == worker_id]
        context.counters.num_released += len(mine)
        context.counters.num_stale += not mine and worker_id in self.given_up_by
        self.given_up_by |= {worker_id}
        holder = self.holder
        is_held = holder is not None and holder.worker_id == worker_id and self.state in WAITING_FOR_CLAIMANT
        if is_held and not self.is_recalled:
            self._failed(context)
        for grant in mine:
            self._stopped(grant)
        self._drop_waiting(self.waiting is not None and self.waiting.claim.prefill_worker_id == worker_id)
        self._compute_unless_held(EndReason.RECALLED if self.is_recalled else EndReason.RELEASED, context)

    def fenced(self, worker_id: str, context: DecodeContext) -> None:
        """``worker_id`` is fenced: it can write no more, alive or not."""
        for grant in self.grants:
            if grant.worker_id == worker_id:
                context.counters.num_fenced += 1
                self._stopped(grant)
        if self.state is not DecodeState.OPEN:
            self._compute_unless_held(EndReason.CLAIMANT_LEASE_ENDED, context)

    def claimant_gone(self, context: DecodeContext) -> None:
        """Its only claimant will not claim it. If it has claimed already, its connection and its lease decide."""
        if self.state is DecodeState.OPEN:
            self.compute_here(EndReason.CLAIMANT_LOST, context)

    def lease_ended(self, worker_id: str, context: DecodeContext) -> None:
        """Stop waiting for ``worker_id``. Its writes may continue, so its grants stay until it releases them or is
        fenced."""
        if self.state is DecodeState.OPEN and self.claimant == worker_id:
            self.compute_here(EndReason.CLAIMANT_LEASE_ENDED, context)
            return
        waiting, holder = self.waiting, self.holder
        self._drop_waiting(waiting is not None and waiting.claim.prefill_worker_id == worker_id)
        if holder is not None and holder.worker_id == worker_id:
            self._lose_holder(EndReason.CLAIMANT_LEASE_ENDED, context)

    def connection_lost(self, connection: Connection, context: DecodeContext) -> None:
        """The same for a claimant whose connection has ended."""
        waiting, holder = self.waiting, self.holder
        self._drop_waiting(waiting is not None and waiting.connection == connection)
        if holder is not None and holder.connection == connection:
            self._lose_holder(EndReason.CLAIMANT_LOST, context)

    def _lose_holder(self, reason: EndReason, context: DecodeContext) -> None:
        if self.state in WAITING_FOR_CLAIMANT:
            self._failed(context)
        if self.state in WAITING_FOR_CLAIMANT and self.waiting is None:
            self.compute_here(reason, context)

    def _drop_waiting(self, is_lost: bool) -> None:
        """Forget the claim that waits for blocks."""
        if is_lost:
            self.waiting = None
            if self.state is DecodeState.RENEWING:
                self._move(DecodeState.GRANTED)

    def _compute_unless_held(self, reason: EndReason, context: DecodeContext) -> None:
        if self.state in WAITING_FOR_CLAIMANT and self.holder is None and self.waiting is None:
            self.compute_here(reason, context)

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self, context: DecodeContext) -> None:
        """Check deadlines, and repeat abandons that are not answered."""
        if self.deadline_s <= context.now_s and self.state in WAITING_FOR_CLAIMANT:
            self._expire(EndReason.OVERTAKEN if self.is_overtaken else EndReason.DEADLINE, context)
        elif self.is_awaited and self.last_heard_s + context.rules.silence_timeout_s <= context.now_s:
            self._expire(EndReason.CLAIMANT_SILENT, context)
        elif self.is_prefix and self.holder is not None and self.deadline_s <= context.now_s:
            self._abandon(self.holder, context)
        elif self.is_awaited and self.recall_s is not None and self.recall_s <= context.now_s:
            self._recall(context)
        for grant in self.grants:
            if (
                grant.state is GrantState.ABANDONED
                and grant.abandoned_s + context.rules.abandon_repeat_s <= context.now_s
            ):
                self.send_abandon(grant, context)

    def _expire(self, reason: EndReason, context: DecodeContext) -> None:
        context.counters.num_expired += 1
        self._failed(context)
        self.compute_here(reason, context)

    def _recall(self, context: DecodeContext) -> None:
        """Only P knows whether it has begun, so it decides: what it has computed is not thrown away."""
        self.recall_s = None
        holder = self.holder
        if holder is not None:
            self.is_recalled = True
            connection = context.connections.get(holder.worker_id, holder.connection)
            context.out.append(de.SendToPrefill(connection, hm.HandoffRecall(self.handoff_id, holder.generation)))

    def _failed(self, context: DecodeContext) -> None:
        """The holder has had its grant for long, and has not done what it is for."""
        holder = self.holder
        if (
            holder is not None
            and holder.state is GrantState.OUT
            and self.granted_s + context.rules.held_s < context.now_s
        ):
            context.conduct.failed(holder.worker_id, context.now_s, context.rules.avoid_s)

    def avoid(self, worker_ids: frozenset[str], context: DecodeContext) -> None:
        """Do not wait for these workers: for what they hold, nor for their half of a pair."""
        holder = self.holder
        awaited = self.claimant if self.state is DecodeState.OPEN else None
        if self.state is DecodeState.GRANTED and holder is not None:
            awaited = holder.worker_id
        if awaited in worker_ids:
            self.compute_here(EndReason.CLAIMANT_AVOIDED, context)

    def overtaken(self, context: DecodeContext) -> None:
        """A later one of the same queue has been claimed: whoever has pulled this one, if anyone has, keeps silent."""
        if self.state is DecodeState.OPEN and context.now_s + context.rules.overtaken_s < self.deadline_s:
            self.deadline_s = context.now_s + context.rules.overtaken_s
            self.is_overtaken = True

    def next_s(self, rules: DecodeRules) -> float | None:
        """When ``tick`` is due next."""
        times = [g.abandoned_s + rules.abandon_repeat_s for g in self.grants if g.state is GrantState.ABANDONED]
        if self.state in WAITING_FOR_CLAIMANT or (self.is_prefix and self.holder is not None):
            times.append(self.deadline_s)
        if self.is_awaited:
            times.append(self.last_heard_s + rules.silence_timeout_s)
            if self.recall_s is not None:
                times.append(self.recall_s)
        return min(times, default=None)

    @property
    def is_awaited(self) -> bool:
        """Whether the claimant has its grant, and only its computation is missing."""
        holder = self.holder
        return self.state is DecodeState.GRANTED and holder is not None and holder.state is GrantState.OUT

    # -- loans --------------------------------------------------------------------------------------------------------

    def settle(self, context: DecodeContext) -> None:
        """End every loan that nothing needs any more."""
        needed = {grant.loan for grant in self.grants}
        if self.state is not DecodeState.CLOSED or self.is_touched:
            needed.add(self.loan)
        for loan in self.loans:
            if loan not in needed:
                context.out.append(de.EndLoan(self.handoff_id, loan))
        self.loans = tuple(loan for loan in self.loans if loan in needed)
        self._pay(context)

    def _pay(self, context: DecodeContext) -> None:
        if self.owed is not None and (context.rules.can_replace_blocks or not self.loans):
            context.out.append(de.ComputeHere(self.handoff_id, self.request_id, self.owed))
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
        changed = replace(grant, state=state, abandoned_s=now_s)
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

    def _abandon(self, grant: Grant, context: DecodeContext) -> None:
        if grant.state is GrantState.PREPARING:
            self._change(grant, GrantState.WITHDRAWN, 0.0)
        elif grant.state is GrantState.OUT and not self._is_read_from(grant):
            context.counters.num_abandoned += 1
            self.send_abandon(grant, context)

    def _is_read_from(self, grant: Grant) -> bool:
        """Pull: P must keep its blocks while we read them; HandoffFetched follows the read."""
        return self.is_touched and self.direction is KvDirection.PULL and grant.generation == self.generation

    def send_abandon(self, grant: Grant, context: DecodeContext) -> None:
        """Send an abandon, over the claimant's current connection, if it has one."""
        self._change(grant, GrantState.ABANDONED, context.now_s)
        connection = context.connections.get(grant.worker_id)
        if connection is not None:
            abandon = hm.HandoffAbandon(self.handoff_id, grant.generation)
            context.out.append(de.SendToPrefill(connection, abandon))

    def _move(self, state: DecodeState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(f"hand-off {self.handoff_id} cannot go from {self.state} to {state}")
        self.state = state


def _is_by_engine(message: hm.HandoffDone | hm.HandoffReady | None) -> bool:
    """Whether D's engine gets the KV by itself."""
    return isinstance(message, hm.HandoffReady) and message.kv_transfer_params is not None
