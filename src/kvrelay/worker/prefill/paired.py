"""Prefill-first requests at their prefill worker: requests from frontends, and the first tokens that go back.

    GenerateRequest with a pair ──> check, admission control ──> hand-off ledger: compute, claim at the decode worker
    the last chunk's first token ──> TokenOutput to the frontend, while the KV is still being sent

It owns the peer of each prefill until the first token is sent. The ledger owns the hand-off of the KV
(``sides/prefill.py``). A request id contains addresses, which are compared with discovery and never trusted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from kvrelay.core.handoff import HandoffId, HandoffOrder, RemotePrefillRequest, without_tail
from kvrelay.core.messages import GenerateRequest, OutputBatch, TokenOutput
from kvrelay.core.pair_id import parse_pair_id
from kvrelay.errors import InvalidInputError, KvrelayError, PayloadTooLargeError, ProtocolError, WorkerUnavailableError
from kvrelay.handoff import prefill_events as pe
from kvrelay.rpc.base import Peer
from kvrelay.worker.decode.admission import AdmissionControl
from kvrelay.worker.decode.refusals import refusal_of
from kvrelay.worker.sides.prefill import Job, OutgoingHandoffs
from kvrelay.worker.surroundings import Surroundings

_log = logging.getLogger(__name__)


class PairedPrefills:
    """The prefill halves of pairs. Everything runs on the event loop, except for ``AdmissionControl.received``.

    ``address_of``: another worker's address by discovery.
    """

    def __init__(
        self, around: Surroundings, handoffs: OutgoingHandoffs, address_of: Callable[[str], str | None]
    ) -> None:
        self.accepting = False
        self._around = around
        self._admission = AdmissionControl(around.engine)
        self._handoffs = handoffs
        self._address_of = address_of
        self._waiting: dict[str, tuple[Peer, HandoffId]] = {}
        """By request id: the peer that waits for the first token."""

    @property
    def num_waiting(self) -> int:
        """Requests whose first token is not computed yet."""
        return len(self._waiting)

    def generate(self, peer: Peer, message: GenerateRequest) -> None:
        """Compute the prompt and the first token, or refuse."""
        try:
            job = self._job(message)
            self._admission.admit(message)
        except KvrelayError as exc:
            self._refuse(peer, message.request_id, exc)
            return
        self._waiting[message.request_id] = (peer, job.request.handoff_id)
        self._handoffs.take(job)

    def abort(self, peer: Peer, request_id: str) -> None:
        """The frontend has aborted the request. Once the first token is sent, only the decode worker can abandon the
        hand-off."""
        waiting = self._waiting.get(request_id)
        if waiting is not None and waiting[0] == peer:
            del self._waiting[request_id]
            self._handoffs.handle(pe.Cancelled(waiting[1]))

    def peer_gone(self, peer: Peer) -> None:
        """A frontend's connection has ended."""
        for request_id, (other, _) in list(self._waiting.items()):
            if other == peer:
                self.abort(peer, request_id)

    def _job(self, message: GenerateRequest) -> Job:
        """Raises WorkerUnavailableError, InvalidInputError."""
        if message.worker_id != self._around.worker_id:
            raise WorkerUnavailableError(f"worker {message.worker_id} is gone")
        if not self.accepting:
            raise WorkerUnavailableError("the worker takes no prefills")
        handoff_id, decode_address = self._checked(message)
        token_ids = (*message.prompt_token_ids, *message.output_token_ids)
        num_tail = self._around.engine.facts.kv_layout.tail_tokens
        if len(token_ids) <= num_tail:
            raise WorkerUnavailableError(f"decode workers compute the last {num_tail} tokens of a prompt")
        request = RemotePrefillRequest(
            handoff_id=handoff_id,
            decode_worker_id=handoff_id.decode_worker_id,
            decode_address=decode_address,
            model=self._around.settings.model,
            request_id=message.request_id,
            token_ids=token_ids,
            num_output_tokens=len(message.output_token_ids),
            sampling=message.sampling,
            block_ids=(),
            num_cached_tokens=0,
            kv_compatibility=self._around.kv_compatibility,
            priority=message.priority,
            tenant=message.tenant,
            traceparent=message.traceparent,
            holder=message.holder,
        )
        return _Half(self, message, without_tail(request, num_tail))

    def _checked(self, message: GenerateRequest) -> tuple[HandoffId, str]:
        """The hand-off, and its decode worker's address. Raises WorkerUnavailableError, InvalidInputError."""
        assert message.pair is not None, "only pairs come here"
        decode_worker_id = message.pair.decode_worker_id
        try:
            pair_id = parse_pair_id(message.request_id)
        except ProtocolError as exc:
            raise InvalidInputError(exc.message, param="request_id") from exc
        known = self._address_of(decode_worker_id)
        if known is None:
            raise WorkerUnavailableError(f"decode worker {decode_worker_id} is not in discovery")
        if pair_id.decode_address != known:
            raise InvalidInputError(
                f"request {message.request_id} says that {decode_worker_id} listens at {pair_id.decode_address}, "
                f"discovery says {known}",
                param="request_id",
            )
        handoff_id = pair_id.handoff_id(decode_worker_id)
        if handoff_id in self._handoffs.ledger.seen:
            raise InvalidInputError(f"hand-off {handoff_id} was taken here before", param="request_id")
        return handoff_id, known

    def received(self, message: GenerateRequest) -> None:
        """On the engine's thread."""
        self._admission.received(message)

    def first(self, request_id: str, output: TokenOutput | None) -> None:
        """The first token: to the frontend. None: that gets it from the decode worker."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None or output is None:
            return
        try:
            self._around.server.send(waiting[0], OutputBatch((msgspec.structs.replace(output, request_id=request_id),)))
        except PayloadTooLargeError as exc:
            # The decode worker has the same limit, and reports it.
            self._refuse(waiting[0], request_id, exc)

    def settled(self, request_id: str) -> None:
        """The hand-off is over. Without a first token the frontend waits only for the decode worker."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._refuse(waiting[0], request_id, WorkerUnavailableError("the prefill was given up"))

    def _refuse(self, peer: Peer, request_id: str, error: KvrelayError) -> None:
        self._around.refusals.send(peer, refusal_of(request_id, error))


class _Half(Job):
    """The prefill half of a pair. No queue entry waits for it."""

    order = HandoffOrder.PREFILL_FIRST

    def __init__(self, side: PairedPrefills, message: GenerateRequest, request: RemotePrefillRequest) -> None:
        super().__init__(request)
        self._side = side
        self._message = message

    def received(self) -> None:
        self._side.received(self._message)

    def first(self, output: TokenOutput | None) -> None:
        self._side.first(self._message.request_id, output)

    def settled(self) -> None:
        self._side.settled(self._message.request_id)
