"""One hand-off at the prefill worker: its record, and every way in which it ends.

Blocks stay in use until nothing touches them; the decode worker hears of the end until it has acknowledged it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.core.handoff import HandoffId, HandoffOrder
from kvrelay.errors import IllegalTransitionError
from kvrelay.handoff.base import EndReason, count_end
from kvrelay.handoff.messages import HandoffDone, HandoffGrant, HandoffProgress, HandoffReady, HandoffReleased
from kvrelay.handoff.prefill_events import (
    Blocks,
    ChunkComputed,
    Computed,
    FreeBlocks,
    Return,
    SayReleased,
    SendDone,
    SendProgress,
    SendReady,
    Settle,
    StopComputing,
    TellLoaded,
)
from kvrelay.handoff.prefill_state import TRANSITIONS, PrefillState, Turn

MAX_DOUBLINGS = 16


@dataclass(slots=True)
class PrefillEnds:
    """The record and its ends. Every field holds an immutable value."""

    handoff_id: HandoffId
    decode_worker_id: str
    num_blocks: int
    num_cached_tokens: int
    started_s: float
    due_s: float
    """When ``tick`` acts: the claim's deadline, or the next repetition."""
    state: PrefillState = PrefillState.CLAIMING
    grant: HandoffGrant | None = None
    load: Blocks | None = None
    """CLAIMING: the engine's requested read."""
    chunks: tuple[ChunkComputed, ...] = ()
    """Chunks computed and not yet submitted, in order; with pull all of them."""
    checksums: tuple[int, ...] = ()
    """Checksums of the blocks in the order of the request, as far as known."""
    num_tokens: int = 0
    """The request's tokens; 0: as many as ``num_blocks`` hold."""
    num_in_flight: int = 0
    """Reads, writes and checksums that touch our blocks."""
    is_computed: bool = False
    is_sent: bool = False
    """Push: the last write was submitted."""
    done: HandoffDone | None = None
    """Push: the message after the last write."""
    is_heard: bool = False
    """Push: D has acknowledged it."""
    held: tuple[int, ...] = ()
    """Pull: our blocks that D lacks, in the order of the request."""
    ready: HandoffReady | None = None
    kv_transfer_params: bytes | None = None
    """Of an engine that moves KV itself: it has computed KV that D has not reported as fetched."""
    has_blocks: bool = True
    reason: EndReason | None = None
    num_said: int = 0
    over_s: float = 0.0
    """CONFIRMING, RELEASING: since when."""
    order: HandoffOrder = HandoffOrder.DECODE_FIRST
    may_return: bool = False
    """Its entry may go back to the queue if D cannot be reached."""

    # -- ends ---------------------------------------------------------------------------------------------------------

    def stop(self, reason: EndReason, turn: Turn) -> None:
        """Compute, read and write nothing more."""
        if self.state not in (PrefillState.CLAIMING, PrefillState.SENDING, PrefillState.HOLDING):
            return
        self._move(PrefillState.STOPPING)
        self.reason = reason
        self._count(reason, turn)
        turn.out.append(StopComputing(self.handoff_id))
        if self.load is not None and self.num_in_flight == 0:
            # The engine waits for this load; without an answer its request would not end.
            self.load = None
            turn.out.append(TellLoaded(self.handoff_id, False))
        self._computed(turn)
        self.settle(turn)

    def abandoned(self, generation: int, turn: Turn) -> None:
        """D neither waits nor reads any more. A grant that was sent before is void too."""
        if self.state is PrefillState.RELEASING:
            self._say_released(turn)
        elif self.state is PrefillState.CONFIRMING:
            self.reason = EndReason.ABANDONED
            self._move(PrefillState.RELEASING)
            self._say_released(turn)
        elif self.state is PrefillState.CLAIMING or (self.grant is not None and self.grant.generation == generation):
            self.stop(EndReason.ABANDONED, turn)

    def lost(self, reason: EndReason, turn: Turn) -> None:
        """Stop: D does not need it, or it is no longer allowed. Blocks that D may be reading are kept until D says so
        or is fenced."""
        if self.state in (PrefillState.CLAIMING, PrefillState.SENDING):
            self.stop(reason, turn)

    def fenced(self, turn: Turn) -> None:
        """D is fenced: it reads no more, alive or not."""
        self.stop(EndReason.DECODE_WORKER_LOST, turn)

    def fetched(self, generation: int, turn: Turn) -> None:
        """D has read everything, or knows that everything is written, perhaps before we know it ourselves."""
        if self.grant is None or self.grant.generation != generation:
            return
        if self.state is PrefillState.HOLDING:
            self._end(turn)
        elif self.state is PrefillState.CONFIRMING:
            self._move(PrefillState.ENDED)
        elif self.state is PrefillState.SENDING:
            self.is_heard = self.is_sent

    def release_heard(self) -> None:
        """D has acknowledged that we have stopped."""
        if self.state is PrefillState.RELEASING:
            self._move(PrefillState.ENDED)

    def settle(self, turn: Turn) -> None:
        """End the hand-off once nothing touches our blocks any more."""
        if self.num_in_flight:
            return
        if self.state is PrefillState.SENDING and self.is_sent:
            self._end(turn)
        elif self.state is PrefillState.STOPPING:
            self._free(turn)
            is_kept = self.kv_transfer_params is not None
            if self.reason is EndReason.UNREACHABLE or (self.reason is EndReason.REFUSED and not is_kept):
                self._move(PrefillState.ENDED)
            else:
                self.over_s = turn.now_s
                self._move(PrefillState.RELEASING)
                self._say_released(turn)

    def _end(self, turn: Turn) -> None:
        turn.counters.num_prefills += 1
        must_confirm = self.state is PrefillState.SENDING and not self.is_heard
        self.over_s = turn.now_s
        self.due_s = turn.now_s + turn.rules.ready_repeat_s
        self._move(PrefillState.CONFIRMING if must_confirm else PrefillState.ENDED)
        self._free(turn)

    def _free(self, turn: Turn) -> None:
        if self.has_blocks:
            self.has_blocks = False
            is_returned = self.reason is EndReason.UNREACHABLE
            end = Return(self.handoff_id) if is_returned else Settle(self.handoff_id, self.reason)
            turn.out += [FreeBlocks(self.handoff_id), end]

    def _computed(self, turn: Turn) -> None:
        if not self.is_computed:
            self.is_computed = True
            turn.out.append(Computed(self.handoff_id))

    @staticmethod
    def _count(reason: EndReason, turn: Turn) -> None:
        count_end(turn.counters.ends, reason)
        if reason is EndReason.REFUSED:
            turn.counters.num_refused += 1
        elif reason is EndReason.ABANDONED:
            turn.counters.num_abandoned += 1
        elif reason is EndReason.UNREACHABLE:
            turn.counters.num_returned += 1
        else:
            turn.counters.num_failed += 1

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self, gone_s: float | None, turn: Turn) -> None:
        """``gone_s``: since when D has had no lease; None if it has one."""
        if turn.now_s < self.due_s:
            return
        if self.state is PrefillState.CLAIMING:
            self.stop(EndReason.CLAIM_TIMEOUT, turn)
        elif self.state is PrefillState.SENDING:
            self._say_progress(turn)
        elif self.state is PrefillState.HOLDING:
            self._say_ready(turn)
        elif self.state in (PrefillState.CONFIRMING, PrefillState.RELEASING):
            if gone_s is not None and gone_s + turn.rules.gone_for_s <= turn.now_s:
                self._move(PrefillState.ENDED)
            elif self.state is PrefillState.CONFIRMING:
                self._say_done(turn)
            else:
                self._say_released(turn)

    @property
    def next_s(self) -> float | None:
        """When ``tick`` acts next."""
        return None if self.state in (PrefillState.STOPPING, PrefillState.ENDED) else self.due_s

    # -- what is said, and repeated -----------------------------------------------------------------------------------

    def _say_progress(self, turn: Turn) -> None:
        assert self.grant is not None
        self.due_s = turn.now_s + turn.rules.progress_s
        progress = HandoffProgress(self.handoff_id, self.grant.generation, self.grant.secret)
        turn.out.append(SendProgress(self.decode_worker_id, progress))

    def _say_done(self, turn: Turn) -> None:
        assert self.done is not None, "the last write has ended"
        self.due_s = turn.now_s + turn.rules.ready_repeat_s
        turn.out.append(SendDone(self.decode_worker_id, self.done))

    def _say_ready(self, turn: Turn) -> None:
        if self.ready is not None:
            self.due_s = turn.now_s + turn.rules.ready_repeat_s
            turn.out.append(SendReady(self.decode_worker_id, self.ready))

    def _say_released(self, turn: Turn) -> None:
        rules = turn.rules
        self.due_s = turn.now_s + min(rules.release_repeat_s * 2.0**self.num_said, rules.max_release_repeat_s)
        self.num_said = min(self.num_said + 1, MAX_DOUBLINGS)
        error = None if self.reason is None else self.reason.value
        release = HandoffReleased(self.handoff_id, rules.worker_id, error, self.kv_transfer_params)
        turn.out.append(SayReleased(self.decode_worker_id, release))

    def _move(self, state: PrefillState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(f"hand-off {self.handoff_id} cannot go from {self.state} to {state}")
        self.state = state
