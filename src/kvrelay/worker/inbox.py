"""The messages that arrive over the request plane: each is checked against its caller and goes to its part.

    frontend   GenerateRequest ──[grammar: Preparation]──> DecodeSide, or PairedPrefills for the prefill half of a pair
               AbortRequest, PrefillLost, SessionPaused, Ping
    worker     HandoffClaim, HandoffProgress, HandoffDone, HandoffReady, HandoffReleased ──> the decode side's ledger
    operator   AdminRequest ──> ``run_command``, then AdminReply

It owns no request: the parts do.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from kvrelay.core.activity import Activity
from kvrelay.core.messages import (
    AbortRequest,
    AdminReply,
    AdminRequest,
    GenerateRequest,
    Ping,
    Pong,
    PrefillLost,
    SessionPaused,
)
from kvrelay.core.tasks import TaskSet
from kvrelay.errors import PayloadTooLargeError
from kvrelay.handoff.messages import HandoffClaim, HandoffDone, HandoffProgress, HandoffReady, HandoffReleased
from kvrelay.rpc.base import Peer
from kvrelay.rpc.wire import Message
from kvrelay.worker.cluster.callers import Callers
from kvrelay.worker.decode.preparation import Preparation
from kvrelay.worker.decode.serving import DecodeSide
from kvrelay.worker.prefill.paired import PairedPrefills
from kvrelay.worker.surroundings import Surroundings

_log = logging.getLogger(__name__)


class Inbox:
    """``publish_secret``: frontends get it with the answer to a ping, and ``activity()``; empty if the worker seals
    nothing."""

    def __init__(
        self,
        around: Surroundings,
        callers: Callers,
        decode: DecodeSide,
        paired: PairedPrefills,
        *,
        run_command: Callable[[AdminRequest], Awaitable[AdminReply]],
        publish_secret: bytes,
        activity: Callable[[], Activity],
        tasks: TaskSet,
    ) -> None:
        self._worker_id = around.worker_id
        self._server = around.server
        self._callers = callers
        self._decode = decode
        self._paired = paired
        self._preparation = Preparation(around.engine.prepare, self._generate, around.refusals.send, tasks)
        self._run_command = run_command
        self._publish_secret, self._activity = publish_secret, activity
        self._tasks = tasks

    def receive(self, peer: Peer, message: Message) -> None:
        """Handle a message of a connection, or drop it with a warning if its caller may not send it."""
        refusal = self._callers.refusal(self._server.identity(peer), message)
        if refusal is not None:
            _log.warning("%s from peer %s was dropped: %s", type(message).__name__, peer.hex(), refusal)
            return
        match message:
            case GenerateRequest() if message.sampling.grammar is not None:
                self._preparation.begin(peer, message)
            case GenerateRequest():
                self._generate(peer, message)
            case AbortRequest():
                self._preparation.drop(peer, message.request_id)
                self._paired.abort(peer, message.request_id)
                self._decode.abort(peer, message)
            case PrefillLost():
                self._decode.prefill_lost(peer, message)
            case SessionPaused():
                self._decode.session_paused(message)
            case HandoffClaim() | HandoffProgress() | HandoffDone() | HandoffReady() | HandoffReleased():
                self._decode.handoffs.on_message(peer, message)
            case Ping():
                self._server.send(peer, self._introduction(peer, message))
            case AdminRequest():
                self._tasks.spawn(self._answer(peer, message))
            case _:
                _log.warning("an unexpected %s was dropped", type(message).__name__)

    def _introduction(self, peer: Peer, message: Ping) -> Pong:
        if not self._callers.is_frontend(self._server.identity(peer)):
            return Pong(message.nonce, self._worker_id)
        return Pong(message.nonce, self._worker_id, self._publish_secret, self._activity())

    def peer_gone(self, peer: Peer) -> None:
        """A connection has ended."""
        self._preparation.drop_all(peer)
        self._paired.peer_gone(peer)
        self._decode.peer_gone(peer)

    def _generate(self, peer: Peer, message: GenerateRequest) -> None:
        """Handle a request, or this worker's half of a pair."""
        if message.pair is not None and message.pair.prefill_worker_id == self._worker_id:
            self._paired.generate(peer, message)
        else:
            self._decode.generate(peer, message)

    async def _answer(self, peer: Peer, message: AdminRequest) -> None:
        reply = await self._run_command(message)
        try:
            self._server.send(peer, reply)
        except PayloadTooLargeError as exc:
            self._server.send(peer, AdminReply(message.nonce, error=exc.message))
