"""A worker's decode side: requests of frontends, and the hand-offs that bring their KV from elsewhere.

    GenerateRequest ──> admit (engine thread): prefix hit, remote or local? ──> engine
    RemotePrefillStart ──> push to the prefill queue
    HandoffClaim ──> grant ──> HandoffGrant            (the connection that it went over is remembered with it)
    HandoffDone (notification of the last write) ──> arrivals ──> engine: RUNNING
    HandoffReleased, lease ended ──> engine: quarantined blocks return, the request goes on locally
    connection lost ──> engine: the request goes on locally, in other blocks

It owns who asked for what (peer of each request, connection of each grant and of each claimant). It does not own
blocks: the engine's hand-off ledger does, and every rule about them is there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from kvrelay.control.base import PrefillQueue
from kvrelay.core.handoff import (
    HandoffAbandon,
    HandoffClaim,
    HandoffGrant,
    HandoffRefused,
    HandoffReleased,
    RemotePrefillRequest,
)
from kvrelay.core.messages import (
    AbortRequest,
    GenerateRequest,
    RequestRefused,
    TokenOutput,
)
from kvrelay.core.tasks import TaskSet
from kvrelay.engine.base import RemotePrefillStart, StepOutput
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.errors import (
    ControlUnavailableError,
    EngineDeadError,
    InvalidInputError,
    KvrelayError,
    OverloadedError,
    RetryElsewhereError,
)
from kvrelay.handoff.disagg import DisaggPolicy, PrefillFleet, PrefillPlace
from kvrelay.rpc.base import Peer, RpcServer
from kvrelay.transfer.thread import TransferThread
from kvrelay.worker.arrivals import Arrivals
from kvrelay.worker.checksums import BlockChecksums
from kvrelay.worker.engine_thread import EngineThread
from kvrelay.worker.gate import Gate
from kvrelay.worker.outputs import send_outputs
from kvrelay.worker.stats import DecodeStats

_log = logging.getLogger(__name__)

QUEUE_SIZE_INTERVAL_S = 0.02
EXPIRY_INTERVAL_S = 0.25
DRAIN_INTERVAL_S = 0.02


@dataclass(eq=False, slots=True)
class _Claim:
    """A claim that was not answered yet. ``is_void``: meanwhile the claimant's lease has ended, or it has given up."""

    worker_id: str
    handoff_id: str
    is_void: bool = False


@dataclass(frozen=True, slots=True)
class _OpenGrant:
    """Who holds a grant, and over which connection it went."""

    worker_id: str
    peer: Peer


class DecodeSide:
    """Serves frontends, and grants hand-offs to prefill workers."""

    def __init__(
        self,
        *,
        worker_id: str,
        model: str,
        address: Callable[[], str],
        kv_compatibility: str,
        block_size: int,
        engine: EngineThread,
        transfer: TransferThread,
        checksums: BlockChecksums,
        queue: PrefillQueue,
        server: RpcServer,
        policy: DisaggPolicy,
        num_prefill_workers: Callable[[], int],
        has_ended: Callable[[str], bool],
        give_up_after_s: float,
    ) -> None:
        self.stats = DecodeStats()
        self.accepting = True
        self._worker_id = worker_id
        self._model = model
        self._address = address
        self._kv_compatibility = kv_compatibility
        self._block_size = block_size
        self._engine = engine
        self._gate = Gate(engine)
        self._transfer = transfer
        self._checksums = checksums
        self._queue = queue
        self._server = server
        self._policy = policy
        self._num_prefill_workers = num_prefill_workers
        self._has_ended = has_ended
        self._give_up_after_s = give_up_after_s
        self._queue_size = 0
        self._loop = asyncio.get_running_loop()
        self.arrivals = Arrivals(engine, checksums, self.stats, self._handoff_ended)
        self._peer_of: dict[str, Peer] = {}
        self._requests_of: defaultdict[Peer, set[str]] = defaultdict(set)
        self._claimants: dict[str, Peer] = {}
        self._unsent_abandons: defaultdict[str, list[HandoffAbandon]] = defaultdict(list)
        self._claims: set[_Claim] = set()
        self._open_grants: dict[tuple[str, int], _OpenGrant] = {}
        self._tasks = TaskSet()
        self._last_request_s = 0.0
        self._queue_watch: asyncio.Task[None] | None = None
        self._tasks.spawn(self._expire_forever())

    @property
    def num_requests(self) -> int:
        return len(self._peer_of)

    @property
    def num_open_grants(self) -> int:
        return len(self._open_grants)

    # -- frontends ----------------------------------------------------------------------------------------------------

    def generate(self, peer: Peer, message: GenerateRequest) -> None:
        """Admit a request, or refuse it at once."""
        if message.worker_id != self._worker_id:
            self._refuse(peer, message.request_id, f"worker {message.worker_id} is gone", 503, retryable=True)
            return
        if not self.accepting:
            self._refuse(peer, message.request_id, "the worker is draining", 503, retryable=True)
            return
        if message.request_id in self._peer_of:
            self._refuse(peer, message.request_id, "a request of this id is running", 400, retryable=False)
            return
        self.stats.num_requests += 1
        try:
            self._gate.enter(message)
        except OverloadedError as exc:
            self._refuse_error(peer, message.request_id, exc)
            return
        self._peer_of[message.request_id] = peer
        self._requests_of[peer].add(message.request_id)
        self._watch_queue()
        self._engine.post(lambda core: self._admit(core, peer, message))

    def abort(self, peer: Peer, message: AbortRequest) -> None:
        """The frontend wants no more of it."""
        if self._peer_of.get(message.request_id) == peer:
            self._forget(message.request_id)
            self._abort(message.request_id)

    def peer_gone(self, peer: Peer) -> None:
        """A connection ended: a frontend's requests are cancelled, a prefill worker's hand-offs go on without it."""
        for request_id in list(self._requests_of.get(peer, ())):
            self._forget(request_id)
            self._abort(request_id)
        for worker_id, claimant in list(self._claimants.items()):
            if claimant == peer:
                del self._claimants[worker_id]
        for key, grant in self._open_grants.items():
            if grant.peer == peer:
                self._compute_here(*key)

    def _compute_here(self, handoff_id: str, generation: int) -> None:
        """The claimant may live on, and so may its writes: the request goes on, the blocks stay quarantined."""
        self._engine.post(partial(EngineCore.claimant_lost, handoff_id=handoff_id, generation=generation))

    def _abort(self, request_id: str) -> None:
        self.stats.num_aborted += 1
        self._engine.post(lambda core: core.abort(request_id))

    def _admit(self, core: EngineCore, peer: Peer, message: GenerateRequest) -> None:
        """On the engine thread: decide where the prefill runs and enqueue."""
        self._gate.arrived(message)
        try:
            place = self._enqueue(core, message)
        except KvrelayError as exc:
            self._loop.call_soon_threadsafe(self._refuse_error, peer, message.request_id, exc)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the client waits for an answer
            _log.exception("request %s could not be admitted", message.request_id)
            error = KvrelayError(f"the worker failed to admit the request: {exc!r}")
            self._loop.call_soon_threadsafe(self._refuse_error, peer, message.request_id, error)
        else:
            self.stats.places[place] = self.stats.places.get(place, 0) + 1

    def _enqueue(self, core: EngineCore, message: GenerateRequest) -> PrefillPlace:
        tokens = message.prompt_token_ids + message.output_token_ids
        place = self._policy.decide(
            prompt_length=len(tokens),
            num_cached_tokens=core.num_cached_tokens(tokens, message.sampling.cache_salt),
            prefill_fleet=PrefillFleet(self._num_prefill_workers(), self._queue_size),
            must_be_local=message.sampling.prompt_logprobs is not None or message.sampling.max_tokens == 0,
        )
        core.add_request(
            Request(
                request_id=message.request_id,
                prompt_token_ids=message.prompt_token_ids,
                output_token_ids=message.output_token_ids,
                sampling=message.sampling,
                mode=PrefillMode.REMOTE if place is PrefillPlace.REMOTE else PrefillMode.LOCAL,
                priority=message.priority,
            )
        )
        return place

    def _refuse_error(self, peer: Peer, request_id: str, error: KvrelayError) -> None:
        self._forget(request_id)
        if isinstance(error, InvalidInputError):
            self._refuse(peer, request_id, error.message, error.status, retryable=False)
        elif isinstance(error, RetryElsewhereError):
            self._refuse(peer, request_id, error.message, error.status, True, error.retry_after_s)
        else:
            self._refuse(peer, request_id, error.message, 500, retryable=isinstance(error, EngineDeadError))

    def _refuse(
        self, peer: Peer, request_id: str, reason: str, status: int, retryable: bool, retry_after_s: float = 1.0
    ) -> None:
        self.stats.num_refused += 1
        self._server.send(peer, RequestRefused(request_id, reason, status, retryable, retry_after_s))

    def _forget(self, request_id: str) -> None:
        peer = self._peer_of.pop(request_id, None)
        if peer is not None:
            requests = self._requests_of[peer]
            requests.discard(request_id)
            if not requests:
                del self._requests_of[peer]

    # -- what a step produced -----------------------------------------------------------------------------------------

    def deliver(self, step: StepOutput, abandons: list[tuple[str, HandoffAbandon]]) -> None:
        """On the event loop, once per step: tokens to frontends, prefills to the queue, abandons to claimants."""
        if step.outputs:
            self._send_outputs(step.outputs)
        for start in step.remote_prefills:
            self._tasks.spawn(self._push(start))
        for claimant, abandon in abandons:
            self._send_abandon(claimant, abandon)

    def _send_abandon(self, claimant: str, abandon: HandoffAbandon) -> None:
        """Tell the claimant, or keep it until that one connects again."""
        peer = self._claimants.get(claimant)
        if peer is None or not self._server.send(peer, abandon):
            self._unsent_abandons[claimant].append(abandon)

    def _send_outputs(self, outputs: list[TokenOutput]) -> None:
        by_peer: defaultdict[Peer, list[TokenOutput]] = defaultdict(list)
        for output in outputs:
            peer = self._peer_of.get(output.request_id)
            if peer is None:
                continue
            by_peer[peer].append(output)
            if output.finish_reason is not None:
                self._forget(output.request_id)
        for peer, batch in by_peer.items():
            for output in send_outputs(self._server, peer, batch):
                self._forget(output.request_id)
                self._abort(output.request_id)
                self._refuse(peer, output.request_id, "the logprobs of one output are too large", 413, retryable=False)

    async def _push(self, start: RemotePrefillStart) -> None:
        request = RemotePrefillRequest(
            handoff_id=start.handoff_id,
            decode_worker_id=self._worker_id,
            decode_address=self._address(),
            model=self._model,
            request_id=start.request_id,
            token_ids=start.token_ids,
            num_output_tokens=start.num_output_tokens,
            sampling=msgspec.structs.replace(start.sampling, seed=start.seed),
            block_ids=start.block_ids,
            num_cached_tokens=start.num_cached_tokens,
            kv_compatibility=self._kv_compatibility,
            priority=start.priority,
            timeout_s=self._policy.config.remote_prefill_timeout_s,
        )
        try:
            await self._queue.push(request)
        except KvrelayError as exc:
            _log.warning("cannot queue prefill %s, computing it here: %s", start.handoff_id, exc)
            self._engine.post(lambda core: core.remote_prefill_failed(start.handoff_id, "it could not be queued"))

    # -- prefill workers ----------------------------------------------------------------------------------------------

    def claim(self, peer: Peer, message: HandoffClaim) -> None:
        """A prefill worker asks for a hand-off."""
        claimant = message.prefill_worker_id
        if message.kv_compatibility != self._kv_compatibility:
            self._turn_down(peer, message, f"KV is not compatible with {self._kv_compatibility}")
            return
        if self._has_ended(claimant):
            self._turn_down(peer, message, f"the lease of {claimant} has ended")
            return
        self._claimants[claimant] = peer
        for abandon in self._unsent_abandons.pop(claimant, ()):
            self._send_abandon(claimant, abandon)
        claim = _Claim(claimant, message.handoff_id)
        self._claims.add(claim)
        self._tasks.spawn(self._grant(peer, message, claim))

    def _turn_down(self, peer: Peer, message: HandoffClaim, reason: str) -> None:
        """This claimant cannot have it, and has taken it from the queue: unless another one computes it we do."""
        self._server.send(peer, HandoffRefused(message.handoff_id, reason))
        given_up = HandoffReleased(message.handoff_id, 0, reason, message.prefill_worker_id)
        self._engine.post(lambda core: core.handoff_released(given_up))

    async def _grant(self, peer: Peer, message: HandoffClaim, claim: _Claim) -> None:
        try:
            answer = await self._engine.call(lambda core: core.grant(message))
            if isinstance(answer, HandoffGrant) and (message.wants_checksums or self._checksums.required):
                answer = await self._with_checksums(answer)
        except EngineDeadError as exc:
            answer = HandoffRefused(message.handoff_id, exc.message)
        finally:
            self._claims.discard(claim)
        if isinstance(answer, HandoffRefused):
            self._server.send(peer, answer)
        elif not claim.is_void and self._server.send(peer, answer):
            self._open_grants[(answer.handoff_id, answer.generation)] = _OpenGrant(claim.worker_id, peer)
            self._transfer.open_handoff()
        else:
            # Nobody knows of this grant, so nobody writes.
            error = "the grant was not sent"
            unheard = HandoffReleased(answer.handoff_id, answer.generation, error, claim.worker_id)
            self._engine.post(lambda core: core.handoff_released(unheard))
            self._server.send(peer, HandoffRefused(message.handoff_id, f"{claim.worker_id} has left or given it up"))

    async def _with_checksums(self, grant: HandoffGrant) -> HandoffGrant:
        """The hit blocks do not change: the grant pins them, in case the claimant reads them."""
        num_hit_blocks = grant.num_cached_tokens // self._block_size
        checksums = await self._checksums.of(grant.block_ids[:num_hit_blocks])
        return msgspec.structs.replace(grant, checksums=checksums)

    def released(self, message: HandoffReleased) -> None:
        """The claimant has stopped writing."""
        self._engine.post(lambda core: core.handoff_released(message))
        if message.generation:
            key = (message.handoff_id, message.generation)
            grant = self._open_grants.get(key)
            if grant is not None and grant.worker_id == message.prefill_worker_id:
                self._close(*key)
            return
        for claim in self._claims:
            claim.is_void |= (claim.worker_id, claim.handoff_id) == (message.prefill_worker_id, message.handoff_id)
        for key, grant in list(self._open_grants.items()):
            if key[0] == message.handoff_id and grant.worker_id == message.prefill_worker_id:
                self._close(*key)

    def worker_ended(self, worker_id: str) -> None:
        """A prefill worker's lease has ended: it gets nothing more, and nobody waits for what it has. It may still
        write, until it is fenced."""
        for claim in self._claims:
            claim.is_void |= claim.worker_id == worker_id
        for key, grant in self._open_grants.items():
            if grant.worker_id == worker_id:
                self._compute_here(*key)

    def worker_fenced(self, worker_id: str) -> None:
        """Nothing of a prefill worker whose lease has ended can write any more."""
        self._claimants.pop(worker_id, None)
        self._unsent_abandons.pop(worker_id, None)
        self._engine.post(lambda core: core.peer_gone(worker_id))
        for key, grant in list(self._open_grants.items()):
            if grant.worker_id == worker_id:
                self._close(*key)

    def _handoff_ended(self, handoff_id: str, generation: int) -> None:
        """On the engine thread."""
        self._loop.call_soon_threadsafe(self._close, handoff_id, generation)

    def _close(self, handoff_id: str, generation: int) -> None:
        if self._open_grants.pop((handoff_id, generation), None) is not None:
            self._transfer.close_handoff()

    # -- background ---------------------------------------------------------------------------------------------------

    def _watch_queue(self) -> None:
        """Keep the queue's size fresh while requests arrive; stop asking a second after the last one."""
        self._last_request_s = time.monotonic()
        if self._num_prefill_workers() and (self._queue_watch is None or self._queue_watch.done()):
            self._queue_watch = self._tasks.spawn(self._refresh_queue_size())

    async def _refresh_queue_size(self) -> None:
        while time.monotonic() - self._last_request_s < 1.0:
            try:
                self._queue_size = await self._queue.size(self._kv_compatibility)
            except ControlUnavailableError:
                self._queue_size = self._policy.config.max_prefill_queue_size
            await asyncio.sleep(QUEUE_SIZE_INTERVAL_S)
        self._queue_size = 0

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            if self._peer_of:
                self._engine.post(lambda core: core.expire_handoffs())

    async def drain(self) -> None:
        """Take nothing new; return when every request and every hand-off has ended. A claimant that lives and does not
        answer ``HandoffAbandon`` is waited for ``give_up_after_s``: its blocks stay quarantined, we go on."""
        self.accepting = False
        while self._peer_of:
            await asyncio.sleep(DRAIN_INTERVAL_S)
        deadline_s = time.monotonic() + self._give_up_after_s
        while self._claims or self._open_grants:
            if time.monotonic() > deadline_s:
                _log.error(
                    "gave up waiting for hand-offs whose claimants have not released them for %g s: %s; their blocks "
                    "stay quarantined until the claimants release them or lose their leases",
                    self._give_up_after_s,
                    ", ".join(f"{name} ({grant.worker_id})" for (name, _), grant in self._open_grants.items())
                    or "none",
                )
                return
            await asyncio.sleep(DRAIN_INTERVAL_S)

    async def close(self) -> None:
        await self._tasks.close()
