"""A worker's prefill side: pull from the global queue, claim, compute, write the KV into the decode worker.

It owns the pull loop and the hand-offs in progress. It does not decide what runs next to what: that is the engine's.
One prefill computes while the next one is pulled and claimed and the previous one's last writes are under way, so the
engine never waits for the queue.

Whatever happens to a hand-off, its decode worker hears how it ended: HandoffDone, or a release (``Releases``), which
also undoes a claim whose answer never came. A hand-off is claimed here at most once, so that "I gave it up" stays true.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from kvrelay.control.base import PrefillDelivery, PrefillQueue
from kvrelay.control.redelivery import KEEPALIVE_INTERVAL_S
from kvrelay.core.handoff import (
    HandoffAbandon,
    HandoffClaim,
    HandoffGrant,
    HandoffRefused,
    HandoffReleased,
    RemotePrefillRequest,
)
from kvrelay.core.layout import KVLayout
from kvrelay.core.tasks import TaskSet
from kvrelay.engine.base import StepOutput
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.errors import (
    IncompatiblePeerError,
    KvrelayError,
    LeaseLostError,
    ProtocolError,
    StaleHandoffError,
    WorkerUnavailableError,
)
from kvrelay.transfer.plan import checked_block_ids
from kvrelay.transfer.thread import TransferThread
from kvrelay.worker.checksums import BlockChecksums
from kvrelay.worker.engine_thread import EngineThread
from kvrelay.worker.locks import KeyedLocks
from kvrelay.worker.outgoing import OutgoingHandoff
from kvrelay.worker.peers import DecodePeer, DecodePeers
from kvrelay.worker.releases import Releases
from kvrelay.worker.stats import PrefillStats

_log = logging.getLogger(__name__)

PULL_TIMEOUT_S = 1.0
CLAIM_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0
DRAIN_TIMEOUT_S = 150.0
"""Longer than any decode worker waits for a hand-off that was claimed (``EngineCore``, ``handoff_timeout_s``)."""
MAX_REMEMBERED = 4096
MAX_COMPUTING = 2
"""Hand-offs pulled and not yet computed: one in the engine, one behind it."""


class PrefillSide:
    """Serves the prefill queue while it is told to. ``detection_s`` is how long a connection outlives a silent peer."""

    def __init__(
        self,
        *,
        worker_id: str,
        model: str,
        layout: KVLayout,
        kv_compatibility: str,
        engine: EngineThread,
        transfer: TransferThread,
        checksums: BlockChecksums,
        queue: PrefillQueue,
        peers: DecodePeers,
        detection_s: float,
    ) -> None:
        self.stats = PrefillStats()
        self._worker_id = worker_id
        self._model = model
        self._layout = layout
        self._kv_compatibility = kv_compatibility
        self._engine = engine
        self._transfer = transfer
        self._checksums = checksums
        self._queue = queue
        self._peers = peers
        self._releases = Releases(peers, detection_s)
        self._term = 0
        """Raised by ``abandon_all``: what was claimed in an earlier term must not begin to write."""
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()
        """Decode workers and their hand-offs, as below: an id is worth something only from the worker that gave it."""
        self._claiming: dict[tuple[str, str], set[int]] = {}
        """Claims that wait for an answer, and the generations of each that were abandoned before their grant came."""
        self._meeting = KeyedLocks()
        self._outgoing: dict[str, OutgoingHandoff] = {}
        self._serving = TaskSet()
        self._slots = asyncio.Semaphore(MAX_COMPUTING)
        self._pulling: asyncio.Task[None] | None = None

    @property
    def num_handoffs(self) -> int:
        return len(self._serving)

    def start(self) -> None:
        """Begin to pull."""
        if self._pulling is None:
            self._pulling = asyncio.get_running_loop().create_task(self._pull_forever())

    def stop(self) -> None:
        """Pull nothing more."""
        if self._pulling is not None:
            self._pulling.cancel()
            self._pulling = None

    async def drain(self) -> None:
        """Stop pulling; return when every hand-off, with all its reads and writes, has ended, or when no decode worker
        waits for it any more."""
        pulling = self._pulling
        self.stop()
        if pulling is not None:
            await asyncio.wait([pulling])
        if self._serving:
            _, late = await asyncio.wait(self._serving, timeout=DRAIN_TIMEOUT_S)
            if late:
                _log.error("gave up %d hand-offs that have not ended in %g s", len(late), DRAIN_TIMEOUT_S)
                self.abandon_all("the worker drains")
                await asyncio.wait(late, timeout=CLOSE_TIMEOUT_S)

    async def close(self) -> None:
        """Stop at once. Begins no transfer any more; those under way are the transfer thread's to end."""
        self.stop()
        self.abandon_all("the worker leaves")
        serving = list(self._serving)
        if serving:
            await asyncio.wait(serving, timeout=CLOSE_TIMEOUT_S)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await self._releases.close()

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

    def on_abandon(self, peer: DecodePeer, message: HandoffAbandon) -> None:
        """The decode worker no longer waits. It hears a release in any case: it may have missed an earlier one."""
        claiming = self._claiming.get((peer.worker_id, message.handoff_id))
        if claiming is not None:
            # It came before the grant that it takes back.
            claiming.add(message.generation)
            return
        name = _engine_request_id(peer.worker_id, message.handoff_id, message.generation)
        handoff = self._outgoing.get(name)
        if handoff is not None:
            handoff.abandon("abandoned by the decode worker")
            return
        self._releases.say(
            peer.worker_id,
            peer.address,
            HandoffReleased(message.handoff_id, message.generation, "not in progress", self._worker_id),
        )

    def on_peer_lost(self, worker_id: str) -> None:
        """A decode worker's connection ended: its hand-offs are of no use to anybody."""
        for handoff in list(self._outgoing.values()):
            if handoff.request.decode_worker_id == worker_id:
                handoff.abandon("connection to the decode worker lost")

    def abandon_all(self, reason: str) -> None:
        """Our own lease is lost: others may believe us dead and reuse their blocks, so nothing more may be written.

        Submits nothing from now on, also of what is being claimed; what is submitted is the caller's to withdraw.
        """
        self._term += 1
        for handoff in list(self._outgoing.values()):
            handoff.abandon(reason)

    async def _pull_forever(self) -> None:
        # Cancellation alone does not do: asyncio.wait_for, in 3.11, swallows one that comes with the result.
        while asyncio.current_task() is self._pulling:
            await self._slots.acquire()
            delivery = None
            try:
                delivery = await self._queue.pull(self._kv_compatibility, PULL_TIMEOUT_S)
            except KvrelayError as exc:
                _log.warning("cannot pull prefills: %s", exc)
                await asyncio.sleep(PULL_TIMEOUT_S)
            finally:
                if delivery is None:
                    self._slots.release()
            if delivery is not None:
                self._serving.spawn(self._serve(delivery))

    async def _serve(self, delivery: PrefillDelivery) -> None:
        """One queue entry from pull to acknowledgement."""
        request = delivery.request
        slot = _Slot(self._slots)
        keepalives = asyncio.get_running_loop().create_task(_extend_ack_deadline(delivery))
        try:
            error = await self._hand_off(delivery, slot)
        except KvrelayError as exc:
            self._give_up(request, exc)
            error = str(exc)
        except Exception as exc:  # noqa: BLE001 - the outermost frame of a hand-off: somebody waits for its end
            _log.exception("hand-off %s failed", request.handoff_id)
            self._give_up(request, exc)
            error = repr(exc)
        finally:
            slot.release()
            keepalives.cancel()
        if error is not None:
            _log.warning("hand-off %s: %s", request.handoff_id, error)
        await _settle(delivery)

    def _give_up(self, request: RemotePrefillRequest, error: Exception) -> None:
        """We do not compute it, whether or not our claim was heard and granted: nobody will, except its owner."""
        if isinstance(error, StaleHandoffError):
            self.stats.num_abandoned += 1
        else:
            self.stats.num_failed += 1
        release = HandoffReleased(request.handoff_id, 0, str(error), self._worker_id)
        self._releases.say(request.decode_worker_id, request.decode_address, release)

    async def _hand_off(self, delivery: PrefillDelivery, slot: _Slot) -> str | None:
        """Claim, compute and send. Returns None, or why the hand-off ended early and its owner knows. Raises
        KvrelayError when it has to be given up."""
        request = delivery.request
        if delivery.is_expired:
            raise StaleHandoffError(f"it waited in the queue for more than {request.timeout_s:g} s")
        key = (request.decode_worker_id, request.handoff_id)
        if key in self._seen:
            return "delivered again, and dealt with here before"
        self._remember(key)
        if request.model != self._model:
            raise IncompatiblePeerError(f"the queue entry is for model {request.model}, this worker has {self._model}")
        term = self._term
        peer = await self._peers.get(request.decode_worker_id, request.decode_address)
        await self._meet(request.decode_worker_id)
        answer = await self._claim(peer, request.handoff_id)
        if isinstance(answer, HandoffRefused):
            self.stats.num_refused += 1
            return f"refused: {answer.reason}"
        _check_blocks(request, answer, self._layout.block_size)
        if term != self._term:
            raise LeaseLostError("the lease was lost while it was claimed")
        if not peer.client.is_connected:
            raise WorkerUnavailableError(f"connection to {peer.worker_id} lost")
        return await self._compute_and_send(delivery, answer, slot)

    async def _claim(self, peer: DecodePeer, handoff_id: str) -> HandoffGrant | HandoffRefused:
        """Ask for it. Raises StaleHandoffError for a grant that was taken back before it came."""
        claim = HandoffClaim(handoff_id, self._worker_id, self._kv_compatibility, self._checksums.required)
        key = (peer.worker_id, handoff_id)
        abandoned = self._claiming[key] = set()
        try:
            answer = await peer.claim(claim, CLAIM_TIMEOUT_S)
        finally:
            del self._claiming[key]
        if isinstance(answer, HandoffGrant) and answer.generation in abandoned:
            raise StaleHandoffError("abandoned by the decode worker")
        return answer

    async def _meet(self, worker_id: str) -> None:
        """Load and cache the peer's memory metadata, at first use."""
        async with self._meeting.hold(worker_id):
            if not self._transfer.has_peer(worker_id):
                metadata = await self._peers.kv_metadata(worker_id, 0, self._kv_compatibility)
                await asyncio.wrap_future(self._transfer.add_peer(metadata))

    def _remember(self, key: tuple[str, str]) -> None:
        self._seen[key] = None
        if len(self._seen) > MAX_REMEMBERED:
            self._seen.popitem(last=False)

    async def _compute_and_send(self, delivery: PrefillDelivery, grant: HandoffGrant, slot: _Slot) -> str | None:
        """From the grant to the last transfer's end. Awaits nothing before ``abandon_all`` can find the hand-off."""
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
            checksums=self._checksums,
            on_computed=partial(_on_loop, loop, slot.release),
            on_end=lambda error: _on_loop(loop, ended.set_result, error),
        )
        self._outgoing[engine_request.request_id] = handoff
        self._transfer.open_handoff()
        try:
            await self._engine.call(lambda core: core.add_request(engine_request))
            error = await ended
        finally:
            self._transfer.close_handoff()
            del self._outgoing[engine_request.request_id]
        self._count(handoff, error)
        if error is not None:
            release = HandoffReleased(grant.handoff_id, grant.generation, error, self._worker_id)
            self._releases.say(delivery.request.decode_worker_id, delivery.request.decode_address, release)
        return error

    def _count(self, handoff: OutgoingHandoff, error: str | None) -> None:
        self.stats.num_sent_bytes += handoff.num_bytes
        self.stats.num_verified_blocks += handoff.num_verified_blocks
        self.stats.num_kv_checksum_mismatches += handoff.num_checksum_mismatches
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


def _engine_request_id(decode_worker_id: str, handoff_id: str, generation: int) -> str:
    return f"{decode_worker_id}/{handoff_id}/{generation}"


def _check_blocks(request: RemotePrefillRequest, grant: HandoffGrant, block_size: int) -> None:
    """Blocks are paired with ours on the engine's thread, where it is too late to refuse. Raises ProtocolError,
    TransferError."""
    num_needed = -(-len(request.token_ids) // block_size)
    if len(grant.block_ids) != num_needed:
        raise ProtocolError(f"granted {len(grant.block_ids)} blocks for a prefill that takes {num_needed}")
    checked_block_ids(grant.block_ids)


def _engine_request(delivery: PrefillDelivery, grant: HandoffGrant) -> Request:
    request = delivery.request
    num_prompt = len(request.token_ids) - request.num_output_tokens
    return Request(
        request_id=_engine_request_id(request.decode_worker_id, grant.handoff_id, grant.generation),
        prompt_token_ids=request.token_ids[:num_prompt],
        output_token_ids=request.token_ids[num_prompt:],
        sampling=request.sampling,
        mode=PrefillMode.HANDOFF,
        num_load_tokens=grant.num_cached_tokens,
        priority=request.priority,
    )


async def _extend_ack_deadline(delivery: PrefillDelivery) -> None:
    while True:
        await asyncio.sleep(KEEPALIVE_INTERVAL_S)
        try:
            await delivery.in_progress()
        except KvrelayError as exc:
            _log.warning(
                "extending the ack deadline of prefill %s failed (%s); it may be redelivered",
                delivery.request.handoff_id,
                exc,
            )


async def _settle(delivery: PrefillDelivery) -> None:
    """Acknowledge. If that fails the entry is delivered again, and the decode worker refuses its claim as stale."""
    try:
        await delivery.ack()
    except KvrelayError as exc:
        _log.warning("cannot acknowledge %s: %s", delivery.request.handoff_id, exc)
