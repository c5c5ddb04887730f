"""All hand-offs of one prefill worker: events to their machines, leases of the decode workers.

A hand-off is claimed here at most once, so that a release stays true: an entry that is delivered again is settled
without a claim, unless it was returned to the queue without one. Any message of a decode worker about an unknown
hand-off is answered by a release, because the decode worker may have missed an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvrelay.core.handoff import HandoffId
from kvrelay.core.latest import Latest
from kvrelay.handoff.base import EndReason
from kvrelay.handoff.leases import PeerLeases
from kvrelay.handoff.messages import HandoffReleased
from kvrelay.handoff.prefill import PrefillHandoff
from kvrelay.handoff.prefill_events import (
    Abandoned,
    Cancelled,
    ChunkChecksummed,
    ChunkComputed,
    ClaimFailed,
    ConnectionLost,
    Declined,
    EngineRefused,
    Fetched,
    Granted,
    HitsVerified,
    LeaseEnded,
    LeaseLost,
    LoadWanted,
    PrefillAction,
    PrefillEvent,
    Pulled,
    ReadEnded,
    Refused,
    Registered,
    ReleaseHeard,
    SayReleased,
    Settle,
    TellLoaded,
    Tick,
    Unreachable,
    Written,
)
from kvrelay.handoff.prefill_state import PrefillCounters, PrefillRules, PrefillState, Turn

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

    def __repr__(self) -> str:
        return f"PrefillLedger({self.num_active} active, {len(self.handoffs)} in all, {self.counters})"

    @property
    def num_active(self) -> int:
        """Hand-offs that hold blocks."""
        return sum(handoff.has_blocks for handoff in list(self.handoffs.values()))

    @property
    def num_unheard(self) -> int:
        """Hand-offs that ended and whose decode worker does not know it yet."""
        return sum(handoff.state is PrefillState.RELEASING for handoff in list(self.handoffs.values()))

    def handle(self, event: PrefillEvent, now_s: float) -> list[PrefillAction]:
        """Handle an event at ``now_s`` (monotonic); returns the actions, in order."""
        turn = Turn(now_s, self.rules, self.counters)
        _HANDLERS[type(event)](self, event, turn)
        return turn.out

    def next_tick_s(self) -> float | None:
        """When the next Tick is due; None: not before another event."""
        times = [handoff.next_s for handoff in self.handoffs.values() if handoff.next_s is not None]
        fence_s = self.leases.next_fence_s()
        if fence_s is not None:
            times.append(fence_s)
        return min(times, default=None)

    # -- one hand-off -------------------------------------------------------------------------------------------------

    def _pulled(self, event: Pulled, turn: Turn) -> None:
        if event.handoff_id in self.seen:
            turn.out.append(Settle(event.handoff_id, EndReason.REQUEST_ENDED))
            return
        self.seen[event.handoff_id] = None
        handoff = PrefillHandoff(
            handoff_id=event.handoff_id,
            decode_worker_id=event.decode_worker_id,
            num_blocks=event.num_blocks,
            num_cached_tokens=event.num_cached_tokens,
            num_tokens=event.num_tokens,
            started_s=turn.now_s,
            due_s=turn.now_s + self.rules.claim_timeout_of(event.order),
            order=event.order,
            may_return=event.may_return,
        )
        self.handoffs[event.handoff_id] = handoff
        handoff.begin(event, turn)

    def _declined(self, event: Declined, turn: Turn) -> None:
        if event.handoff_id in self.seen:
            turn.out.append(Settle(event.handoff_id, EndReason.REQUEST_ENDED))
            return
        self.seen[event.handoff_id] = None
        handoff = PrefillHandoff(event.handoff_id, event.decode_worker_id, 0, 0, turn.now_s, turn.now_s)
        self.handoffs[event.handoff_id] = handoff
        handoff.decline(event.reason, turn)

    def _granted(self, event: Granted, turn: Turn) -> None:
        is_known = self.leases.is_live(event.worker_id, event.message.term)
        if event.message.handoff_id in self.handoffs:
            self._one(event.message.handoff_id, lambda handoff: handoff.granted(event.message, is_known, turn))
        else:
            self._release_unknown(event.worker_id, event.message.handoff_id, turn)

    def _cancelled(self, event: Cancelled, turn: Turn) -> None:
        self._one(event.handoff_id, lambda handoff: handoff.stop(EndReason.REQUEST_ENDED, turn))

    def _claim_failed(self, event: ClaimFailed, turn: Turn) -> None:
        self._one(event.handoff_id, lambda handoff: handoff.stop(EndReason.CLAIM_FAILED, turn))

    def _unreachable(self, event: Unreachable, turn: Turn) -> None:
        def apply(handoff: PrefillHandoff) -> None:
            handoff.unreachable(self.leases.ended_s(handoff.decode_worker_id) is not None, turn)

        self._one(event.handoff_id, apply)

    def _refused(self, event: Refused, turn: Turn) -> None:
        self._one(event.message.handoff_id, lambda handoff: handoff.refused(turn))

    def _engine_refused(self, event: EngineRefused, turn: Turn) -> None:
        self._one(event.handoff_id, lambda handoff: handoff.stop(EndReason.ENGINE_REFUSED, turn))

    def _load_wanted(self, event: LoadWanted, turn: Turn) -> None:
        if event.handoff_id in self.handoffs:
            self._one(event.handoff_id, lambda handoff: handoff.load_wanted(event.blocks, turn))
        else:
            turn.out.append(TellLoaded(event.handoff_id, False))

    def _chunk_computed(self, event: ChunkComputed, turn: Turn) -> None:
        self._one(event.handoff_id, lambda handoff: handoff.chunk_computed(event, turn))

    def _read_ended(self, event: ReadEnded, turn: Turn) -> None:
        self._one(event.handoff_id, lambda handoff: handoff.read_ended(event.ok, turn))

    def _hits_verified(self, event: HitsVerified, turn: Turn) -> None:
        self._one(event.handoff_id, lambda handoff: handoff.hits_verified(event.ok, turn))

    def _chunk_checksummed(self, event: ChunkChecksummed, turn: Turn) -> None:
        self._one(event.handoff_id, lambda handoff: handoff.chunk_checksummed(event.checksums, turn))

    def _written(self, event: Written, turn: Turn) -> None:
        self._one(event.handoff_id, lambda handoff: handoff.written(event.ok, turn))

    def _fetched(self, event: Fetched, turn: Turn) -> None:
        self._one(event.message.handoff_id, lambda handoff: handoff.fetched(event.message.generation, turn))

    def _release_heard(self, event: ReleaseHeard, turn: Turn) -> None:
        self._one(event.handoff_id, PrefillHandoff.release_heard)

    def _abandoned(self, event: Abandoned, turn: Turn) -> None:
        if event.message.handoff_id in self.handoffs:
            self._one(event.message.handoff_id, lambda handoff: handoff.abandoned(event.message.generation, turn))
        else:
            self._release_unknown(event.worker_id, event.message.handoff_id, turn)

    def _release_unknown(self, worker_id: str, handoff_id: HandoffId, turn: Turn) -> None:
        """Sent once: the decode worker asks again if the release is lost."""
        self.seen[handoff_id] = None
        released = HandoffReleased(handoff_id, self.rules.worker_id, EndReason.ABANDONED.value)
        turn.out.append(SayReleased(worker_id, released))

    def _one(self, handoff_id: HandoffId, apply: Callable[[PrefillHandoff], None]) -> None:
        handoff = self.handoffs.get(handoff_id)
        if handoff is None:
            return
        apply(handoff)
        self._drop_if_ended(handoff_id)

    def _drop_if_ended(self, handoff_id: HandoffId) -> None:
        handoff = self.handoffs[handoff_id]
        if handoff.state is PrefillState.ENDED:
            del self.handoffs[handoff_id]
            if handoff.reason is EndReason.UNREACHABLE:
                self.seen.pop(handoff_id, None)

    # -- all of a worker's --------------------------------------------------------------------------------------------

    def _of(self, worker_id: str, apply: Callable[[PrefillHandoff], None]) -> None:
        for handoff in list(self.handoffs.values()):
            if handoff.decode_worker_id == worker_id:
                self._one(handoff.handoff_id, apply)

    def _connection_lost(self, event: ConnectionLost, turn: Turn) -> None:
        self._of(event.worker_id, lambda handoff: handoff.lost(EndReason.DECODE_WORKER_LOST, turn))

    def _registered(self, event: Registered, turn: Turn) -> None:
        if self.leases.registered(event.worker_id, event.ttl_s, event.term):
            self._of(event.worker_id, lambda handoff: handoff.fenced(turn))

    def _lease_ended(self, event: LeaseEnded, turn: Turn) -> None:
        self.leases.ended(event.worker_id, turn.now_s)
        self._of(event.worker_id, lambda handoff: handoff.lost(EndReason.DECODE_WORKER_LOST, turn))

    def _lease_lost(self, event: LeaseLost, turn: Turn) -> None:
        for handoff_id in list(self.handoffs):
            self._one(handoff_id, lambda handoff: handoff.lost(event.reason, turn))

    def _tick(self, event: Tick, turn: Turn) -> None:
        for worker_id in self.leases.take_fenced(turn.now_s):
            self._of(worker_id, lambda handoff: handoff.fenced(turn))
        for handoff_id, handoff in list(self.handoffs.items()):
            handoff.tick(self.leases.gone_s(handoff.decode_worker_id, handoff.over_s), turn)
            self._drop_if_ended(handoff_id)


_HANDLERS: dict[type, Callable[[PrefillLedger, Any, Turn], None]] = {
    Pulled: PrefillLedger._pulled,
    Declined: PrefillLedger._declined,
    Cancelled: PrefillLedger._cancelled,
    ClaimFailed: PrefillLedger._claim_failed,
    Unreachable: PrefillLedger._unreachable,
    Granted: PrefillLedger._granted,
    Refused: PrefillLedger._refused,
    EngineRefused: PrefillLedger._engine_refused,
    LoadWanted: PrefillLedger._load_wanted,
    ChunkComputed: PrefillLedger._chunk_computed,
    ReadEnded: PrefillLedger._read_ended,
    HitsVerified: PrefillLedger._hits_verified,
    ChunkChecksummed: PrefillLedger._chunk_checksummed,
    Written: PrefillLedger._written,
    Abandoned: PrefillLedger._abandoned,
    Fetched: PrefillLedger._fetched,
    ReleaseHeard: PrefillLedger._release_heard,
    ConnectionLost: PrefillLedger._connection_lost,
    Registered: PrefillLedger._registered,
    LeaseEnded: PrefillLedger._lease_ended,
    LeaseLost: PrefillLedger._lease_lost,
    Tick: PrefillLedger._tick,
}
