"""The prefill side's hand-offs, over a ``PrefillLedger``: what each action of the ledger means for the engine, the
transfer thread and the decode workers, and what of it comes back.

    event loop        entries, answers, connections, leases ──> Pulled, ...           <──  SendClaim, SendRelease,
                                                                                           SendToDecode, Settle
    engine            loads and chunks of a step ──> LoadRequested, ChunkComputed,    <──  Compute, ReportLoaded, Keep,
                                                     Kept                                  StopComputing, FreeBlocks
    transfer thread                                  HitsRead, Written                <──  ReadHits, Write
    checksum thread                                  HitsVerified, ChunkChecksummed   <──  VerifyHits, ChecksumChunk

The rules of the protocol are in ``kvrelay/handoff``. The transfer thread keeps a peer's transfers in order. It sends
HandoffDone only after the writes before it, and never if one of them has failed (they share a group).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import msgspec

from kvrelay.core.handoff import HandoffId, HandoffOrder, RemotePrefillRequest
from kvrelay.core.layout import BlockRun
from kvrelay.core.messages import TokenOutput
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason
from kvrelay.engine.contract import Engine, require
from kvrelay.engine.step import HandoffChunk, KvLoad, StepOutput
from kvrelay.errors import KvrelayError, WorkerUnavailableError
from kvrelay.handoff import prefill_events as pe
from kvrelay.handoff.base import EndReason, RefusalReason
from kvrelay.handoff.messages import HandoffGrant, HandoffReady, HandoffRecall, HandoffRefused, ToPrefill
from kvrelay.handoff.prefill_ledger import PrefillLedger
from kvrelay.marks.phases import Phase
from kvrelay.rpc.wire import Message, encode_message
from kvrelay.transfer.values import Pieces, TransferOp
from kvrelay.worker.marking import WorkerMarks
from kvrelay.worker.sides.ports import DecodeWorkerPort, Link, SidePorts
from kvrelay.worker.sides.side import Side
from kvrelay.worker.translation import chunk_computed, engine_request

_log = logging.getLogger(__name__)

PREFIX_READ_TIMEOUT_S = 5.0
"""A prefix that takes longer is computed. The connection to its holder ends then, because the read may still run."""
_CANCELLED = (EndReason.REQUEST_ENDED, EndReason.ABANDONED, EndReason.RECALLED, EndReason.REFUSED)
"""How hand-offs end when a client cancels its request, or this worker is late: not a fault of either worker. A refusal
with another cause is logged when it arrives."""


class Job:
    """A prefill that this worker computes. Where it came from says the subclass, which hears of its progress: on the
    event loop, except for ``received``."""

    order: HandoffOrder
    may_return = False
    """Its queue entry may go back."""

    def __init__(self, request: RemotePrefillRequest) -> None:
        self.request = request
        self.name = str(request.handoff_id)
        """Its request id in the engine."""
        self.num_bytes = self.num_pieces = 0

    def received(self) -> None:
        """The engine receives it; on the engine's thread."""

    def first(self, output: TokenOutput | None) -> None:
        """The first token, before ``settled``. None: the decode worker samples it."""

    def computed(self) -> None:
        """Nothing is left to compute; once."""

    def settled(self) -> None:
        """It is over; once, unless ``returned`` is."""
        raise NotImplementedError

    def returned(self) -> None:
        """Its queue entry goes back."""
        raise AssertionError("no queue entry goes back")


class PrefixRead(Protocol):
    """Who wants a prefix from another worker. Under the ledger's lock."""

    def begins(self, num_bytes: int) -> None:
        """It is granted; the read begins."""

    def ended(self, ok: bool, num_blocks: int, reason: EndReason | None) -> None:
        """So many of the blocks are here; once."""


class PrefillPorts(SidePorts):
    """``may_use(n)``: decode workers may read the blocks of so many hand-offs. ``prepare(sampling, then)``: compile the
    grammar, then ``then(None)`` or ``then(error)``. ``computes_here(handoff_id)``: our own decode side does without a
    prefill worker. ``term``: our own, now.
    """

    peers: DecodeWorkerPort
    may_use: Callable[[int], None]
    prepare: Callable[[SamplingParams, Callable[[KvrelayError | None], None]], None]
    computes_here: Callable[[HandoffId], None]
    term: Callable[[], int]


class OutgoingHandoffs(Side[pe.PrefillEvent]):
    """All prefills that this worker computes for decode workers."""

    ledger: PrefillLedger
    ports: PrefillPorts

    def __init__(self, ledger: PrefillLedger, ports: PrefillPorts, *, model: str, marks: WorkerMarks) -> None:
        super().__init__(ledger, ports)
        self.prefixes: dict[HandoffId, PrefixRead] = {}
        """Reads of other workers' prefixes that have not ended."""
        self.jobs: dict[HandoffId, Job] = {}
        self._by_name: dict[str, HandoffId] = {}
        self._model = model
        self._block_size = ledger.rules.block_size
        self._marks = marks

    def handled(self, event: Any) -> None:
        """A prefill that is only pushed needs no polls before its first write: they would take the interpreter from
        the step that computes it."""
        self.ports.may_use(self.ledger.num_read)

    def carry_out(self, action: Any) -> None:
        """Who does that next."""
        ports, on_loop = self.ports, self.ports.turns.on_loop
        match action:
            case pe.SendClaim():
                on_loop(ports.peers.reach, action.worker_id, partial(self._claim, action))
            case pe.ReadHits():
                self._read(action)
            case pe.VerifyHits():
                ports.checksums.verify(action.blocks.block_ids, action.checksums, partial(self._hits_verified, action))
            case pe.ChecksumChunk():
                ports.checksums.compute(action.block_ids, partial(self._chunk_checksummed, action))
            case pe.Write():
                self._write(action)
            case pe.Computed():
                on_loop(self.jobs[action.handoff_id].computed)
            case pe.Settle():
                on_loop(self._settle, action)
            case pe.Return():
                on_loop(self._return, action)
            case pe.SendToDecode():
                on_loop(self._tell, action)
            case pe.SendRelease():
                heard = partial(self.handle, pe.ReleaseAcknowledged(action.message.handoff_id))
                on_loop(ports.peers.release, action.worker_id, action.message, heard)
            case _:
                self._ask_engine(action)

    def _ask_engine(self, action: Any) -> None:
        post = self.ports.engine.post
        match action:
            case pe.Compute():
                post(partial(self._add_request, self.jobs[action.handoff_id]))
            case pe.ReportLoaded():
                read = self.prefixes.pop(action.handoff_id, None)
                if read is not None:
                    read.ended(action.ok, action.num_blocks, action.reason)
                else:
                    post(partial(self._kv_loaded, action))
            case pe.Keep():
                post(partial(self._keep, action))
            case pe.StopComputing():
                post(partial(self._stop_computing, action))
            case pe.FreeBlocks():
                post(partial(self._free_blocks, action))
            case _:
                raise TypeError(action)

    # -- what is to be done -------------------------------------------------------------------------------------------

    def pulled(self, job: Job, *, is_expired: bool) -> None:
        """An entry of the prefill queue is ours: compute it, or end it."""
        request, handoff_id = job.request, job.request.handoff_id
        if handoff_id.decode_worker_id != request.decode_worker_id:
            _log.warning("an entry of %s for hand-off %s was dropped", request.decode_worker_id, handoff_id)
            job.settled()
        elif request.decode_worker_id == self.ledger.rules.worker_id:
            # We do both: our own engine computes it without a hand-off.
            job.settled()
            self.ports.computes_here(handoff_id)
        elif handoff_id in self.ledger.seen:
            _log.warning("hand-off %s was delivered again; it was handled here before", handoff_id)
            job.settled()
        elif is_expired:
            self._decline(job, EndReason.EXPIRED)
        elif request.model != self._model:
            self._decline(job, EndReason.WRONG_MODEL)
        elif request.sampling.grammar is not None:
            self.ports.prepare(request.sampling, partial(self._prepared, job, self.ports.term()))
        else:
            self.take(job)

    def _prepared(self, job: Job, term: int, error: KvrelayError | None) -> None:
        """Its grammar is compiled, or cannot be."""
        handoff_id = job.request.handoff_id
        if handoff_id in self.ledger.seen:
            _log.warning("hand-off %s was delivered again while its grammar was compiled", handoff_id)
            job.settled()
        elif error is not None:
            _log.warning("hand-off %s is not computed: %s", handoff_id, error)
            self._decline(job, EndReason.ENGINE_REFUSED)
        elif self.ports.term() != term:
            self._decline(job, EndReason.LEASE_LOST)
        else:
            self.take(job)

    def take(self, job: Job) -> None:
        """Compute it, and claim it meanwhile."""
        self._begin(job)
        self._by_name[job.name] = job.request.handoff_id
        is_pulled = job.order is HandoffOrder.DECODE_FIRST
        self._marks.received(job.name, Phase.PULLED if is_pulled else Phase.RECEIVED)
        self.handle(pe.Pulled(job.request, self.ports.term(), job.order, job.may_return))

    def _decline(self, job: Job, reason: EndReason) -> None:
        """Do not compute it, and tell its owner."""
        self._begin(job)
        self.handle(pe.Declined(job.request.handoff_id, job.request.decode_worker_id, reason))

    def _begin(self, job: Job) -> None:
        request = job.request
        self.ports.peers.remember(request.decode_worker_id, request.decode_address)
        self.jobs[request.handoff_id] = job

    def read_prefix(self, read: PrefixRead, event: pe.PrefixWanted) -> None:
        """From any thread."""
        self.prefixes[event.handoff_id] = read
        self.handle(event)

    def _settle(self, action: pe.Settle) -> None:
        job = self._pop(action.handoff_id)
        if action.reason is not None:
            level = logging.INFO if action.reason in _CANCELLED else logging.WARNING
            _log.log(level, "hand-off %s: %s", action.handoff_id, action.reason)
        job.settled()

    def _return(self, action: pe.Return) -> None:
        self._pop(action.handoff_id).returned()

    def _pop(self, handoff_id: HandoffId) -> Job:
        job = self.jobs.pop(handoff_id)
        self._by_name.pop(job.name, None)
        self._marks.forget(job.name)
        return job

    # -- the decode worker --------------------------------------------------------------------------------------------

    def _claim(self, action: pe.SendClaim, link: Link | None, error: KvrelayError | None) -> None:
        handoff_id = action.message.handoff_id
        try:
            if link is not None:
                self._marks.add(str(handoff_id), Phase.CLAIMED)
                link.send(action.message)
                return
        except KvrelayError as exc:
            error = exc
        _log.warning("hand-off %s cannot be claimed: %s", handoff_id, error)
        # Even if sending has failed it may have arrived.
        may_try_elsewhere = link is None and isinstance(error, WorkerUnavailableError)
        self.handle(pe.Unreachable(handoff_id) if may_try_elsewhere else pe.ClaimFailed(handoff_id))

    def on_message(self, worker_id: str, message: Message) -> None:
        """A message of a decode worker. A hand-off's id is valid only from the worker that it names."""
        if not isinstance(message, ToPrefill):
            _log.warning("%s sent an unexpected %s", worker_id, type(message).__name__)
        elif message.handoff_id.decode_worker_id != worker_id:
            _log.warning(
                "%s sent a message about hand-off %s of another worker; dropped it", worker_id, message.handoff_id
            )
        elif isinstance(message, HandoffRecall):
            self.ports.engine.post(partial(self._recall, message))
        else:
            if isinstance(message, HandoffGrant):
                self._marks.add(str(message.handoff_id), Phase.GRANT_HEARD)
            elif isinstance(message, HandoffRefused) and message.reason not in (
                RefusalReason.UNKNOWN,
                RefusalReason.NO_PREFIX,
            ):
                _log.warning("hand-off %s: %s refused the claim: %.100r", message.handoff_id, worker_id, message.reason)
            self.handle(message)

    def _tell(self, action: pe.SendToDecode) -> None:
        message = action.message
        with_marks = self._marks.of_prefill(message) if isinstance(message, HandoffReady) else message
        self.ports.peers.tell(action.worker_id, with_marks)

    # -- the engine ---------------------------------------------------------------------------------------------------

    def on_step(self, step: StepOutput) -> None:
        """Report a step's computed blocks and requested reads. On the engine's thread."""
        for load in step.kv_loads:
            self._load(load)
        for chunk in step.handoff_chunks:
            self._chunk(chunk)
        for kept in step.kept_blocks:
            self.handle(pe.Kept(self._by_name[kept.request_id], kept.block_ids))
        for output in step.outputs if self._by_name else ():
            # The event loop may forget it between a look and the next.
            if output.finish_reason is FinishReason.ERROR and (handoff_id := self._by_name.get(output.request_id)):
                _log.warning("hand-off %s is not computed: %s", handoff_id, output.error)
                self.handle(pe.EngineRefused(handoff_id))

    def _load(self, load: KvLoad) -> None:
        handoff_id = self._by_name.get(load.request_id)
        if handoff_id is not None:
            self.handle(pe.LoadRequested(handoff_id, BlockRun(load.first_block, load.block_ids)))

    def _chunk(self, chunk: HandoffChunk) -> None:
        handoff_id = self._by_name.get(chunk.request_id)
        if handoff_id is None:
            return
        job = self.jobs.get(handoff_id)
        if chunk.last and job is not None and job.order is HandoffOrder.PREFILL_FIRST:
            # Before the ledger handles it, because a hand-off may settle at once.
            self.ports.turns.on_loop(job.first, chunk.first_output)
        self.handle(chunk_computed(handoff_id, chunk))

    def _add_request(self, job: Job, core: Engine) -> None:
        request = job.request
        job.received()
        try:
            core.add_request(engine_request(request, self._block_size, self._marks.listener))
        except KvrelayError as exc:
            _log.warning("hand-off %s is not computed: %s", request.handoff_id, exc)
            self.handle(pe.EngineRefused(request.handoff_id))

    def _recall(self, message: HandoffRecall, core: Engine) -> None:
        if not core.has_begun(str(message.handoff_id)):
            self.handle(pe.Recalled(message.handoff_id, message.generation))

    def _kv_loaded(self, action: pe.ReportLoaded, core: Engine) -> None:
        require(core.schedules).kv_loaded(str(action.handoff_id), action.ok)

    def _stop_computing(self, action: pe.StopComputing, core: Engine) -> None:
        core.abort(str(action.handoff_id))

    def _keep(self, action: pe.Keep, core: Engine) -> None:
        require(core.schedules).keep_blocks(str(action.handoff_id), action.block_ids)

    def _free_blocks(self, action: pe.FreeBlocks, core: Engine) -> None:
        core.sending_finished(str(action.handoff_id))

    # -- transfers and checksums --------------------------------------------------------------------------------------

    def _read(self, action: pe.ReadHits) -> None:
        prefix, ended = self.prefixes.get(action.handoff_id), partial(self._hits_read, action)
        pieces = self._pieces(TransferOp.READ, action)
        if pieces is None:
            self.ports.turns.soon(ended, "no pieces")
            return
        if prefix is not None:
            prefix.begins(pieces.num_bytes)
        else:
            self._count(self.jobs[action.handoff_id], pieces.num_bytes)
        worker_id, limit_s = action.handoff_id.decode_worker_id, None if prefix is None else PREFIX_READ_TIMEOUT_S
        self.ports.transfer.submit(TransferOp.READ, worker_id, pieces, on_done=ended, key=action.key, timeout_s=limit_s)

    def _hits_read(self, action: pe.ReadHits, error: str | None) -> None:
        if error is not None and action.handoff_id in self.prefixes:
            _log.warning("a prefix of %s is computed instead: %s", action.handoff_id.decode_worker_id, error)
        self.handle(pe.HitsRead(action.handoff_id, error is None))

    def _write(self, action: pe.Write) -> None:
        job = self.jobs[action.handoff_id]
        is_first = job.num_pieces == 0
        ended = partial(self._written, action, is_first)
        pieces = self._pieces(TransferOp.WRITE, action)
        if pieces is None:
            self.ports.turns.soon(ended, "no pieces")
            return
        self._count(job, pieces.num_bytes)
        job.num_pieces += pieces.num_pieces
        notify = None
        if is_first and action.done is None:
            self._marks.posted(job.name)
        elif action.done is not None:
            self._marks.posted(job.name, job.num_bytes, job.num_pieces)
            done = msgspec.structs.replace(action.done, num_transferred_bytes=job.num_bytes)
            notify = encode_message(self._marks.of_prefill(done))
        worker_id, group, key = job.request.decode_worker_id, job.name, action.key
        self.ports.transfer.submit(TransferOp.WRITE, worker_id, pieces, notify, on_done=ended, group=group, key=key)

    def _written(self, action: pe.Write, is_first: bool, error: str | None) -> None:
        if error is not None:
            _log.warning("a write of hand-off %s failed: %s", action.handoff_id, error)
        elif is_first and action.done is None:
            self._marks.add(str(action.handoff_id), Phase.FIRST_BYTES)
        self.handle(pe.Written(action.handoff_id, error is None))

    def _pieces(self, op: TransferOp, action: pe.ReadHits | pe.Write) -> Pieces | None:
        theirs = self.ledger.handoffs[action.handoff_id].decode_block_size(self.ledger.rules)
        return self.ports.memory.pieces(op, action.handoff_id.decode_worker_id, action.here, action.there, theirs)

    def _count(self, job: Job, num_bytes: int) -> None:
        job.num_bytes += num_bytes
        self.ledger.counters.num_sent_bytes += num_bytes

    def _hits_verified(self, action: pe.VerifyHits, damage: str | None) -> None:
        handoff_id = action.handoff_id
        if damage is not None:
            _log.warning(
                "KV that hand-off %s read from %s is computed instead: %s",
                handoff_id,
                handoff_id.decode_worker_id,
                damage,
            )
        self.handle(pe.HitsVerified(handoff_id, damage is None))

    def _chunk_checksummed(self, action: pe.ChecksumChunk, checksums: tuple[int, ...] | None) -> None:
        self.handle(pe.ChunkChecksummed(action.handoff_id, checksums))
