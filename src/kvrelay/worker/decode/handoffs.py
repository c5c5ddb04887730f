"""The decode side's driver of hand-offs, over a ``DecodeLedger``.

    engine thread     remote prefills, closed hand-offs ──> Opened, Closed       <──  AllocateLoan, EndLoan, Resume,
                                                            LoanAllocated             ComputeHere
                      pull, by an engine that moves KV  ──> FetchEnded           <──  Fetch
    event loop        claims, releases, connections, leases ──> Claimed, ...     <──  Push, SendGrant, SendToPrefill
    transfer thread   push: notification after the last write ──> Done
                      pull by blocks                        FetchEnded           <──  Fetch (by way of the event loop)
    checksum thread                                 HitsChecksummed, Verified    <──  ChecksumHits, Verify

The rules of the protocol are in ``kvrelay/handoff``. This module does not know frontends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import numpy as np

from kvrelay.core.clock import MonotonicClock
from kvrelay.core.handoff import HandoffId, RemotePrefillRequest
from kvrelay.core.latest import Latest
from kvrelay.core.layout import BlockRun
from kvrelay.core.tasks import TaskSet
from kvrelay.engine.contract import Engine, require
from kvrelay.engine.step import StepOutput
from kvrelay.errors import KvrelayError, PayloadTooLargeError, ProtocolError
from kvrelay.handoff import decode_events as de
from kvrelay.handoff.conduct import MAX_FAILURES
from kvrelay.handoff.decode_ledger import DecodeLedger
from kvrelay.handoff.decode_state import DecodeRules, DecodeState
from kvrelay.handoff.messages import HandoffDone
from kvrelay.marks.phases import Phase
from kvrelay.rpc.wire import decode_message
from kvrelay.transfer.values import GrantRef, Int64Array, TransferOp
from kvrelay.worker.driver import LedgerDriver, PeersInMemory
from kvrelay.worker.reporting.stats import DecodeStats
from kvrelay.worker.surroundings import Surroundings
from kvrelay.worker.translation import opened

_log = logging.getLogger(__name__)

MAX_FETCHED = 1024


class IncomingHandoffs(LedgerDriver[de.DecodeEvent]):
    """``push(prefill)`` runs on the event loop for each prefill to be queued; if it fails, ``PushFailed`` follows.

    ``on_arrived(request_id, prefill_s)`` runs on the engine's thread when KV has arrived, before the request continues.
    """

    def __init__(
        self,
        around: Surroundings,
        stats: DecodeStats,
        *,
        push: Callable[[RemotePrefillRequest], None],
        on_arrived: Callable[[str, float], None],
    ) -> None:
        settings, layout = around.settings, around.engine.facts.kv_layout
        rules = DecodeRules(
            block_size=layout.block_size,
            kv_compatibility=around.kv_compatibility,
            regions=layout.region_names,
            entry_tokens=layout.entry_tokens,
            tail_tokens=layout.tail_tokens,
            remote_prefill_timeout_s=settings.disagg.remote_prefill_timeout_s,
            max_attempts=settings.disagg.max_handoff_attempts,
            checksums=settings.transfer.kv_checksums,
        )
        self.ledger = DecodeLedger(rules)
        self.lends_prefixes = True
        """Other workers may read prefixes of our cache; not of a worker that leaves."""
        self._around = around
        self._marks = around.marks
        self._engine = around.engine
        self._transfer = around.transfer
        self._checksums = around.checksums
        self._server = around.server
        self._stats = stats
        self._push = push
        self._tasks = TaskSet()
        self._on_arrived = on_arrived
        self._direction = around.direction
        self._block_bytes = layout.block_bytes
        self._prefills: dict[HandoffId, RemotePrefillRequest] = {}
        """Those that are being opened."""
        self._fetching: dict[HandoffId, int] = {}
        """Hand-offs whose KV the engine gets by itself, with the generation of their grants."""
        self._fetched_ids: Latest[HandoffId, None] = Latest(MAX_FETCHED)
        """Hand-offs whose KV was fetched or discarded, the latest of them: a release may be repeated. Of the engine
        thread."""
        self._peers_in_memory = PeersInMemory(around.transfer)
        super().__init__(
            self.ledger,
            MonotonicClock(),
            {
                de.Push: self._queue,
                de.AllocateLoan: self._allocate,
                de.LendPrefix: self._lend_prefix,
                de.ChecksumHits: self._checksum_hits,
                de.SendGrant: self._grant,
                de.SendToPrefill: lambda action: self.on_loop(self._send, action),
                de.Fetch: self._read,
                de.Verify: self._verify,
                de.EndLoan: self._end_loan,
                de.Resume: lambda action: self._engine.post(partial(self._resume, action)),
                de.Discard: self._discard,
                de.Avoid: self._avoid,
                de.ComputeHere: self._compute_here,
            },
        )

    def handled(self, event: de.DecodeEvent) -> None:
        self._peers_in_memory.may_use(0 if self._engine.facts.moves_kv else self.ledger.num_grants)
        if isinstance(event, de.Claimed):
            self._marks.add(str(event.claim.handoff_id), Phase.CLAIM_HEARD)
        elif isinstance(event, de.Done):
            self._marks.add(str(event.message.handoff_id), Phase.TRANSFER_ENDED)

    async def close(self) -> None:
        """Read nothing more."""
        await self._tasks.close()

    def avoided(self) -> frozenset[str]:
        """The prefill workers that get no grant now."""
        return self.ledger.conduct.avoided(self._clock.now())

    # -- engine thread ------------------------------------------------------------------------------------------------

    def on_step(self, step: StepOutput) -> None:
        """Report the hand-offs that a step has opened and closed."""
        for prefill in step.remote_prefills:
            self._prefills[prefill.handoff_id] = prefill
            self.handle(opened(prefill, self.ledger, self._direction, self._around.term))
            self._prefills.pop(prefill.handoff_id, None)  # not pushed
        for handoff_id in step.closed_handoffs:
            self.handle(de.Closed(handoff_id))
        for handoff_id, ok in step.fetched_handoffs:
            self._fetched(handoff_id, ok)

    def _fetched(self, handoff_id: HandoffId, ok: bool) -> None:
        if ok:
            self._is_fetched(handoff_id)
        self.handle(de.FetchEnded(handoff_id, self._fetching.pop(handoff_id), ok))

    def _is_fetched(self, handoff_id: HandoffId) -> bool:
        """Whether this was known; from now on it is."""
        is_known = handoff_id in self._fetched_ids
        self._fetched_ids[handoff_id] = None
        return is_known

    def _resume(self, action: de.Resume, core: Engine) -> None:
        message = action.message
        self._marks.arrived(action.request_id, message)
        self._on_arrived(action.request_id, message.prefill_s)
        if core.lends is None:
            self._stats.num_remote_done += 1  # the engine got the KV, and has continued
        elif core.lends.resume_handoff(action.handoff_id, action.loan, message.token_id, message.logprobs):
            self._stats.num_remote_done += 1
            if isinstance(message, HandoffDone):
                self._stats.num_received_bytes += message.num_transferred_bytes
        else:
            self._stats.num_stale += 1

    # -- transfer thread ----------------------------------------------------------------------------------------------

    def notified(self, payload: bytes) -> None:
        """The last write's notification has arrived. Any other ``payload`` is refused."""
        try:
            message = decode_message(payload)
        except ProtocolError as exc:
            _log.warning("notification refused: %s", exc)
            return
        if not isinstance(message, HandoffDone):
            _log.warning("notification refused: %s is not HandoffDone", type(message).__name__)
            return
        self.handle(de.Done(message))

    # -- actions ------------------------------------------------------------------------------------------------------

    def _queue(self, action: de.Push) -> None:
        self.on_loop(self._push, self._prefills.pop(action.handoff_id))

    def _allocate(self, action: de.AllocateLoan) -> None:
        def allocate(core: Engine) -> None:
            block_ids = require(core.lends).lend_fresh(action.handoff_id, action.loan)
            self.handle(de.LoanAllocated(action.handoff_id, action.loan, block_ids))

        self._engine.post(allocate)

    def _lend_prefix(self, action: de.LendPrefix) -> None:
        def lend(core: Engine) -> None:
            block_ids, prefix = None, action.prefix
            is_ours = action.handoff_id.decode_worker_id == self._around.worker_id
            # Under any other number a request's own hand-off could take the place of this one, whose loan never ended.
            if is_ours and action.handoff_id.is_of_prefix and self.lends_prefixes and core.schedules is not None:
                block_ids = core.schedules.lend_prefix(action.handoff_id, prefix.token_ids, prefix.cache_salt)
            self.handle(de.LoanAllocated(action.handoff_id, 1, block_ids))

        self._engine.post(lend)

    def _read(self, action: de.Fetch) -> None:
        """By blocks, or by an engine that moves the KV itself."""
        params = action.kv_transfer_params
        if params is None:
            self.on_loop(self._begin_read, action)
            return

        def fetch(core: Engine) -> None:
            if not require(core.moves).fetch_handoff(action.handoff_id, params):
                self._fetched(action.handoff_id, False)

        self._fetching[action.handoff_id] = action.generation
        self._engine.post(fetch)

    def _begin_read(self, action: de.Fetch) -> None:
        self._tasks.spawn(self._read_blocks(action))

    async def _read_blocks(self, action: de.Fetch) -> None:
        """Pull by blocks: P keeps the blocks of its grant until it hears that this has ended."""

        def ended(error: str | None) -> None:
            self._marks.add(str(action.handoff_id), Phase.TRANSFER_ENDED)
            if error is not None:
                _log.warning("hand-off %s cannot be read from %s: %s", action.handoff_id, action.worker_id, error)
            self.handle(de.FetchEnded(action.handoff_id, action.generation, error is None))

        try:
            await self._around.memory.connect(action.worker_id)
        except KvrelayError as exc:
            ended(exc.message)
            return
        except Exception as exc:  # noqa: BLE001 - the outermost frame of a read: its request waits for the end
            _log.exception("reading hand-off %s failed", action.handoff_id)
            ended(repr(exc))
            return
        here = BlockRun(action.first_block, action.block_ids)
        there = BlockRun(action.remote_first_block, action.remote_block_ids)
        pieces = self._around.memory.pieces(TransferOp.READ, action.worker_id, here, there, action.remote_block_size)
        if pieces is None:
            ended("its blocks do not fit the memory that it has registered")
            return
        self._stats.num_received_bytes += pieces.num_bytes
        self._marks.posted(str(action.handoff_id), pieces.num_bytes, pieces.num_pieces)
        grant = GrantRef(str(action.handoff_id), action.generation)
        self._transfer.submit(TransferOp.READ, action.worker_id, pieces, on_done=ended, grant=grant)

    def _discard(self, action: de.Discard) -> None:
        def discard(core: Engine) -> None:
            if not self._is_fetched(action.handoff_id):
                require(core.moves).discard_kv(action.kv_transfer_params)

        self._engine.post(discard)

    def _checksum_hits(self, action: de.ChecksumHits) -> None:
        def checksummed(checksums: tuple[int, ...] | None) -> None:
            self.handle(de.HitsChecksummed(action.handoff_id, action.generation, checksums))

        self._checksums.compute(action.block_ids, checksummed)

    def _verify(self, action: de.Verify) -> None:
        def verified(damage: str | None) -> None:
            handoff = self.ledger.handoffs.get(action.handoff_id)
            if handoff is not None and handoff.state is DecodeState.VERIFYING:  # else nobody waits for it any more
                self._stats.num_verified_blocks += len(action.block_ids) if damage is None else 0
                self._stats.num_kv_checksum_mismatches += damage is not None
            if damage is not None:
                _log.warning("KV of hand-off %s from %s is refused: %s", action.handoff_id, action.worker_id, damage)
            self.handle(de.Verified(action.handoff_id, action.generation, damage is None))

        self._checksums.verify(action.block_ids, action.checksums, verified, action.num_units)

    def _grant(self, action: de.SendGrant) -> None:
        grants, message = self._transfer.grants, action.message
        handoff = self.ledger.handoffs.get(message.handoff_id)
        grant = None if handoff is None else handoff.find(message.generation)
        if grants is not None and grant is not None:
            # Before the claimant gets the grant. It reads D's hits and, with push, writes the other blocks.
            num_hit_blocks = message.num_cached_tokens // self.ledger.rules.block_size
            hits, others = message.block_ids[:num_hit_blocks], message.block_ids[num_hit_blocks:]
            ref = GrantRef(str(message.handoff_id), message.generation)
            grants.open(ref, grant.loan, action.worker_id, self._bytes_of(hits), self._bytes_of(others))
        self.on_loop(self._send_grant, action)

    def _bytes_of(self, block_ids: tuple[int, ...]) -> Int64Array:
        """Rows of offset and length."""
        offsets = np.asarray(block_ids, dtype=np.int64) * self._block_bytes
        return np.stack((offsets, np.full_like(offsets, self._block_bytes)), axis=1)

    def _end_loan(self, action: de.EndLoan) -> None:
        if self._transfer.grants is not None:
            # Before the engine may use the blocks, so that later writes of the peer are refused.
            self._transfer.grants.close(str(action.handoff_id), action.loan)
        self._engine.post(lambda core: require(core.lends).end_loan(action.handoff_id, action.loan))

    def _avoid(self, action: de.Avoid) -> None:
        _log.warning(
            "prefill worker %s has failed %d hand-offs in a row: its claims are refused for %g s, and what it holds is "
            "computed here",
            action.worker_id,
            MAX_FAILURES,
            self.ledger.rules.avoid_s,
        )

    def _compute_here(self, action: de.ComputeHere) -> None:
        _log.info("hand-off %s of request %s ended: %s", action.handoff_id, action.request_id, action.reason)

        def compute_here(core: Engine) -> None:
            self._stats.num_recomputed += 1
            core.compute_handoff_here(action.handoff_id)

        self._engine.post(compute_here)

    def _send_grant(self, action: de.SendGrant) -> None:
        message = action.message
        self._marks.add(str(message.handoff_id), Phase.GRANTED)
        try:
            is_sent = self._server.send(action.connection, message)  # type: ignore[arg-type]
        except PayloadTooLargeError as exc:
            _log.error("hand-off %s cannot be granted: %s", message.handoff_id, exc)
            is_sent = False
        if not is_sent:
            self.soon(de.GrantNotSent(message.handoff_id, message.generation))

    def _send(self, action: de.SendToPrefill) -> None:
        self._server.send(action.connection, action.message)  # type: ignore[arg-type]
