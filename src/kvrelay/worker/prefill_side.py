"""A worker's prefill side: pull from the global queue, claim, compute, write the KV into the decode worker.

It owns the pull loop and the hand-offs in progress. It does not decide what runs next to what: that is the engine's.
One prefill computes while the next one is pulled and claimed and the previous one's last writes are under way, so the
engine never waits for the queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvrelay.control.base import PrefillDelivery, PrefillQueue
from kvrelay.core.handoff import HandoffAbandon, HandoffClaim, HandoffGrant, HandoffRefused, HandoffReleased
from kvrelay.core.layout import KVLayout
from kvrelay.engine.base import StepOutput
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.errors import ControlUnavailableError, IncompatiblePeerError, KvrelayError, WorkerUnavailableError
from kvrelay.transfer.thread import TransferThread
from kvrelay.worker.engine_thread import EngineThread
from kvrelay.worker.outgoing import OutgoingHandoff
from kvrelay.worker.peers import DecodePeer, DecodePeers

_log = logging.getLogger(__name__)

PULL_TIMEOUT_S = 1.0
BEAT_INTERVAL_S = 1.0
CLAIM_TIMEOUT_S = 5.0
MAX_COMPUTING = 2
"""Hand-offs pulled and not yet computed: one in the engine, one behind it."""


@dataclass(slots=True)
class PrefillStats:
    """Counters of the prefill side, for metrics and status."""

    num_prefills: int = 0
    num_refused: int = 0
    num_failed: int = 0
    num_abandoned: int = 0
    num_sent_bytes: int = 0


class PrefillSide:
    """Serves the prefill queue while it is told to."""

    def __init__(
        self,
        *,
        worker_id: str,
        model: str,
        layout: KVLayout,
        kv_compatibility: str,
        engine: EngineThread,
        transfer: TransferThread,
        queue: PrefillQueue,
        peers: DecodePeers,
    ) -> None:
        self.stats = PrefillStats()
        self._worker_id = worker_id
        self._model = model
        self._layout = layout
        self._kv_compatibility = kv_compatibility
        self._engine = engine
        self._transfer = transfer
        self._queue = queue
        self._peers = peers
        self._outgoing: dict[str, OutgoingHandoff] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(MAX_COMPUTING)
        self._pulling: asyncio.Task[None] | None = None

    @property
    def num_handoffs(self) -> int:
        return len(self._serving)

    def start(self) -> None:
        """Begin to pull."""
        if self._pulling is None:
            self._pulling = asyncio.get_running_loop().create_task(self._pull_forever())

    async def drain(self) -> None:
        """Stop pulling; return when every hand-off, with all its reads and writes, has ended."""
        if self._pulling is not None:
            self._pulling.cancel()
            await asyncio.wait([self._pulling])
            self._pulling = None
        if self._serving:
            await asyncio.wait(self._serving)

    # -- engine thread ------------------------------------------------------------------------------------------------

    def on_step(self, step: StepOutput) -> None:
        """Hand the step's loads and chunks to their hand-offs."""
        for load in step.kv_loads:
            handoff = self._outgoing.get(load.request_id)
            if handoff is not None:
                handoff.load(load)
        for chunk in step.handoff_chunks:
            handoff = self._outgoing.get(chunk.request_id)
            if handoff is not None:
                handoff.send(chunk)

    # -- event loop ---------------------------------------------------------------------------------------------------

    def on_abandon(self, message: HandoffAbandon) -> None:
        """The decode worker no longer waits."""
        for handoff in list(self._outgoing.values()):
            grant = handoff.grant
            if grant.handoff_id == message.handoff_id and grant.generation == message.generation:
                handoff.abandon("abandoned by the decode worker")

    def on_peer_lost(self, worker_id: str) -> None:
        """A decode worker's connection ended: its hand-offs are of no use to anybody."""
        for handoff in list(self._outgoing.values()):
            if handoff.request.decode_worker_id == worker_id:
                handoff.abandon("connection to the decode worker lost")

    def abandon_all(self, reason: str) -> None:
        """Our own lease is lost: others may believe us dead and reuse their blocks, so nothing more may be written."""
        for handoff in list(self._outgoing.values()):
            handoff.abandon(reason)

    async def _pull_forever(self) -> None:
        while True:
            await self._slots.acquire()
            delivery = None
            try:
                delivery = await self._queue.pull(PULL_TIMEOUT_S)
            except ControlUnavailableError as exc:
                _log.warning("cannot pull prefills: %s", exc)
                await asyncio.sleep(PULL_TIMEOUT_S)
            finally:
                if delivery is None:
                    self._slots.release()
            if delivery is not None:
                task = asyncio.get_running_loop().create_task(self._serve(delivery))
                self._serving.add(task)
                task.add_done_callback(self._serving.discard)

    async def _serve(self, delivery: PrefillDelivery) -> None:
        """One queue entry from pull to acknowledgement."""
        slot = _Slot(self._slots)
        beats = asyncio.get_running_loop().create_task(_beat(delivery))
        try:
            error = await self._hand_off(delivery, slot)
            if error is not None:
                _log.warning("hand-off %s: %s", delivery.request.handoff_id, error)
        except ControlUnavailableError as exc:
            _log.warning("hand-off %s: %s", delivery.request.handoff_id, exc)
            self.stats.num_failed += 1
        except (WorkerUnavailableError, IncompatiblePeerError) as exc:
            # Nobody waits behind a lost connection, and the decode worker takes an unclaimed prefill back by itself.
            _log.warning("hand-off %s dropped: %s", delivery.request.handoff_id, exc)
            self.stats.num_failed += 1
        finally:
            slot.release()
            beats.cancel()
            await _settle(delivery)

    async def _hand_off(self, delivery: PrefillDelivery, slot: _Slot) -> str | None:
        """Claim, compute and send. Returns None, or why the hand-off ended early."""
        request = delivery.request
        if request.deadline_unix_s and request.deadline_unix_s < time.time():
            return "past its deadline"
        if request.model != self._model:
            raise IncompatiblePeerError(f"the queue entry is for model {request.model}, this worker has {self._model}")
        peer = await self._peers.get(request.decode_worker_id, request.decode_address)
        claim = HandoffClaim(request.handoff_id, self._worker_id, self._kv_compatibility)
        await self._meet(request.decode_worker_id)
        answer = await peer.claim(claim, CLAIM_TIMEOUT_S)
        if isinstance(answer, HandoffRefused):
            self.stats.num_refused += 1
            return f"refused: {answer.reason}"
        return await self._compute_and_send(delivery, answer, peer, slot)

    async def _meet(self, worker_id: str) -> None:
        """Load and cache the peer's memory metadata, at first use."""
        if not self._transfer.has_peer(worker_id):
            metadata = await self._peers.kv_metadata(worker_id, 0, self._kv_compatibility)
            await asyncio.wrap_future(self._transfer.add_peer(metadata))

    async def _compute_and_send(
        self, delivery: PrefillDelivery, grant: HandoffGrant, peer: DecodePeer, slot: _Slot
    ) -> str | None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[str | None] = loop.create_future()
        engine_request = _engine_request(delivery, grant)
        handoff = OutgoingHandoff(
            delivery.request,
            grant,
            engine_request_id=engine_request.request_id,
            layout=self._layout,
            engine=self._engine,
            transfer=self._transfer,
            on_computed=partial(_on_loop, loop, slot.release),
            on_end=lambda error: _on_loop(loop, ended.set_result, error),
        )
        self._outgoing[engine_request.request_id] = handoff
        self._transfer.open_handoff()
        try:
            await self._engine.call(lambda core: core.add_request(engine_request))
        except KvrelayError as exc:
            handoff.abandon(str(exc))
        try:
            error = await ended
        finally:
            self._transfer.close_handoff()
            del self._outgoing[engine_request.request_id]
        self._count(handoff, error)
        if error is not None and peer.client.is_connected:
            peer.client.send(HandoffReleased(grant.handoff_id, grant.generation, error))
        return error

    def _count(self, handoff: OutgoingHandoff, error: str | None) -> None:
        self.stats.num_sent_bytes += handoff.num_bytes
        if error is None:
            self.stats.num_prefills += 1
        elif "abandoned" in error:
            self.stats.num_abandoned += 1
        else:
            self.stats.num_failed += 1


class _Slot:
    """One permit of the pull loop's semaphore, given back once however many try."""

    def __init__(self, semaphore: asyncio.Semaphore) -> None:
        self._semaphore = semaphore
        self._held = True

    def release(self) -> None:
        if self._held:
            self._held = False
            self._semaphore.release()


def _on_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    """Run ``function`` on the event loop, from any thread; once the loop is closed nobody waits for it."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *arguments)


def _engine_request(delivery: PrefillDelivery, grant: HandoffGrant) -> Request:
    request = delivery.request
    num_prompt = len(request.token_ids) - request.num_output_tokens
    return Request(
        request_id=f"{grant.handoff_id}/{grant.generation}",
        prompt_token_ids=request.token_ids[:num_prompt],
        output_token_ids=request.token_ids[num_prompt:],
        sampling=request.sampling,
        mode=PrefillMode.HANDOFF,
        num_load_tokens=grant.num_cached_tokens,
        priority=request.priority,
    )


async def _beat(delivery: PrefillDelivery) -> None:
    while True:
        await asyncio.sleep(BEAT_INTERVAL_S)
        try:
            await delivery.in_progress()
        except ControlUnavailableError as exc:
            _log.warning("cannot beat for %s: %s", delivery.request.handoff_id, exc)


async def _settle(delivery: PrefillDelivery) -> None:
    """Acknowledge. If that fails the entry is delivered again, and the decode worker refuses its claim as stale."""
    try:
        await delivery.ack()
    except ControlUnavailableError as exc:
        _log.warning("cannot acknowledge %s: %s", delivery.request.handoff_id, exc)
