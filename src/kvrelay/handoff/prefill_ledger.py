"""All hand-offs of one prefill worker: events to their machines, leases of the decode workers.

A hand-off is claimed here at most once, so that a release stays true: an entry that is delivered again is settled
without a claim, unless it was returned to the queue without one. Any message of a decode worker about an unknown
hand-off is answered by a release, because the decode worker may have missed an earlier one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from kvrelay.core.handoff import HandoffId
from kvrelay.core.latest import Latest
from kvrelay.handoff import prefill_events as pe
from kvrelay.handoff.base import EndReason, LeaseEnded, LeaseLost, Registered, Tick, Value
from kvrelay.handoff.leases import PeerLeases
from kvrelay.handoff.messages import HandoffAbandon, HandoffFetched, HandoffGrant, HandoffRefused, HandoffReleased
from kvrelay.handoff.prefill import PrefillHandoff
from kvrelay.handoff.prefill_state import PrefillContext, PrefillCounters, PrefillRules, PrefillState

MAX_REMEMBERED = 4096


class PrefillLedger:
    """One per prefill worker. ``handle`` is the only way in; calls must not overlap."""

    def __init__(self, rules: PrefillRules) -> None:
        self.rules = rules
        self.counters = PrefillCounters()
        self.handoffs: dict[HandoffId, PrefillHandoff] = {}
        self.leases = PeerLeases()
        self.seen: Latest[HandoffId, None] = Latest(MAX_REMEMBERED)
        """Hand-offs that are settled without a claim if they are delivered again."""
        self._free_since_s = -math.inf

    def __repr__(self) -> str:
        return f"PrefillLedger({self.num_active} active, {len(self.handoffs)} in all, {self.counters})"

    @property
    def num_active(self) -> int:
        """Hand-offs that hold blocks."""
        return sum(handoff.has_blocks for handoff in list(self.handoffs.values()))

    @property
    def num_read(self) -> int:
        """Hand-offs whose blocks a decode worker may read."""
        return sum(handoff.may_be_read for handoff in list(self.handoffs.values()))

    def num_in(self, state: PrefillState) -> int:
        """Hand-offs in this state."""
        return sum(handoff.state is state for handoff in list(self.handoffs.values()))

    def handle(self, event: pe.PrefillEvent, now_s: float) -> list[Value]:
        """Handle an event at ``now_s`` (monotonic); returns the actions, in order."""
        context = PrefillContext(now_s, self.rules, self.counters, self._free_since_s)
        _HANDLERS[type(event)](self, event, context)
        self._free_since_s = context.free_since_s
        return context.out

    def next_tick_s(self) -> float | None:
        """When the next Tick is due; None: not before another event."""
        times = [handoff.next_s for handoff in self.handoffs.values() if handoff.next_s is not None]
        fence_s = self.leases.next_fence_s()
        if fence_s is not None:
            times.append(fence_s)
        return min(times, default=None)

    # -- one hand-off -------------------------------------------------------------------------------------------------

    def _pulled(self, event: pe.Pulled, context: PrefillContext) -> None:
        prefill = event.prefill
        if self._is_new(prefill.handoff_id, context):
            handoff = self.handoffs[prefill.handoff_id] = PrefillHandoff(
                handoff_id=prefill.handoff_id,
                decode_worker_id=prefill.decode_worker_id,
                num_tokens=len(prefill.token_ids),
                num_cached_tokens=prefill.num_cached_tokens,
                started_s=context.now_s,
                due_s=context.now_s + self.rules.claim_timeout_of(event.order),
                order=event.order,
                may_return=event.may_return,
            )
            handoff.begin(event, context)

    def _prefix_wanted(self, event: pe.PrefixWanted, context: PrefillContext) -> None:
        handoff = self.handoffs[event.handoff_id] = PrefillHandoff(
            handoff_id=event.handoff_id,
            decode_worker_id=event.decode_worker_id,
            num_tokens=len(event.prefix.token_ids),
            num_cached_tokens=0,
            started_s=context.now_s,
            due_s=context.now_s + min(event.timeout_s, self.rules.claim_timeout_s),
            load=event.blocks,
            is_computed=True,
            has_blocks=False,
            is_prefix=True,
        )
        handoff.begin_prefix(event, context)

    def _declined(self, event: pe.Declined, context: PrefillContext) -> None:
        if self._is_new(event.handoff_id, context):
            handoff = PrefillHandoff(event.handoff_id, event.decode_worker_id, 0, 0, context.now_s, context.now_s)
            self.handoffs[event.handoff_id] = handoff
            handoff.decline(event.reason, context)

    def _is_new(self, handoff_id: HandoffId, context: PrefillContext) -> bool:
        """Whether it was not seen before. If it was, its entry is settled."""
        is_new = handoff_id not in self.seen
        if is_new:
            self.seen[handoff_id] = None
        else:
            context.out.append(pe.Settle(handoff_id, EndReason.REQUEST_ENDED))
        return is_new

    def _granted(self, message: HandoffGrant, context: PrefillContext) -> None:
        def apply(handoff: PrefillHandoff) -> None:
            handoff.granted(message, self.leases.is_live(handoff.decode_worker_id, message.term), context)

        if not self._one(message.handoff_id, apply):
            self._release_unknown(message.handoff_id, context)

    def _abandoned(self, message: HandoffAbandon, context: PrefillContext) -> None:
        if not self._one(message.handoff_id, lambda handoff: handoff.abandoned(message.generation, context)):
            self._release_unknown(message.handoff_id, context)

    def _release_unknown(self, handoff_id: HandoffId, context: PrefillContext) -> None:
        """Sent once: the decode worker asks again if the release is lost."""
        self.seen[handoff_id] = None
        released = HandoffReleased(handoff_id, self.rules.worker_id, EndReason.ABANDONED.value)
        context.out.append(pe.SendRelease(handoff_id.decode_worker_id, released))

    def _unreachable(self, event: pe.Unreachable, context: PrefillContext) -> None:
        def apply(handoff: PrefillHandoff) -> None:
            handoff.unreachable(self.leases.ended_s(handoff.decode_worker_id) is not None, context)

        self._one(event.handoff_id, apply)

    def _load_wanted(self, event: pe.LoadRequested, context: PrefillContext) -> None:
        if not self._one(event.handoff_id, lambda handoff: handoff.load_wanted(event.blocks, context)):
            context.out.append(pe.ReportLoaded(event.handoff_id, False))

    def _one(self, handoff_id: HandoffId, apply: Callable[[PrefillHandoff], None]) -> bool:
        """False if it is unknown."""
        handoff = self.handoffs.get(handoff_id)
        if handoff is None:
            return False
        apply(handoff)
        self._drop_if_ended(handoff)
        return True

    def _drop_if_ended(self, handoff: PrefillHandoff) -> None:
        if handoff.state is PrefillState.ENDED:
            del self.handoffs[handoff.handoff_id]
            if handoff.reason is EndReason.UNREACHABLE:
                self.seen.pop(handoff.handoff_id, None)

    # -- all of a worker's --------------------------------------------------------------------------------------------

    def _of(self, worker_id: str, apply: Callable[[PrefillHandoff], None]) -> None:
        for handoff in list(self.handoffs.values()):
            if handoff.decode_worker_id == worker_id:
                self._one(handoff.handoff_id, apply)

    def _connection_lost(self, event: pe.DecodeConnectionLost, context: PrefillContext) -> None:
        self._of(event.worker_id, lambda handoff: handoff.lost(EndReason.DECODE_WORKER_LOST, context))

    def _registered(self, event: Registered, context: PrefillContext) -> None:
        if self.leases.registered(event.worker_id, event.ttl_s, event.term):
            self._of(event.worker_id, lambda handoff: handoff.fenced(context))

    def _lease_ended(self, event: LeaseEnded, context: PrefillContext) -> None:
        self.leases.ended(event.worker_id, context.now_s)
        self._of(event.worker_id, lambda handoff: handoff.lost(EndReason.DECODE_WORKER_LOST, context))

    def _lease_lost(self, event: LeaseLost, context: PrefillContext) -> None:
        for handoff_id in list(self.handoffs):
            self._one(handoff_id, lambda handoff: handoff.lost(event.reason, context))

    def _tick(self, event: Tick, context: PrefillContext) -> None:
        for worker_id in self.leases.take_fenced(context.now_s):
            self._of(worker_id, lambda handoff: handoff.fenced(context))
        for handoff in list(self.handoffs.values()):
            handoff.tick(self.leases.gone_s(handoff.decode_worker_id, handoff.over_s), context)
            self._drop_if_ended(handoff)


E = TypeVar("E", bound="pe.PrefillEvent")
_Handler = Callable[[PrefillLedger, Any, PrefillContext], None]


def _by_all(kind: type[E], handle: Callable[[PrefillLedger, E, PrefillContext], None]) -> tuple[type[E], _Handler]:
    return kind, handle


def _by_one(kind: type[E], apply: Callable[[PrefillHandoff, E, PrefillContext], None]) -> tuple[type[E], _Handler]:
    """An event of one hand-off: nothing happens if that is unknown."""

    def handle(ledger: PrefillLedger, event: Any, context: PrefillContext) -> None:
        handoff = ledger.handoffs.get(event.handoff_id)
        if handoff is not None:
            apply(handoff, event, context)
            ledger._drop_if_ended(handoff)

    return kind, handle


_HANDLERS: dict[type, _Handler] = dict(
    (
        _by_all(pe.Pulled, PrefillLedger._pulled),
        _by_all(pe.PrefixWanted, PrefillLedger._prefix_wanted),
        _by_all(pe.Declined, PrefillLedger._declined),
        _by_one(pe.Cancelled, lambda handoff, event, context: handoff.stop(EndReason.REQUEST_ENDED, context)),
        _by_one(pe.Recalled, lambda handoff, event, context: handoff.recalled(event.generation, context)),
        _by_one(pe.ClaimFailed, lambda handoff, event, context: handoff.stop(EndReason.CLAIM_FAILED, context)),
        _by_all(pe.Unreachable, PrefillLedger._unreachable),
        _by_all(HandoffGrant, PrefillLedger._granted),
        _by_one(HandoffRefused, lambda handoff, event, context: handoff.refused(context)),
        _by_one(pe.EngineRefused, lambda handoff, event, context: handoff.stop(EndReason.ENGINE_REFUSED, context)),
        _by_all(pe.LoadRequested, PrefillLedger._load_wanted),
        _by_one(pe.ChunkComputed, lambda handoff, event, context: handoff.chunk_computed(event, context)),
        _by_one(pe.HitsRead, lambda handoff, event, context: handoff.read_ended(event.ok, context)),
        _by_one(pe.HitsVerified, lambda handoff, event, context: handoff.hits_verified(event.ok, context)),
        _by_one(
            pe.ChunkChecksummed, lambda handoff, event, context: handoff.chunk_checksummed(event.checksums, context)
        ),
        _by_one(pe.Kept, lambda handoff, event, context: handoff.kept(event.block_ids, context)),
        _by_one(pe.Written, lambda handoff, event, context: handoff.written(event.ok, context)),
        _by_all(HandoffAbandon, PrefillLedger._abandoned),
        _by_one(HandoffFetched, lambda handoff, event, context: handoff.fetched(event.generation, context)),
        _by_one(pe.ReleaseAcknowledged, lambda handoff, event, context: handoff.release_acknowledged()),
        _by_all(pe.DecodeConnectionLost, PrefillLedger._connection_lost),
        _by_all(Registered, PrefillLedger._registered),
        _by_all(LeaseEnded, PrefillLedger._lease_ended),
        _by_all(LeaseLost, PrefillLedger._lease_lost),
        _by_all(Tick, PrefillLedger._tick),
    )
)
