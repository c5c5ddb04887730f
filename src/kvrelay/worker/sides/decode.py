"""The decode side's hand-offs, over a ``DecodeLedger``: what each action of the ledger means for the engine, the
transfer thread and the peers, and what of it comes back.

    engine            remote prefills, closed hand-offs ──> Opened, Closed       <──  AllocateLoan, EndLoan, Resume,
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
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from kvrelay.core.handoff import HandoffId, KvDirection, RemotePrefillRequest
from kvrelay.core.latest import Latest
from kvrelay.core.window import MemoryWindow, RemoteKey
from kvrelay.engine.contract import Engine, require
from kvrelay.engine.step import StepOutput
from kvrelay.errors import KvrelayError, PayloadTooLargeError, ProtocolError
from kvrelay.handoff import decode_events as de
from kvrelay.handoff.base import Connection
from kvrelay.handoff.conduct import MAX_FAILURES
from kvrelay.handoff.decode_ledger import DecodeLedger
from kvrelay.handoff.decode_state import DecodeState
from kvrelay.handoff.messages import HandoffClaim, HandoffDone, HandoffProgress, HandoffReady, HandoffReleased, ToDecode
from kvrelay.marks.phases import Phase
from kvrelay.rpc.wire import decode_message
from kvrelay.transfer.values import TransferOp
from kvrelay.worker.marking import WorkerMarks
from kvrelay.worker.reporting.stats import DecodeStats
from kvrelay.worker.sides.ports import ConnectionPort, SidePorts
from kvrelay.worker.sides.side import Side
from kvrelay.worker.translation import opened

_log = logging.getLogger(__name__)

MAX_FETCHED = 1024


class DecodePorts(SidePorts):
    """``push(prefill)`` runs on the event loop for each prefill to be queued; if it fails, ``PushFailed`` follows.

    ``on_arrived(request_id, prefill_s)`` runs on the engine's thread when KV has arrived, before the request continues.
    ``moved(worker_id, tokens, seconds)`` runs there when an engine that moves KV itself has that of so many tokens.
    ``may_use(n)``: so many grants are out. ``term``: our own, now.
    """

    peers: ConnectionPort
    push: Callable[[RemotePrefillRequest], None]
    on_arrived: Callable[[str, float], None]
    moved: Callable[[str, int, float], None]
    may_use: Callable[[int], None]
    term: Callable[[], int]


class IncomingHandoffs(Side[de.DecodeEvent]):
    """``direction``: who moves the KV of the hand-offs that this worker opens."""

    ledger: DecodeLedger
    ports: DecodePorts

    def __init__(
        self,
        ledger: DecodeLedger,
        ports: DecodePorts,
        *,
        worker_id: str,
        direction: KvDirection,
        block_bytes: int,
        stats: DecodeStats,
        marks: WorkerMarks,
    ) -> None:
        super().__init__(ledger, ports)
        self.lends_prefixes = True
        """Other workers may read prefixes of our cache; not of a worker that leaves."""
        self._worker_id = worker_id
        self._direction = direction
        self._block_bytes = block_bytes
        self._stats = stats
        self._marks = marks
        self._prefills: dict[HandoffId, RemotePrefillRequest] = {}
        """Those that are being opened."""
        self._fetching: dict[HandoffId, tuple[de.Fetch, float]] = {}
        """Hand-offs whose KV the engine gets by itself, with the time since when it does."""
        self._fetched_ids: Latest[HandoffId, None] = Latest(MAX_FETCHED)
        """Hand-offs whose KV was fetched or discarded, the latest of them: a release may be repeated. Of the engine
        thread."""

    def handled(self, event: Any) -> None:
        self.ports.may_use(self.ledger.num_grants)
        if isinstance(event, de.Claimed):
            self._marks.add(str(event.claim.handoff_id), Phase.CLAIM_HEARD)
        elif isinstance(event, de.Done):
            self._marks.add(str(event.message.handoff_id), Phase.TRANSFER_ENDED)

    def avoided(self) -> frozenset[str]:
        """The prefill workers that get no grant now."""
        return self.ledger.conduct.avoided(self.ports.turns.now())

    def avoided_of(self, worker_ids: Collection[str]) -> tuple[str, ...]:
        """Those of these prefill workers that get no grant now. From any thread."""
        conduct = self.ledger.conduct
        if not conduct.until_s:
            return ()
        now_s = self.ports.turns.now()
        return tuple(worker_id for worker_id in worker_ids if conduct.is_avoided(worker_id, now_s))

    def carry_out(self, action: Any) -> None:
        """Who does that next."""
        ports = self.ports
        match action:
            case de.Push():
                ports.turns.on_loop(ports.push, self._prefills.pop(action.handoff_id))
            case de.ChecksumHits():
                ports.checksums.compute(action.block_ids, partial(self._hits_checksummed, action))
            case de.SendGrant():
                self._open_window(action)
                ports.turns.on_loop(self._send_grant, action)
            case de.SendToPrefill():
                ports.turns.on_loop(ports.peers.send, action.connection, action.message)
            case de.Fetch() if action.kv_transfer_params is None:
                ports.turns.on_loop(ports.memory.reach, action.worker_id, partial(self._read, action))
            case de.Verify():
                verified = partial(self._verified, action)
                ports.checksums.verify(action.block_ids, action.checksums, verified, action.num_units)
            case de.Avoid():
                self._log_avoided(action)
            case _:
                self._ask_engine(action)

    def _ask_engine(self, action: Any) -> None:
        post = self.ports.engine.post
        match action:
            case de.AllocateLoan():
                post(partial(self._allocate, action))
            case de.LendPrefix():
                post(partial(self._lend_prefix, action))
            case de.EndLoan():
                # Before the engine may use the blocks, so that later writes of the peer are refused.
                self.ports.transfer.close_window(str(action.handoff_id), action.loan)
                post(partial(self._end_loan, action))
            case de.Resume():
                post(partial(self._resume, action))
            case de.ComputeHere():
                _log.info("hand-off %s of request %s ended: %s", action.handoff_id, action.request_id, action.reason)
                post(partial(self._compute_here, action))
            case de.Fetch():
                self._fetching[action.handoff_id] = (action, self.ports.turns.now())
                post(partial(self._fetch, action))
            case de.Discard():
                post(partial(self._discard, action))
            case _:
                raise TypeError(action)

    def _log_avoided(self, action: de.Avoid) -> None:
        _log.warning(
            "prefill worker %s has failed %d hand-offs in a row: its claims are refused for %g s, and what it holds is "
            "computed here",
            action.worker_id,
            MAX_FAILURES,
            self.ledger.rules.avoid_s,
        )

    # -- the engine opens and ends ------------------------------------------------------------------------------------

    def on_step(self, step: StepOutput) -> None:
        """Report the hand-offs that a step has opened and closed. On the engine's thread."""
        for prefill in step.remote_prefills:
            self._prefills[prefill.handoff_id] = prefill
            self.handle(opened(prefill, self.ledger, self._direction, self.ports.term()))
            self._prefills.pop(prefill.handoff_id, None)  # not pushed
        for handoff_id in step.closed_handoffs:
            self.handle(de.Closed(handoff_id))
        for handoff_id, ok in step.fetched_handoffs:
            self._fetched(handoff_id, ok)

    def _allocate(self, action: de.AllocateLoan, core: Engine) -> None:
        block_ids = require(core.lends).lend_fresh(action.handoff_id, action.loan)
        self.handle(de.LoanAllocated(action.handoff_id, action.loan, block_ids))

    def _lend_prefix(self, action: de.LendPrefix, core: Engine) -> None:
        block_ids, prefix = None, action.prefix
        is_ours = action.handoff_id.decode_worker_id == self._worker_id
        # Under any other number a request's own hand-off could take the place of this one, whose loan never ended.
        if is_ours and action.handoff_id.is_of_prefix and self.lends_prefixes and core.schedules is not None:
            block_ids = core.schedules.lend_prefix(action.handoff_id, prefix.token_ids, prefix.cache_salt)
        self.handle(de.LoanAllocated(action.handoff_id, 1, block_ids))

    def _end_loan(self, action: de.EndLoan, core: Engine) -> None:
        require(core.lends).end_loan(action.handoff_id, action.loan)

    def _resume(self, action: de.Resume, core: Engine) -> None:
        message = action.message
        self._marks.arrived(action.request_id, message)
        self.ports.on_arrived(action.request_id, message.prefill_s)
        if core.lends is None:
            self._stats.num_remote_done += 1  # the engine got the KV, and has continued
            require(core.moves).handoff_told(action.request_id)
        elif core.lends.resume_handoff(action.handoff_id, action.loan, message.token_id, message.logprobs):
            self._stats.num_remote_done += 1
            if isinstance(message, HandoffDone):
                self._stats.num_received_bytes += message.num_transferred_bytes
        else:
            self._stats.num_stale += 1

    def _compute_here(self, action: de.ComputeHere, core: Engine) -> None:
        self._stats.num_recomputed += 1
        core.compute_handoff_here(action.handoff_id)

    # -- prefill workers ----------------------------------------------------------------------------------------------

    def on_message(self, connection: Connection, message: ToDecode) -> None:
        """A message of a prefill worker, whose caller may send it."""
        match message:
            case HandoffClaim():
                self.handle(de.Claimed(message, connection, self.ports.term()))
            case HandoffDone():
                self.handle(de.Done(message, connection))
            case HandoffReady():
                self.handle(de.Offered(message, connection))
            case HandoffProgress() | HandoffReleased():
                self.handle(message)

    # -- a prefill worker may touch our blocks ------------------------------------------------------------------------

    def _hits_checksummed(self, action: de.ChecksumHits, checksums: tuple[int, ...] | None) -> None:
        self.handle(de.HitsChecksummed(action.handoff_id, action.generation, checksums))

    def _open_window(self, action: de.SendGrant) -> None:
        """Before the claimant gets the grant. It reads D's hits and, with push, writes the other blocks."""
        # Without a loan it permits nothing, and no end of a loan would close it.
        if action.loan:
            message, size = action.message, self._block_bytes
            num_hit_blocks = message.num_cached_tokens // self.ledger.rules.block_size
            hits, others = message.block_ids[:num_hit_blocks], message.block_ids[num_hit_blocks:]
            key = RemoteKey(str(message.handoff_id), message.generation)
            window = MemoryWindow(key, action.loan, action.worker_id, hits, others, size, size)
            self.ports.transfer.open_window(window)

    def _send_grant(self, action: de.SendGrant) -> None:
        message = action.message
        self._marks.add(str(message.handoff_id), Phase.GRANTED)
        try:
            is_sent = self.ports.peers.send(action.connection, message)
        except PayloadTooLargeError as exc:
            _log.error("hand-off %s cannot be granted: %s", message.handoff_id, exc)
            is_sent = False
        if not is_sent:
            self.ports.turns.soon(self.handle, de.GrantNotSent(message.handoff_id, message.generation))

    def notified(self, payload: bytes) -> None:
        """The last write's notification has arrived. Any other ``payload`` is refused. On the transfer thread."""
        try:
            message = decode_message(payload)
        except ProtocolError as exc:
            _log.warning("notification refused: %s", exc)
            return
        if not isinstance(message, HandoffDone):
            _log.warning("notification refused: %s is not HandoffDone", type(message).__name__)
            return
        self.handle(de.Done(message))

    def _verified(self, action: de.Verify, damage: str | None) -> None:
        handoff = self.ledger.handoffs.get(action.handoff_id)
        if handoff is not None and handoff.state is DecodeState.VERIFYING:  # else nobody waits for it any more
            self._stats.num_verified_blocks += len(action.block_ids) if damage is None else 0
            self._stats.num_kv_checksum_mismatches += damage is not None
        if damage is not None:
            _log.warning("KV of hand-off %s from %s is refused: %s", action.handoff_id, action.worker_id, damage)
        self.handle(de.Verified(action.handoff_id, action.generation, damage is None))

    # -- pull: we read a prefill worker's blocks, or our engine does --------------------------------------------------

    def _fetch(self, action: de.Fetch, core: Engine) -> None:
        assert action.kv_transfer_params is not None
        if not self._is_wanted(action) or not require(core.moves).fetch_handoff(
            action.handoff_id, action.kv_transfer_params
        ):
            self._fetched(action.handoff_id, False)

    def _is_wanted(self, action: de.Fetch) -> bool:
        """Not after our lease was lost meanwhile: once we have registered again, P has freed its blocks."""
        handoff = self.ledger.handoffs.get(action.handoff_id)
        return handoff is not None and handoff.state is DecodeState.READING

    def _fetched(self, handoff_id: HandoffId, ok: bool) -> None:
        fetch, since_s = self._fetching.pop(handoff_id)
        if ok:
            self._is_fetched(handoff_id)
            # How much of the prompt the engine had already, it alone knows.
            handoff = self.ledger.handoffs.get(handoff_id)
            if handoff is not None:
                self.ports.moved(fetch.worker_id, handoff.num_tokens, self.ports.turns.now() - since_s)
        self.handle(de.FetchEnded(handoff_id, fetch.generation, ok))

    def _is_fetched(self, handoff_id: HandoffId) -> bool:
        """Whether this was known; from now on it is."""
        is_known = handoff_id in self._fetched_ids
        self._fetched_ids[handoff_id] = None
        return is_known

    def _discard(self, action: de.Discard, core: Engine) -> None:
        if not self._is_fetched(action.handoff_id):
            require(core.moves).discard_kv(action.kv_transfer_params)

    def _read(self, action: de.Fetch, error: KvrelayError | None) -> None:
        """P keeps the blocks of its grant until it hears that this has ended."""
        if error is not None or not self._is_wanted(action):
            self._read_ended(action, "nobody waits for it any more" if error is None else error.message)
            return
        worker_id, size = action.worker_id, action.remote_block_size
        pieces = self.ports.memory.pieces(TransferOp.READ, worker_id, action.here, action.there, size)
        if pieces is None:
            self._read_ended(action, "its blocks do not fit the memory that it has registered")
            return
        self._stats.num_received_bytes += pieces.num_bytes
        self._marks.posted(str(action.handoff_id), pieces.num_bytes, pieces.num_pieces)
        ended = partial(self._read_ended, action)
        self.ports.transfer.submit(TransferOp.READ, worker_id, pieces, on_done=ended, key=action.key)

    def _read_ended(self, action: de.Fetch, error: str | None) -> None:
        self._marks.add(str(action.handoff_id), Phase.TRANSFER_ENDED)
        if error is not None:
            _log.warning("hand-off %s cannot be read from %s: %s", action.handoff_id, action.worker_id, error)
        self.handle(de.FetchEnded(action.handoff_id, action.generation, error is None))
