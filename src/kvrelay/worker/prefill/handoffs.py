"""The prefill side's driver of hand-offs, over a ``PrefillLedger``.

    event loop        entries, answers, connections, leases ──> Pulled, Granted, ...  <──  SendClaim, SendRelease,
                                                                                           SendToDecode, Settle
    engine thread     loads and chunks of a step ──> LoadRequested, ChunkComputed,    <──  Compute, ReportLoaded, Keep,
                                                     Kept                                  StopComputing, FreeBlocks
    transfer thread                                  HitsRead, Written                <──  ReadHits, Write
    checksum thread                                  HitsVerified, ChunkChecksummed   <──  VerifyHits, ChecksumChunk

The rules of the protocol are in ``kvrelay/handoff``. The transfer thread keeps a peer's transfers in order. It sends
HandoffDone only after the writes before it, and never if one of them has failed (they share a group).
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Protocol

import msgspec

from kvrelay.core.clock import MonotonicClock
from kvrelay.core.handoff import HandoffId, HandoffOrder, RemotePrefillRequest
from kvrelay.core.layout import BlockRun
from kvrelay.core.messages import TokenOutput
from kvrelay.core.status import FinishReason
from kvrelay.core.tasks import TaskSet
from kvrelay.engine.contract import Engine, require
from kvrelay.engine.step import HandoffChunk, KvLoad, StepOutput
from kvrelay.errors import KvrelayError, WorkerUnavailableError
from kvrelay.handoff import prefill_events as pe
from kvrelay.handoff.base import EndReason, RefusalReason, Tick
from kvrelay.handoff.messages import HandoffAbandon, HandoffFetched, HandoffGrant, HandoffReady, HandoffRefused
from kvrelay.handoff.prefill_ledger import PrefillLedger
from kvrelay.handoff.prefill_state import PrefillRules
from kvrelay.marks.phases import Phase
from kvrelay.rpc.wire import Message, encode_message
from kvrelay.transfer.values import GrantRef, Pieces, TransferOp
from kvrelay.worker.driver import LedgerDriver, PeersInMemory
from kvrelay.worker.prefill.connections import DecodePeer
from kvrelay.worker.prefill.releases import Releases
from kvrelay.worker.surroundings import Surroundings
from kvrelay.worker.translation import chunk_computed, engine_request, pulled

_log = logging.getLogger(__name__)

PREFIX_READ_TIMEOUT_S = 5.0
"""A prefix that takes longer is computed. The connection to its holder ends then, because the read may still run."""
_CANCELLED = (EndReason.REQUEST_ENDED, EndReason.ABANDONED, EndReason.REFUSED)
"""How hand-offs end when a client cancels its request: not a fault of either worker. A refusal with another cause is
logged when it arrives."""


class Origin(Protocol):
    """Where a prefill came from, and who hears of its progress. On the event loop, except for ``received``."""

    order: HandoffOrder
    may_return: bool
    """Its queue entry may go back."""

    def received(self) -> None:
        """The engine receives it; on the engine's thread."""

    def first(self, output: TokenOutput | None) -> None:
        """The first token, before ``settled``. None: the decode worker samples it."""

    def computed(self) -> None:
        """Nothing is left to compute; once."""

    def settled(self) -> None:
        """It is over; once, unless ``returned`` is."""

    def returned(self) -> None:
        """Its queue entry goes back."""


class Job(msgspec.Struct):
    """A prefill that this worker computes."""

    request: RemotePrefillRequest
    origin: Origin
    num_bytes: int = 0
    num_pieces: int = 0

    @property
    def name(self) -> str:
        """Its request id in the engine."""
        return str(self.request.handoff_id)


class PrefixRead(Protocol):
    """Who wants a prefix from another worker. Under the ledger's lock."""

    def begins(self, num_bytes: int) -> None:
        """It is granted; the read begins."""

    def ended(self, ok: bool, num_blocks: int, reason: EndReason | None) -> None:
        """So many of the blocks are here; once."""


class OutgoingHandoffs(LedgerDriver[pe.PrefillEvent]):
    """All prefills that this worker computes for decode workers."""

    def __init__(self, around: Surroundings, rules: PrefillRules) -> None:
        self.ledger = PrefillLedger(rules)
        self.prefixes: dict[HandoffId, PrefixRead] = {}
        """Reads of other workers' prefixes that have not ended."""
        self.jobs: dict[HandoffId, Job] = {}
        self._by_name: dict[str, HandoffId] = {}
        self._block_size = rules.block_size
        self._memory = around.memory
        self._engine = around.engine
        self._transfer = around.transfer
        self._peers_in_memory = PeersInMemory(around.transfer)
        self._checksums = around.checksums
        self._peers = around.peers
        self._marks = around.marks
        self._tasks = TaskSet()
        self._telling: set[HandoffId] = set()
        self._releases = Releases(around.peers, lambda handoff_id: self.handle(pe.ReleaseAcknowledged(handoff_id)))
        super().__init__(
            self.ledger,
            MonotonicClock(),
            {
                pe.Compute: self._compute,
                pe.SendClaim: lambda action: self.on_loop(self._begin_claim, action),
                pe.ReadHits: self._read,
                pe.VerifyHits: self._verify_hits,
                pe.ReportLoaded: self._tell_loaded,
                pe.ChecksumChunk: self._checksum_chunk,
                pe.Write: self._write,
                pe.Keep: self._keep,
                pe.StopComputing: self._stop_computing,
                pe.FreeBlocks: self._free_blocks,
                pe.Computed: lambda action: self.on_loop(self.jobs[action.handoff_id].origin.computed),
                pe.Settle: lambda action: self.on_loop(self._settle, action),
                pe.Return: lambda action: self.on_loop(self._return, action),
                pe.SendToDecode: lambda action: self.on_loop(self._tell, action),
                pe.SendRelease: lambda action: self.on_loop(self._releases.say, action.worker_id, action.message),
            },
        )

    def handled(self, event: pe.PrefillEvent | Tick) -> None:
        """A prefill that is only pushed needs no polls before its first write: they would take the interpreter from
        the step that computes it."""
        self._peers_in_memory.may_use(0 if self._engine.facts.moves_kv else self.ledger.num_read)

    async def close(self) -> None:
        """Claim and release nothing more: the end of our lease has the same effect."""
        await self._tasks.close()
        await self._releases.close()

    # -- event loop ---------------------------------------------------------------------------------------------------

    def take(self, job: Job, term: int) -> None:
        """Compute it, and claim it meanwhile."""
        request = job.request
        self._peers.remember(request.decode_worker_id, request.decode_address)
        self.jobs[request.handoff_id] = job
        self._by_name[job.name] = request.handoff_id
        is_pulled = job.origin.order is HandoffOrder.DECODE_FIRST
        self._marks.received(job.name, Phase.PULLED if is_pulled else Phase.RECEIVED)
        origin = job.origin
        self.handle(pulled(request, self._block_size, term, origin.order, may_return=origin.may_return))

    def read_prefix(self, read: PrefixRead, event: pe.PrefixWanted) -> None:
        """From any thread."""
        self.prefixes[event.handoff_id] = read
        self.handle(event)

    def decline(self, job: Job, reason: EndReason) -> None:
        """Do not compute it, and tell its owner."""
        request = job.request
        self._peers.remember(request.decode_worker_id, request.decode_address)
        self.jobs[request.handoff_id] = job
        self.handle(pe.Declined(request.handoff_id, request.decode_worker_id, reason))

    def on_message(self, peer: DecodePeer, message: Message) -> None:
        """A message of a decode worker. A hand-off's id is valid only from the worker that it names."""
        worker_id = peer.worker_id
        if not isinstance(message, HandoffGrant | HandoffRefused | HandoffAbandon | HandoffFetched):
            _log.warning("%s sent an unexpected %s", worker_id, type(message).__name__)
        elif message.handoff_id.decode_worker_id != worker_id:
            _log.warning(
                "%s sent a message about hand-off %s of another worker; dropped it", worker_id, message.handoff_id
            )
        elif isinstance(message, HandoffGrant):
            self._marks.add(str(message.handoff_id), Phase.GRANT_HEARD)
            self.handle(pe.Granted(worker_id, message))
        elif isinstance(message, HandoffRefused):
            if message.reason not in (RefusalReason.UNKNOWN, RefusalReason.NO_PREFIX):
                _log.warning("hand-off %s: %s refused the claim: %.100r", message.handoff_id, worker_id, message.reason)
            self.handle(message)
        elif isinstance(message, HandoffAbandon):
            self.handle(pe.Abandoned(worker_id, message))
        else:
            self.handle(message)

    def _begin_claim(self, action: pe.SendClaim) -> None:
        self._tasks.spawn(self._claim(action))

    async def _claim(self, action: pe.SendClaim) -> None:
        handoff_id = action.message.handoff_id
        is_sent = False
        try:
            peer = await self._peers.get(action.worker_id)
            if not self._engine.facts.moves_kv:
                await self._memory.connect(action.worker_id)
            is_sent = True  # even if sending fails it may have arrived
            self._marks.add(str(handoff_id), Phase.CLAIMED)
            peer.client.send(action.message)
        except KvrelayError as exc:
            _log.warning("hand-off %s cannot be claimed: %s", handoff_id, exc)
            may_try_elsewhere = isinstance(exc, WorkerUnavailableError) and not is_sent
            self.handle(pe.Unreachable(handoff_id) if may_try_elsewhere else pe.ClaimFailed(handoff_id))
        except Exception:  # noqa: BLE001 - the outermost frame of a claim: somebody waits for its end
            _log.exception("claiming hand-off %s failed", handoff_id)
            self.handle(pe.ClaimFailed(handoff_id))

    def _tell(self, action: pe.SendToDecode) -> None:
        """Unless the last attempt still waits for a connection: the ledger says it again."""
        handoff_id = action.message.handoff_id
        if handoff_id not in self._telling:
            self._telling.add(handoff_id)
            self._tasks.spawn(self._send(action))

    async def _send(self, action: pe.SendToDecode) -> None:
        try:
            peer = await self._peers.get(action.worker_id)
            message = action.message
            peer.client.send(self._marks.of_prefill(message) if isinstance(message, HandoffReady) else message)
        except KvrelayError as exc:
            _log.debug("%s does not hear of hand-off %s: %s", action.worker_id, action.message.handoff_id, exc)
        finally:
            self._telling.discard(action.message.handoff_id)

    def _settle(self, action: pe.Settle) -> None:
        job = self._pop(action.handoff_id)
        if action.reason is not None:
            level = logging.INFO if action.reason in _CANCELLED else logging.WARNING
            _log.log(level, "hand-off %s: %s", action.handoff_id, action.reason)
        job.origin.settled()

    def _return(self, action: pe.Return) -> None:
        self._pop(action.handoff_id).origin.returned()

    def _pop(self, handoff_id: HandoffId) -> Job:
        job = self.jobs.pop(handoff_id)
        self._by_name.pop(job.name, None)
        self._marks.forget(job.name)
        return job

    # -- engine thread ------------------------------------------------------------------------------------------------

    def on_step(self, step: StepOutput) -> None:
        """Report a step's computed blocks and requested reads."""
        for load in step.kv_loads:
            self._load(load)
        for chunk in step.handoff_chunks:
            self._chunk(chunk)
        for kept in step.kept_blocks:
            self.handle(pe.Kept(self._by_name[kept.request_id], kept.block_ids))
        for output in step.outputs:
            if output.finish_reason is FinishReason.ERROR and output.request_id in self._by_name:
                _log.warning("hand-off %s is not computed: %s", output.request_id, output.error)
                self.handle(pe.EngineRefused(self._by_name[output.request_id]))

    def _load(self, load: KvLoad) -> None:
        handoff_id = self._by_name.get(load.request_id)
        if handoff_id is not None:
            self.handle(pe.LoadRequested(handoff_id, pe.RequestBlocks(load.first_block, load.block_ids)))

    def _chunk(self, chunk: HandoffChunk) -> None:
        handoff_id = self._by_name.get(chunk.request_id)
        if handoff_id is None:
            return
        job = self.jobs.get(handoff_id)
        if chunk.last and job is not None and job.origin.order is HandoffOrder.PREFILL_FIRST:
            # Before the ledger handles it, because a hand-off may settle at once.
            self.on_loop(job.origin.first, chunk.first_output)
        self.handle(chunk_computed(handoff_id, chunk))

    def _compute(self, action: pe.Compute) -> None:
        self._engine.post(partial(self._add_request, self.jobs[action.handoff_id]))

    def _add_request(self, job: Job, core: Engine) -> None:
        request = job.request
        job.origin.received()
        try:
            core.add_request(engine_request(request, self._block_size, self._marks.listener))
        except KvrelayError as exc:
            _log.warning("hand-off %s is not computed: %s", request.handoff_id, exc)
            self.handle(pe.EngineRefused(request.handoff_id))

    def _tell_loaded(self, action: pe.ReportLoaded) -> None:
        read = self.prefixes.pop(action.handoff_id, None)
        if read is not None:
            read.ended(action.ok, action.num_blocks, action.reason)
            return
        name = str(action.handoff_id)
        self._engine.post(lambda core: require(core.schedules).kv_loaded(name, action.ok))

    def _stop_computing(self, action: pe.StopComputing) -> None:
        name = str(action.handoff_id)
        self._engine.post(lambda core: core.abort(name))

    def _keep(self, action: pe.Keep) -> None:
        name = str(action.handoff_id)
        self._engine.post(lambda core: require(core.schedules).keep_blocks(name, action.block_ids))

    def _free_blocks(self, action: pe.FreeBlocks) -> None:
        name = str(action.handoff_id)
        self._engine.post(lambda core: core.sending_finished(name))

    # -- transfers and checksums --------------------------------------------------------------------------------------

    def _read(self, action: pe.ReadHits) -> None:
        prefix = self.prefixes.get(action.handoff_id)

        def ended(error: str | None) -> None:
            if error is not None and prefix is not None:
                _log.warning("a prefix of %s is computed instead: %s", action.handoff_id.decode_worker_id, error)
            self.handle(pe.HitsRead(action.handoff_id, error is None))

        pieces = self._pieces(TransferOp.READ, action)
        if pieces is None:
            self._loop.call_soon_threadsafe(ended, "no pieces")
            return
        if prefix is not None:
            prefix.begins(pieces.num_bytes)
        else:
            self._count(self.jobs[action.handoff_id], pieces.num_bytes)
        worker_id, grant = action.handoff_id.decode_worker_id, self._grant_of(action.handoff_id)
        limit_s = None if prefix is None else PREFIX_READ_TIMEOUT_S
        self._transfer.submit(TransferOp.READ, worker_id, pieces, on_done=ended, grant=grant, timeout_s=limit_s)

    def _grant_of(self, handoff_id: HandoffId) -> GrantRef | None:
        """The grant that we name; under the ledger's lock."""
        handoff = self.ledger.handoffs.get(handoff_id)
        return None if handoff is None or handoff.grant is None else GrantRef(str(handoff_id), handoff.grant.generation)

    def _write(self, action: pe.Write) -> None:
        job = self.jobs[action.handoff_id]

        def ended(error: str | None) -> None:
            if error is not None:
                _log.warning("a write of hand-off %s failed: %s", action.handoff_id, error)
            elif is_first and action.done is None:
                self._marks.add(job.name, Phase.FIRST_BYTES)
            self.handle(pe.Written(action.handoff_id, error is None))

        pieces = self._pieces(TransferOp.WRITE, action)
        if pieces is None:
            self._loop.call_soon_threadsafe(ended, "no pieces")
            return
        self._count(job, pieces.num_bytes)
        is_first = job.num_pieces == 0
        job.num_pieces += pieces.num_pieces
        notify = None
        if is_first and action.done is None:
            self._marks.posted(job.name)
        elif action.done is not None:
            self._marks.posted(job.name, job.num_bytes, job.num_pieces)
            done = msgspec.structs.replace(action.done, num_transferred_bytes=job.num_bytes)
            notify = encode_message(self._marks.of_prefill(done))
        worker_id, group = job.request.decode_worker_id, job.name
        grant = GrantRef(group, action.generation)
        self._transfer.submit(TransferOp.WRITE, worker_id, pieces, notify, on_done=ended, group=group, grant=grant)

    def _pieces(self, op: TransferOp, action: pe.ReadHits | pe.Write) -> Pieces | None:
        here = BlockRun(action.blocks.first_block, action.blocks.block_ids)
        there = BlockRun(action.remote_first_block, action.remote_block_ids)
        theirs = self.ledger.handoffs[action.handoff_id].decode_block_size(self.ledger.rules)
        return self._memory.pieces(op, action.handoff_id.decode_worker_id, here, there, theirs)

    def _count(self, job: Job, num_bytes: int) -> None:
        job.num_bytes += num_bytes
        self.ledger.counters.num_sent_bytes += num_bytes

    def _verify_hits(self, action: pe.VerifyHits) -> None:
        worker_id = action.handoff_id.decode_worker_id

        def verified(damage: str | None) -> None:
            if damage is not None:
                _log.warning(
                    "KV that hand-off %s read from %s is computed instead: %s", action.handoff_id, worker_id, damage
                )
            self.handle(pe.HitsVerified(action.handoff_id, damage is None))

        self._checksums.verify(action.blocks.block_ids, action.checksums, verified)

    def _checksum_chunk(self, action: pe.ChecksumChunk) -> None:
        def checksummed(checksums: tuple[int, ...] | None) -> None:
            self.handle(pe.ChunkChecksummed(action.handoff_id, checksums))

        self._checksums.compute(action.block_ids, checksummed)
