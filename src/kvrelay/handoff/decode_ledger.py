"""All hand-offs of one decode worker: events to their machines, leases and connections of the claimants.

It maps events to hand-offs, and owns the rules for all of them: a claim must come from a compatible worker with a live
lease, claims that arrive before their request (prefill-first) wait, stale messages are counted.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from kvrelay.core.handoff import HandoffId, HandoffOrder, KvDirection
from kvrelay.core.latest import Latest
from kvrelay.handoff import decode_events as de
from kvrelay.handoff.base import Connection, EndReason, LeaseEnded, LeaseLost, RefusalReason, Registered, Tick, Value
from kvrelay.handoff.conduct import Conduct
from kvrelay.handoff.decode import DecodeHandoff
from kvrelay.handoff.decode_state import (
    DecodeContext,
    DecodeCounters,
    DecodeRules,
    DecodeState,
    GrantState,
    acknowledge,
    refuse,
)
from kvrelay.handoff.leases import PeerLeases
from kvrelay.handoff.messages import HandoffAbandon, HandoffClaim, HandoffProgress, HandoffReleased

MAX_EARLY = 1024
MAX_DECLINED = 4096


class EarlyClaim(msgspec.Struct, frozen=True):
    """A claim whose request has not arrived yet (prefill-first), or whose claimant's term is not known yet."""

    event: de.Claimed
    until_s: float


class DecodeLedger:
    """One per decode worker. ``handle`` is the only way in; its calls must not overlap. ``new_secret`` gives each grant
    a number that nobody can guess."""

    def __init__(self, rules: DecodeRules, new_secret: Callable[[], int] = lambda: secrets.randbits(63)) -> None:
        self.rules = rules
        self.new_secret = new_secret
        self.counters = DecodeCounters()
        self.handoffs: dict[HandoffId, DecodeHandoff] = {}
        self.leases = PeerLeases()
        self.conduct = Conduct()
        self.connections: dict[str, Connection] = {}
        """By claimant: the connection of its last message."""
        self.early: dict[tuple[HandoffId, str], EarlyClaim] = {}
        self.expected: dict[HandoffId, de.Expected] = {}
        """Prefill-first: hand-offs whose requests wait for blocks. Claims wait with them."""
        self.declined: Latest[HandoffId, frozenset[str]] = Latest(MAX_DECLINED)
        """Hand-offs that are not open yet, with the workers that will not compute them."""

    def __repr__(self) -> str:
        return f"DecodeLedger({self.num_open} open, {self.num_grants} grants, {self.counters})"

    @property
    def num_open(self) -> int:
        """The number of hand-offs whose requests wait for them."""
        return sum(handoff.state is not DecodeState.CLOSED for handoff in list(self.handoffs.values()))

    @property
    def num_grants(self) -> int:
        """The number of grants that are out: while it is not zero, peers may touch our memory."""
        return sum(len(handoff.grants) for handoff in list(self.handoffs.values()))

    def handle(self, event: de.DecodeEvent, now_s: float) -> list[Value]:
        """Handle an event at ``now_s`` (monotonic); returns the actions, in order."""
        context = DecodeContext(now_s, self.rules, self.counters, self.connections, self.new_secret, self.conduct)
        changed = _HANDLERS[type(event)](self, event, context)
        if self.conduct.new:
            avoided = self.conduct.take_new()
            context.out += [de.Avoid(worker_id) for worker_id in sorted(avoided)]
            changed = self._all(lambda handoff: handoff.avoid(avoided, context))
        for handoff in changed:
            handoff.settle(context)
            if handoff.is_over:
                self.handoffs.pop(handoff.handoff_id, None)
        return context.out

    def next_tick_s(self) -> float | None:
        """When the next Tick is due; None: not before another event."""
        times = [time for handoff in self.handoffs.values() if (time := handoff.next_s(self.rules)) is not None]
        times += [early.until_s for early in self.early.values() if not self._is_awaited(early)]
        fence_s = self.leases.next_fence_s()
        if fence_s is not None:
            times.append(fence_s)
        return min(times, default=None)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _opened(self, event: de.Opened, context: DecodeContext) -> Iterable[DecodeHandoff]:
        self.counters.num_opened += 1
        has_blocks = bool(event.block_ids)
        handoff = DecodeHandoff(
            handoff_id=event.handoff_id,
            request_id=event.request_id,
            direction=event.direction,
            claimant=event.claimant,
            block_ids=event.block_ids,
            num_hit_blocks=event.num_hit_blocks,
            term=event.term,
            num_tokens=event.num_tokens,
            deadline_s=context.now_s + self.rules.remote_prefill_timeout_s,
            loans=(1,) if has_blocks else (),
            loan=1 if has_blocks else 0,
            is_queued=event.order is HandoffOrder.DECODE_FIRST,
        )
        self.handoffs[event.handoff_id] = handoff
        expected = self.expected.pop(event.handoff_id, None)
        if expected is not None and expected.begins_within_s:
            handoff.recall_s = context.now_s + expected.begins_within_s
        handoff.given_up_by = self.declined.pop(event.handoff_id, frozenset())
        if event.claimant is not None:
            self._check_claimant(handoff, event.claimant, context)
        claims = self._take_early(lambda claim: claim.handoff_id == event.handoff_id)
        for claimed in claims:
            self._claim(handoff, claimed, context)
        if not claims and event.order is HandoffOrder.DECODE_FIRST:
            context.out.append(de.Push(event.handoff_id))
        return (handoff,)

    def _check_claimant(self, handoff: DecodeHandoff, claimant: str, context: DecodeContext) -> None:
        """Do not wait for the claim of a worker that will not claim."""
        if claimant in handoff.given_up_by:
            handoff.compute_here(EndReason.RELEASED, context)
        elif self.leases.ended_s(claimant) is not None:
            handoff.compute_here(EndReason.CLAIMANT_LEASE_ENDED, context)
        elif self.conduct.is_avoided(claimant, context.now_s):
            handoff.compute_here(EndReason.CLAIMANT_AVOIDED, context)

    def _expected(self, event: de.Expected, context: DecodeContext) -> Iterable[DecodeHandoff]:
        self.expected[event.handoff_id] = event
        return ()

    def _claimant_gone(self, event: de.ClaimantGone, context: DecodeContext) -> Iterable[DecodeHandoff]:
        expected = self.expected.get(event.handoff_id)
        if expected is not None:
            self._decline(event.handoff_id, expected.claimant)
        return self._one(event.handoff_id, lambda handoff: handoff.claimant_gone(context))

    def _decline(self, handoff_id: HandoffId, worker_id: str) -> None:
        """A hand-off that is not open yet will not be computed by ``worker_id``."""
        self.declined[handoff_id] = self.declined.get(handoff_id, frozenset()) | {worker_id}

    def _is_awaited(self, early: EarlyClaim) -> bool:
        """Whether a claim waits for blocks; it then waits as long as its request."""
        return early.event.claim.handoff_id in self.expected

    def _closed(self, event: de.Closed, context: DecodeContext) -> Iterable[DecodeHandoff]:
        if self.expected.pop(event.handoff_id, None) is not None:
            self.declined.pop(event.handoff_id, None)
            for claimed in self._take_early(lambda claim: claim.handoff_id == event.handoff_id):
                refuse(claimed, RefusalReason.UNKNOWN, context)
        return self._one(event.handoff_id, lambda handoff: handoff.closed(context))

    # -- claims -------------------------------------------------------------------------------------------------------

    def _claimed(self, event: de.Claimed, context: DecodeContext) -> Iterable[DecodeHandoff]:
        claim = event.claim
        self._connected_on(claim.prefill_worker_id, event.connection, context)
        handoff = self.handoffs.get(claim.handoff_id)
        if handoff is not None:
            self._claim(handoff, event, context)
            return (handoff,)
        if claim.prefill_worker_id in self.declined.get(claim.handoff_id, ()):
            refuse(event, RefusalReason.GIVEN_UP, context)
        elif claim.prefix is not None:
            return self._lend(event, context)
        elif claim.order is not HandoffOrder.PREFILL_FIRST:
            refuse(event, RefusalReason.UNKNOWN, context)
        elif self.conduct.is_avoided(claim.prefill_worker_id, context.now_s):
            refuse(event, RefusalReason.AVOIDED, context)
            self._decline(claim.handoff_id, claim.prefill_worker_id)
        else:
            self._park(event, context)
        return ()

    def _lend(self, event: de.Claimed, context: DecodeContext) -> Iterable[DecodeHandoff]:
        """A peer wants a prefix of our cache: a hand-off that no request waits for. A claim that waits for its
        claimant's term leaves no hand-off meanwhile: it is over at once."""
        claim = event.claim
        handoff = DecodeHandoff(
            handoff_id=claim.handoff_id,
            request_id="",
            direction=KvDirection.PULL,
            claimant=claim.prefill_worker_id,
            block_ids=(),
            num_hit_blocks=0,
            deadline_s=math.inf,
            term=event.term,
            state=DecodeState.CLOSED,
            is_prefix=True,
        )
        self.handoffs[claim.handoff_id] = handoff
        self._claim(handoff, event, context)
        return (handoff,)

    def _claim(self, handoff: DecodeHandoff, event: de.Claimed, context: DecodeContext) -> None:
        """A refused claimant has taken the hand-off from the queue: unless another one computes it, the request is
        computed here."""
        claim, rules = event.claim, self.rules
        theirs = (claim.kv_compatibility, claim.regions, claim.tail_tokens)
        if theirs != (rules.kv_compatibility, rules.regions, rules.tail_tokens):
            refuse(event, RefusalReason.INCOMPATIBLE, context)
            handoff.declined(claim.prefill_worker_id, EndReason.CLAIMANT_REFUSED, context)
        elif self.leases.is_over(claim.prefill_worker_id, claim.term):
            refuse(event, RefusalReason.LEASE_ENDED, context)
            handoff.declined(claim.prefill_worker_id, EndReason.CLAIMANT_LEASE_ENDED, context)
        elif self.conduct.is_avoided(claim.prefill_worker_id, context.now_s):
            refuse(event, RefusalReason.AVOIDED, context)
            handoff.declined(claim.prefill_worker_id, EndReason.CLAIMANT_AVOIDED, context)
        elif self.leases.is_live(claim.prefill_worker_id, claim.term):
            self._overtake(handoff, context)
            handoff.claimed(event, context)
        else:
            self._park(event, context)

    def _overtake(self, claimed: DecodeHandoff, context: DecodeContext) -> None:
        """The queue is in order, so whatever was pushed before ``claimed`` has been pulled."""
        if claimed.is_queued and claimed.state is DecodeState.OPEN:
            for handoff in self.handoffs.values():
                if handoff is claimed:
                    return
                if handoff.is_queued and not handoff.is_overtaken:
                    handoff.overtaken(context)

    def _park(self, event: de.Claimed, context: DecodeContext) -> None:
        """Hold a claim until its request has arrived, or its claimant's term is known."""
        key = (event.claim.handoff_id, event.claim.prefill_worker_id)
        if len(self.early) < MAX_EARLY or key in self.early:
            self.early[key] = EarlyClaim(event, context.now_s + self.rules.early_claim_timeout_s)
        else:
            refuse(event, RefusalReason.BUSY, context)
            if event.claim.handoff_id not in self.handoffs:
                self._decline(*key)

    def _take_early(self, is_meant: Callable[[HandoffClaim], bool]) -> list[de.Claimed]:
        taken = [early.event for early in self.early.values() if is_meant(early.event.claim)]
        for event in taken:
            del self.early[event.claim.handoff_id, event.claim.prefill_worker_id]
        return taken

    def _connected_on(self, worker_id: str, connection: Connection, context: DecodeContext) -> None:
        """A claimant has another connection: repeat messages that may be lost with the old one."""
        if self.connections.get(worker_id) == connection:
            return
        self.connections[worker_id] = connection
        for handoff in self.handoffs.values():
            for grant in handoff.grants:
                if grant.worker_id == worker_id and grant.state is GrantState.ABANDONED:
                    handoff.send_abandon(grant, context)

    # -- what arrives -------------------------------------------------------------------------------------------------

    def _done(self, event: de.Done, context: DecodeContext) -> Iterable[DecodeHandoff]:
        message = event.message
        if message.handoff_id not in self.handoffs:
            self.counters.num_stale += 1
            acknowledge(message, event.connection, context)
        return self._one(message.handoff_id, lambda handoff: handoff.done(message, event.connection, context))

    def _progress(self, message: HandoffProgress, context: DecodeContext) -> Iterable[DecodeHandoff]:
        if message.handoff_id not in self.handoffs:
            self.counters.num_stale += 1
        return self._one(message.handoff_id, lambda handoff: handoff.progress(message, context))

    def _ready(self, event: de.Offered, context: DecodeContext) -> Iterable[DecodeHandoff]:
        message = event.message
        handoff = self.handoffs.get(message.handoff_id)
        if handoff is None or not handoff.ready(message, context):
            # P need not keep blocks for us.
            self.counters.num_stale += 1
            abandon = HandoffAbandon(message.handoff_id, message.generation)
            context.out.append(de.SendToPrefill(event.connection, abandon))
        return () if handoff is None else (handoff,)

    def _released(self, message: HandoffReleased, context: DecodeContext) -> Iterable[DecodeHandoff]:
        early = self.early.pop((message.handoff_id, message.prefill_worker_id), None)
        if message.handoff_id not in self.handoffs:
            expected = self.expected.get(message.handoff_id)
            is_awaited = early is not None or (expected is not None and expected.claimant == message.prefill_worker_id)
            self.counters.num_stale += not (is_awaited or message.kv_transfer_params is not None)
            # Its request may still come, and its claim, which the release has overtaken on another connection.
            self._decline(message.handoff_id, message.prefill_worker_id)
        handoff = self.handoffs.get(message.handoff_id)
        if handoff is not None and handoff.is_prefix:
            # A copy of its claim that comes later would be granted, and no one would release that.
            self._decline(message.handoff_id, message.prefill_worker_id)
        if message.kv_transfer_params is not None and not (handoff is not None and handoff.is_touched):
            context.out.append(de.Discard(message.handoff_id, message.kv_transfer_params))
        return self._one(message.handoff_id, lambda handoff: handoff.released(message.prefill_worker_id, context))

    # -- peers --------------------------------------------------------------------------------------------------------

    def _connection_lost(self, event: de.ClaimantConnectionLost, context: DecodeContext) -> Iterable[DecodeHandoff]:
        for worker_id, connection in list(self.connections.items()):
            if connection == event.connection:
                del self.connections[worker_id]
        for key, early in list(self.early.items()):
            if early.event.connection == event.connection:
                del self.early[key]
                if key[0] not in self.handoffs:
                    self._decline(*key)
        return self._all(lambda handoff: handoff.connection_lost(event.connection, context))

    def _registered(self, event: Registered, context: DecodeContext) -> Iterable[DecodeHandoff]:
        if self.leases.registered(event.worker_id, event.ttl_s, event.term):
            # Before it came back it withdrew everything that it had begun under its old lease.
            for handoff in self.handoffs.values():
                handoff.fenced(event.worker_id, context)
        for claimed in self._take_early(lambda claim: claim.prefill_worker_id == event.worker_id):
            self._claimed(claimed, context)
        return list(self.handoffs.values())

    def _lease_ended(self, event: LeaseEnded, context: DecodeContext) -> Iterable[DecodeHandoff]:
        self.leases.ended(event.worker_id, context.now_s)
        return self._all(lambda handoff: handoff.lease_ended(event.worker_id, context))

    def _lease_lost(self, event: LeaseLost, context: DecodeContext) -> Iterable[DecodeHandoff]:
        def withdraw(handoff: DecodeHandoff) -> None:
            if handoff.direction is KvDirection.PULL:
                handoff.compute_here(EndReason.LEASE_LOST, context)

        return self._all(withdraw)

    def _no_prefill_worker(self, event: de.NoPrefillWorker, context: DecodeContext) -> Iterable[DecodeHandoff]:
        def take_back(handoff: DecodeHandoff) -> None:
            if handoff.state is DecodeState.OPEN and handoff.claimant is None:
                handoff.compute_here(EndReason.NO_PREFILL_WORKER, context)

        return self._all(take_back)

    def _tick(self, event: Tick, context: DecodeContext) -> Iterable[DecodeHandoff]:
        for worker_id in self.leases.take_fenced(context.now_s):
            self.connections.pop(worker_id, None)
            for handoff in self.handoffs.values():
                handoff.fenced(worker_id, context)
        for key, early in list(self.early.items()):
            if early.until_s <= context.now_s and not self._is_awaited(early):
                del self.early[key]
                self._expire(early.event, context)
        return self._all(lambda handoff: handoff.tick(context))

    def _expire(self, event: de.Claimed, context: DecodeContext) -> None:
        handoff = self.handoffs.get(event.claim.handoff_id)
        refuse(event, RefusalReason.UNKNOWN if handoff is None else RefusalReason.TERM_UNKNOWN, context)
        if handoff is None:
            self._decline(event.claim.handoff_id, event.claim.prefill_worker_id)
        else:
            handoff.declined(event.claim.prefill_worker_id, EndReason.CLAIMANT_REFUSED, context)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _one(self, handoff_id: HandoffId, apply: Callable[[DecodeHandoff], None]) -> Iterable[DecodeHandoff]:
        handoff = self.handoffs.get(handoff_id)
        if handoff is None:
            return ()
        apply(handoff)
        return (handoff,)

    def _all(self, apply: Callable[[DecodeHandoff], None]) -> Iterable[DecodeHandoff]:
        handoffs = list(self.handoffs.values())
        for handoff in handoffs:
            apply(handoff)
        return handoffs


E = TypeVar("E", bound="de.DecodeEvent")
_Handler = Callable[[DecodeLedger, Any, DecodeContext], Iterable[DecodeHandoff]]


def _by_all(
    kind: type[E], handle: Callable[[DecodeLedger, E, DecodeContext], Iterable[DecodeHandoff]]
) -> tuple[type, _Handler]:
    return kind, handle


def _by_one(kind: type[E], apply: Callable[[DecodeHandoff, E, DecodeContext], None]) -> tuple[type, _Handler]:
    """An event of one hand-off: nothing happens if that is unknown."""

    def handle(ledger: DecodeLedger, event: Any, context: DecodeContext) -> Iterable[DecodeHandoff]:
        handoff = ledger.handoffs.get(event.handoff_id)
        if handoff is None:
            return ()
        apply(handoff, event, context)
        return (handoff,)

    return kind, handle


_HANDLERS: dict[type, _Handler] = dict(
    (
        _by_all(de.Opened, DecodeLedger._opened),
        _by_all(de.Expected, DecodeLedger._expected),
        _by_all(de.ClaimantGone, DecodeLedger._claimant_gone),
        _by_all(de.Closed, DecodeLedger._closed),
        _by_one(de.PushFailed, lambda handoff, event, context: handoff.compute_here(EndReason.NOT_QUEUED, context)),
        _by_all(de.Claimed, DecodeLedger._claimed),
        _by_one(de.LoanAllocated, lambda handoff, event, context: handoff.allocated(event, context)),
        _by_one(
            de.HitsChecksummed,
            lambda handoff, event, context: handoff.hits_checksummed(event.generation, event.checksums, context),
        ),
        _by_one(de.GrantNotSent, lambda handoff, event, context: handoff.not_sent(event.generation, context)),
        _by_all(HandoffProgress, DecodeLedger._progress),
        _by_all(de.Done, DecodeLedger._done),
        _by_all(de.Offered, DecodeLedger._ready),
        _by_one(de.FetchEnded, lambda handoff, event, context: handoff.read_ended(event.generation, event.ok, context)),
        _by_one(de.Verified, lambda handoff, event, context: handoff.verified(event.ok, context)),
        _by_all(HandoffReleased, DecodeLedger._released),
        _by_all(de.ClaimantConnectionLost, DecodeLedger._connection_lost),
        _by_all(Registered, DecodeLedger._registered),
        _by_all(LeaseEnded, DecodeLedger._lease_ended),
        _by_all(LeaseLost, DecodeLedger._lease_lost),
        _by_all(de.NoPrefillWorker, DecodeLedger._no_prefill_worker),
        _by_all(Tick, DecodeLedger._tick),
    )
)
