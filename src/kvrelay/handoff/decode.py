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

    PREPARING ──hits checksummed──> OUT ──hand-off closed, another claimant──> ABANDONED ──Done, Released, fenced──> end
        └──no longer wanted──> WITHDRAWN ──hits checksummed──> end      (OUT ends in the same ways)
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.core.checksums import unit_tokens
from kvrelay.core.handoff import HandoffAbandon, HandoffDone, HandoffFetched, HandoffProgress, HandoffReady
from kvrelay.handoff.base import Connection, EndReason, RefusalReason
from kvrelay.handoff.decode_claims import DecodeClaims
from kvrelay.handoff.decode_events import Allocated, Read, Resume, Send, Verify
from kvrelay.handoff.decode_state import DecodeState, Grant, GrantState, Turn, refuse, tell_fetched


@dataclass(slots=True)
class DecodeHandoff(DecodeClaims):
    """The state machine. Methods are events; ``settle`` follows each of them.

    Here is what arrives; claims are in ``DecodeClaims``, the record and its ends in ``DecodeEnds``.
    """

    def progress(self, message: HandoffProgress, turn: Turn) -> None:
        """The claimant lives and computes."""
        holder = self.holder
        if holder is not None and (message.generation, message.secret) == (holder.generation, holder.secret):
            self.heard_s = turn.now_s
        else:
            turn.counters.num_stale += 1

    def allocated(self, event: Allocated, turn: Turn) -> None:
        """The engine's answer to a requested loan."""
        if event.loan != self.allocating:
            return
        self.allocating = 0
        if event.block_ids is not None:
            self.loans = (*self.loans, event.loan)
        waiting, self.waiting = self.waiting, None
        if self.state is DecodeState.OFFERED:
            self._read(event, turn)
        elif self.state is DecodeState.RENEWING and waiting is not None:
            self._renewed(event, waiting, turn)
        elif waiting is not None:
            refuse(waiting, RefusalReason.UNKNOWN, turn)

    # -- push ---------------------------------------------------------------------------------------------------------

    def done(self, message: HandoffDone, connection: Connection | None, turn: Turn) -> None:
        """Push: a generation's last write has arrived. A late one still ends its own grant: no write follows it.

        ``connection``: the one of a repeated message; None: it was the notification.
        """
        grant = self.find(message.generation)
        if grant is None:
            turn.counters.num_stale += 1
            tell_fetched(message, connection, turn)
            return
        is_known = grant.state in (GrantState.OUT, GrantState.ABANDONED)
        if not is_known or grant.secret != message.secret:
            turn.counters.num_stale += 1
            return
        tell_fetched(message, connection or turn.connections.get(grant.worker_id, grant.connection), turn)
        self._end_grant(grant)
        turn.conduct.done(grant.worker_id)
        is_current = message.generation == self.generation
        if not is_current or self.state not in (DecodeState.GRANTED, DecodeState.RENEWING):
            turn.counters.num_stale += 1
            return
        self._arrived(message, grant.worker_id, turn)

    # -- pull ---------------------------------------------------------------------------------------------------------

    def ready(self, message: HandoffReady, turn: Turn) -> bool:
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
                self._start_read(message, grant, turn)
            else:
                self._move(DecodeState.OFFERED)
                self._allocate(turn)
        return self.state in (DecodeState.OFFERED, DecodeState.READING)

    def _read(self, event: Allocated, turn: Turn) -> None:
        """Blocks to read into are available."""
        holder = self.holder
        if event.block_ids is None:
            self.compute_here(EndReason.NO_BLOCKS, turn)
        elif holder is not None and isinstance(self.arrived, HandoffReady):
            self.loan, self.block_ids = event.loan, event.block_ids
            self._start_read(self.arrived, holder, turn)

    def _start_read(self, message: HandoffReady, grant: Grant, turn: Turn) -> None:
        if message.kv_transfer_params is not None:
            self._move(DecodeState.READING)
            self.is_touched = True
            turn.out.append(
                Read(self.handoff_id, grant.generation, grant.worker_id, (), (), 0, 0, message.kv_transfer_params)
            )
            return
        missing = self.block_ids[self.num_hit_blocks :]
        ours, theirs = turn.rules.block_size, grant.block_size or turn.rules.block_size
        num_tokens = self.num_tokens or len(self.block_ids) * ours
        first = self.num_hit_blocks * ours // theirs if theirs > 0 else 0
        if theirs < 1 or len(message.block_ids) != -(-num_tokens // theirs) - first:
            self.compute_here(EndReason.READ_FAILED, turn)
            return
        self._move(DecodeState.READING)
        self.is_touched = True
        read = Read(
            self.handoff_id, grant.generation, grant.worker_id, message.block_ids, missing, first, self.num_hit_blocks
        )
        turn.out.append(read)

    def read_ended(self, generation: int, ok: bool, turn: Turn) -> None:
        """Pull: our read has ended, so P may free its blocks."""
        grant = self.find(generation)
        self.is_touched = False
        if grant is not None:
            # P's engine frees what ours has not read; if this message is lost, P says Ready again and is told again.
            kind = HandoffAbandon if _is_by_engine(self.arrived) and not ok else HandoffFetched
            turn.out.append(Send(grant.connection, kind(self.handoff_id, generation)))
            self._end_grant(grant)
            if ok:
                turn.conduct.done(grant.worker_id)
        if self.state is not DecodeState.READING or self.arrived is None:
            return
        if ok:
            self._arrived(self.arrived, "" if grant is None else grant.worker_id, turn)
        else:
            self.compute_here(EndReason.READ_FAILED, turn)

    # -- everything has arrived ---------------------------------------------------------------------------------------

    def _arrived(self, message: HandoffDone | HandoffReady, worker_id: str, turn: Turn) -> None:
        self.arrived = message
        if self.waiting is not None:
            refuse(self.waiting, RefusalReason.BUSY, turn)
            self.waiting = None
        self._move(DecodeState.VERIFYING)
        if _is_by_engine(message) or (message.checksums is None and not turn.rules.checksums):
            self._resume(turn)
            return
        self.is_touched = True
        blocks, size = self.block_ids[self.num_hit_blocks :], turn.rules.block_size
        unit = unit_tokens(size)
        num_units = -(-(self.num_tokens or len(self.block_ids) * size) // unit) - self.num_hit_blocks * size // unit
        verify = Verify(self.handoff_id, message.generation, worker_id, blocks, message.checksums, num_units)
        turn.out.append(verify)

    def verified(self, ok: bool, turn: Turn) -> None:
        """The received blocks were compared with their checksums."""
        self.is_touched = False
        if self.state is not DecodeState.VERIFYING:
            turn.counters.num_stale += 1
        elif ok:
            self._resume(turn)
        else:
            self.compute_here(EndReason.KV_DAMAGED, turn)

    def _resume(self, turn: Turn) -> None:
        assert self.arrived is not None, "something has arrived"
        turn.counters.num_done += 1
        self._move(DecodeState.CLOSED)
        turn.out.append(Resume(self.handoff_id, self.request_id, self.loan, self.arrived))


def _is_by_engine(message: HandoffDone | HandoffReady | None) -> bool:
    """Whether D's engine gets the KV by itself."""
    return isinstance(message, HandoffReady) and message.kv_transfer_params is not None
