"""A worker's decode side: requests of frontends, the placement of their prefills, and their tokens.

    GenerateRequest ──> admit (engine thread): prefix hit, remote or local? ──> engine
    RemotePrefillRequest ──> the hand-off ledger ──> push to the prefill queue
    TokenOutput ──> the frontend that asked

It owns one record per request. ``sides/decode.py`` owns the hand-offs that bring KV from other workers, ``queue.py``
the entries in the prefill queue.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict, deque
from collections.abc import Callable

import msgspec

from kvrelay.core.clock import MonotonicClock
from kvrelay.core.handoff import HandoffId
from kvrelay.core.messages import AbortRequest, GenerateRequest, PrefillLost, RequestRefused, SessionPaused, TokenOutput
from kvrelay.core.pair_id import parse_pair_id
from kvrelay.core.return_times import ReturnTimes
from kvrelay.core.shortest_first import ShortestFirst
from kvrelay.core.status import RefusalKind
from kvrelay.core.tasks import TaskSet
from kvrelay.core.token_ids import words_of
from kvrelay.engine.contract import Engine
from kvrelay.engine.request import Request
from kvrelay.errors import (
    InvalidInputError,
    KvrelayError,
    ObjectiveMissedError,
    OverloadedError,
    PayloadTooLargeError,
    ProtocolError,
    WorkerUnavailableError,
)
from kvrelay.handoff import decode_events as de
from kvrelay.handoff.decode_ledger import DecodeLedger
from kvrelay.handoff.decode_state import DecodeRules
from kvrelay.marks.phases import Phase
from kvrelay.placement.base import PrefillPlace
from kvrelay.placement.cost import CostPlacement, PlacementState
from kvrelay.placement.threshold import DisaggPolicy
from kvrelay.rpc.base import Peer
from kvrelay.worker.decode.admission import AdmissionControl
from kvrelay.worker.decode.outputs import joined, send_outputs
from kvrelay.worker.decode.placing import Placing
from kvrelay.worker.decode.queue import QueuedPrefills, TimedGrants
from kvrelay.worker.decode.refusals import refusal_of
from kvrelay.worker.reporting.stats import DecodeStats, RemoteCostStats, copied
from kvrelay.worker.shutdown import none_left
from kvrelay.worker.sides.decode import DecodePorts, IncomingHandoffs
from kvrelay.worker.surroundings import Surroundings
from kvrelay.worker.turns import LoopTurns, PeersInMemory

_log = logging.getLogger(__name__)

TOO_LARGE = "the logprobs of one output are too large"


class _Served(msgspec.Struct, eq=False):
    """One request, from its admission to its last token. ``number``: in order of arrival. ``handoff_id``: of one that
    is half of a pair."""

    number: int
    peer: Peer
    message: GenerateRequest
    handoff_id: HandoffId | None


class DecodeSide:
    """Serves frontends, and grants hand-offs to prefill workers. ``num_serving``: workers that take requests.
    ``is_on_prefill_side``: whether every worker that may pull a prefill has this adapter."""

    def __init__(
        self,
        around: Surroundings,
        policy: DisaggPolicy,
        *,
        num_prefill_workers: Callable[[], int],
        num_serving: Callable[[], int],
        is_on_prefill_side: Callable[[str], bool],
        give_up_after_s: float,
    ) -> None:
        self.stats = DecodeStats()
        self.accepting = True
        self._worker_id = around.worker_id
        self._engine = around.engine
        self._transfer = around.transfer
        self._admission = AdmissionControl(around.engine)
        self._server = around.server
        self._refusals = around.refusals
        self._marks = around.marks
        self.num_serving = num_serving
        self._is_on_prefill_side = is_on_prefill_side
        self._returns = ReturnTimes(MonotonicClock())
        self._give_up_after_s = give_up_after_s
        self._queued = QueuedPrefills(
            around.control.prefill_queue,
            policy,
            model=around.settings.model,
            kv_compatibility=around.kv_compatibility,
            address=lambda: around.server.address,
            num_prefill_workers=num_prefill_workers,
            handle=self._handle,
        )
        self.placement = CostPlacement(policy, self._queued.prefill_side, self._count_place, MonotonicClock())
        self._placing = Placing(
            policy,
            self.placement,
            self._queued.prefill_side,
            lambda: not around.engine.facts.prefills_here and num_prefill_workers() > 0,
        )
        self._loop = asyncio.get_running_loop()
        turns = LoopTurns()
        self.grants = TimedGrants(around.server, self._queued.push)
        self.handoffs = self._build_handoffs(around, turns)
        self.arrivals: ShortestFirst[_Served] = ShortestFirst()
        """Those that the engine has not taken in."""
        self._numbers = itertools.count(1)
        self._served: dict[str, _Served] = {}
        """By request id."""
        self._undelivered: deque[TokenOutput] = deque()
        self._is_delivery_due = False
        self._requests_of: defaultdict[Peer, set[str]] = defaultdict(set)
        self._tasks = TaskSet()
        self._tasks.spawn(turns.tick_forever(self.handoffs))

    def _build_handoffs(self, around: Surroundings, turns: LoopTurns) -> IncomingHandoffs:
        settings, facts = around.settings, around.engine.facts
        layout = facts.kv_layout
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
        ports = DecodePorts(
            turns,
            around.engine,
            around.transfer,
            around.checksums,
            around.memory,
            self.grants,
            self.grants.push,
            self.placement.prefill_took,
            self._count_moved,
            PeersInMemory(around.transfer, moves_kv=facts.moves_kv).may_use,
            lambda: around.term,
        )
        return IncomingHandoffs(
            DecodeLedger(rules),
            ports,
            worker_id=around.worker_id,
            direction=around.direction,
            block_bytes=layout.block_bytes,
            stats=self.stats,
            marks=around.marks,
        )

    def _count_moved(self, worker_id: str, num_tokens: int, seconds: float) -> None:
        """On the engine's thread."""
        moved = self._engine.facts.moved
        num_bytes = 0 if moved is None else moved.bytes_after(num_tokens)
        if num_bytes:
            self.stats.num_received_bytes += num_bytes
            self._transfer.count_read(worker_id, num_bytes, seconds)

    def counts(self) -> DecodeStats:
        """What was counted until now."""
        counts = copied(self.stats)
        counts.num_stale += self.handoffs.ledger.counters.num_stale
        return counts

    def _handle(self, event: de.DecodeEvent) -> None:
        self.handoffs.handle(event)

    def cost_stats(self) -> RemoteCostStats:
        """What remote prefills cost, as far as it is known. From any thread."""
        placement, model = self.placement, self.placement.model
        return RemoteCostStats(
            model.cost,
            model.relative_error,
            model.num_samples,
            model.num_rejected,
            placement.num_fallbacks,
            placement.num_trials,
        )

    @property
    def num_requests(self) -> int:
        return len(self._served)

    @property
    def failed_push(self) -> tuple[str | None, float]:
        """Why the last push to the prefill queue failed, None if it succeeded, and how many seconds ago."""
        return self._queued.push_error, self._queued.push_error_age_s

    # -- frontends ----------------------------------------------------------------------------------------------------

    def generate(self, peer: Peer, message: GenerateRequest) -> None:
        """Admit a request, or refuse it at once."""
        if message.worker_id != self._worker_id:
            error: KvrelayError = WorkerUnavailableError(f"worker {message.worker_id} is gone")
            self._refuse(peer, refusal_of(message.request_id, error, kind=RefusalKind.GONE))
            return
        if not self.accepting:
            error = WorkerUnavailableError("the worker is draining")
            self._refuse(peer, refusal_of(message.request_id, error, kind=RefusalKind.DRAINING))
            return
        if message.request_id in self._served:
            self._refuse(peer, refusal_of(message.request_id, InvalidInputError("a request of this id is running")))
            return
        self.stats.num_requests += 1
        if not self._served:
            self._returns.restart()
        try:
            handoff_id = self._paired_handoff(message)
            self._admission.admit(message)
        except (InvalidInputError, OverloadedError) as exc:
            self._refuse_error(peer, message.request_id, exc)
            return
        self._marks.received(message.request_id)
        served = _Served(next(self._numbers), peer, message, handoff_id)
        self._served[message.request_id] = served
        self._requests_of[peer].add(message.request_id)
        if handoff_id is not None and message.pair is not None:
            pair = message.pair
            self.handoffs.handle(de.Expected(handoff_id, pair.prefill_worker_id, pair.begins_within_s))
        self._queued.watch()
        self.arrivals.add(served.number, message.num_tokens, served)
        self._engine.post(self._admit_next)

    def _paired_handoff(self, message: GenerateRequest) -> HandoffId | None:
        """The hand-off of a request whose prefill worker is already chosen. Raises InvalidInputError."""
        if message.pair is None:
            return None
        try:
            pair_id = parse_pair_id(message.request_id)
        except ProtocolError as exc:
            raise InvalidInputError(exc.message, param="request_id") from exc
        if (pair_id.decode_address, message.pair.decode_worker_id) != (self._server.address, self._worker_id):
            raise InvalidInputError(f"request {message.request_id} is for another decode worker", param="request_id")
        handoff_id = pair_id.handoff_id(self._worker_id)
        ledger = self.handoffs.ledger
        if handoff_id in ledger.expected or handoff_id in ledger.handoffs:
            raise InvalidInputError("the hand-off of this id is not over", param="request_id")
        return handoff_id

    def prefill_lost(self, peer: Peer, message: PrefillLost) -> None:
        """The frontend of a paired request reports that the prefill worker will not claim."""
        served = self._served.get(message.request_id)
        if served is not None and served.handoff_id is not None and served.peer == peer:
            self.handoffs.handle(de.ClaimantGone(served.handoff_id))

    def abort(self, peer: Peer, message: AbortRequest) -> None:
        """The frontend has aborted the request."""
        served = self._served.get(message.request_id)
        if served is not None and served.peer == peer:
            self._abort(served)

    def session_paused(self, message: SessionPaused) -> None:
        """A frontend tells what the session of a request does that has ended here."""

        def tell(core: Engine) -> None:
            if core.schedules is not None:
                core.schedules.session_paused(message.request_id, message.kind, message.within_s, message.is_over)

        self._engine.post(tell)

    def peer_gone(self, peer: Peer) -> None:
        """A connection ended: cancel a frontend's requests; a prefill worker's hand-offs continue without the
        connection."""
        for request_id in list(self._requests_of.get(peer, ())):
            self._abort(self._served[request_id])
        self.handoffs.handle(de.ClaimantConnectionLost(peer))

    def _abort(self, served: _Served) -> None:
        self._forget(served.message.request_id)
        self.stats.num_aborted += 1
        self._engine.post(lambda core: self._abort_now(core, served))

    def _abort_now(self, core: Engine, served: _Served) -> None:
        """On the engine thread; the engine may not have seen the request yet."""
        if self.arrivals.remove(served.number) is None:
            core.abort(served.message.request_id)
            return
        self._admission.received(served.message)
        self._not_enqueued(served.handoff_id)

    def _admit_next(self, core: Engine) -> None:
        """On the engine thread: take in the next request, not necessarily the one that was posted."""
        served = self.arrivals.take()
        if served is not None:
            self._admit(core, served.peer, served.message, served.handoff_id)

    def _admit(self, core: Engine, peer: Peer, message: GenerateRequest, handoff_id: HandoffId | None) -> None:
        """On the engine thread: decide where the prefill runs and add the request."""
        self._admission.received(message)
        try:
            place = self._enqueue(core, message, handoff_id)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the client waits for an answer
            if not isinstance(exc, KvrelayError):
                _log.exception("request %s could not be admitted", message.request_id)
            error = exc if isinstance(exc, KvrelayError) else KvrelayError(f"the request was not admitted: {exc!r}")
            self._not_enqueued(handoff_id)
            self._loop.call_soon_threadsafe(self._refuse_error, peer, message.request_id, error)
            return
        if place is not None and not message.sampling.is_prefetch:
            self._count_place(place)

    def _not_enqueued(self, handoff_id: HandoffId | None) -> None:
        """A paired request was not admitted to the engine."""
        if handoff_id is not None:
            self.handoffs.handle(de.Closed(handoff_id))

    def _enqueue(self, core: Engine, message: GenerateRequest, handoff_id: HandoffId | None) -> PrefillPlace | None:
        """Where the prefill runs; None: that is decided when the request is admitted."""
        self._marks.add(message.request_id, Phase.ADMITTED)
        request = Request(
            message.request_id,
            words_of(message.prompt),
            message.sampling,
            output_token_ids=message.output_token_ids,
            priority=message.priority,
            tenant=message.tenant,
            traceparent=message.traceparent,
            handoff_number=0 if handoff_id is None else handoff_id.number,
            placement=PlacementState(explain=message.explain),
            report_interval=message.report_interval,
            holder=message.holder,
            listener=self._marks.listener,
        )
        adapter = message.sampling.adapter
        request.is_only_here = bool(adapter) and message.pair is None and not self._is_on_prefill_side(adapter)
        if message.remote_wait_s is not None:
            self.placement.told(message.remote_wait_s)
        objectives = self.placement.objectives(message.slo_ttft_ms, message.slo_itl_ms)
        place = self._placing.add_request(core, request, message.order, objectives, is_paired=message.pair is not None)
        if place is not PrefillPlace.REMOTE and place is not None:
            self._not_enqueued(handoff_id)
        return place

    def _count_place(self, place: PrefillPlace) -> None:
        self.stats.places[place] = self.stats.places.get(place, 0) + 1

    def _refuse_error(self, peer: Peer, request_id: str, error: KvrelayError) -> None:
        self._forget(request_id)
        wait_s = None
        if isinstance(error, OverloadedError):
            self.stats.num_early_rejected += isinstance(error, ObjectiveMissedError)
            # A client is refused by all workers before it hears of it, and comes back to one of them.
            wait_s = self._returns.next_s(error.retry_after_s, error.spacing_s / max(self.num_serving(), 1))
        self._refuse(peer, refusal_of(request_id, error, retry_after_s=wait_s))

    def _refuse(self, peer: Peer, refusal: RequestRefused) -> None:
        self.stats.num_refused += 1
        self._refusals.send(peer, refusal)

    def _forget(self, request_id: str) -> None:
        served = self._served.pop(request_id, None)
        if served is not None:
            requests = self._requests_of[served.peer]
            requests.discard(request_id)
            if not requests:
                del self._requests_of[served.peer]

    # -- what a step produced -----------------------------------------------------------------------------------------

    def hand_on(self, outputs: list[TokenOutput]) -> None:
        """On the engine thread, once per step. Steps that the event loop is behind with are delivered together: a
        frontend then gets one message instead of several."""
        self._undelivered.extend(outputs)
        if not self._is_delivery_due:
            self._is_delivery_due = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        """On the event loop: tokens to frontends."""
        self._is_delivery_due = False  # first: what the engine adds from now on makes another delivery due
        by_request: defaultdict[str, list[TokenOutput]] = defaultdict(list)
        for _ in range(len(self._undelivered)):
            output = self._undelivered.popleft()
            by_request[output.request_id].append(output)
        by_peer: defaultdict[Peer, list[TokenOutput]] = defaultdict(list)
        for request_id, outputs in by_request.items():
            served = self._served.get(request_id)
            if served is None:
                continue
            for output in outputs if len(outputs) == 1 else joined(outputs):
                is_last = output.finish_reason is not None
                has_marks = is_last or output.num_cached_tokens is not None
                by_peer[served.peer].append(self._marks.told(output) if has_marks else output)
                if is_last:
                    self._forget(request_id)
        for peer, batch in by_peer.items():
            for output in send_outputs(self._server, peer, batch):
                served = self._served.get(output.request_id)
                if served is not None:
                    self._abort(served)
                self._refuse(peer, refusal_of(output.request_id, PayloadTooLargeError(TOO_LARGE)))

    # -- the end ------------------------------------------------------------------------------------------------------

    async def answer_all(self) -> None:
        """Accept no new requests; return when every request has ended."""
        self.accepting = False
        await none_left(lambda: self._served)

    async def drain(self) -> None:
        """Accept no new requests; return when every request and every hand-off has ended. Wait ``give_up_after_s`` for
        a claimant that lives and does not answer ``HandoffAbandon``; then return, and its blocks stay quarantined."""
        await self.answer_all()
        ledger = self.handoffs.ledger
        await none_left(lambda: ledger.handoffs, self._give_up_after_s)
        if ledger.handoffs:
            _log.error(
                "gave up waiting for hand-offs whose claimants have not released them for %g s: %s; their blocks "
                "stay quarantined until the claimants release them or lose their leases",
                self._give_up_after_s,
                ", ".join(
                    f"{handoff.handoff_id} ({grant.worker_id})"
                    for handoff in list(ledger.handoffs.values())
                    for grant in handoff.grants
                )
                or "none",
            )

    async def close(self) -> None:
        await self._tasks.close()
        await self._queued.close()
