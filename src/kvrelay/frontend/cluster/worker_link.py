"""The frontend's end of the connection to one worker: requests out, outputs in.

It owns the set of requests that run there. A connection ends once; its requests are told, in order and some per turn of
the event loop, and go to other workers. A connection that has lost a message is closed: outputs after a gap are of no
use, and other requests may have lost some.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from kvrelay.core.activity import Activity
from kvrelay.core.events import LoadMetrics
from kvrelay.core.messages import (
    AbortRequest,
    GenerateRequest,
    OutputBatch,
    Ping,
    Pong,
    PrefillLost,
    RequestRefused,
    SessionPaused,
    TokenOutput,
)
from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import KvrelayError, WorkerUnavailableError
from kvrelay.frontend.cluster.worker_report import WorkerReport
from kvrelay.rpc.base import RpcClient
from kvrelay.rpc.wire import Message

_log = logging.getLogger(__name__)

LOSS_TURN_S = 0.001
"""When a worker is lost, so much of a turn of the event loop is spent on moving its requests. Then the loop rests as
long, and serves everything else."""


class OutputReceiver(Protocol):
    """A sequence that runs on a worker. Each call happens on the event loop; ``now_s`` is monotonic time. No call but
    ``broken`` follows once the request has been released or aborted, refused, or told that its worker is lost."""

    def deliver(self, output: TokenOutput, now_s: float) -> None:
        """Raises MissingTokensError if outputs before this one were lost."""

    def refused(self, refusal: RequestRefused) -> None: ...

    def worker_lost(self, worker_id: str) -> None: ...

    def broken(self) -> None:
        """``deliver`` has raised, which is a defect here. Only this sequence may fail."""


class LinkCounts(msgspec.Struct):
    """A worker's work over one connection: requests prefilled, their tokens, tokens generated."""

    requests: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def prefilled(self, num_tokens: int, num_cached: int) -> None:
        self.requests += 1
        self.computed_tokens += num_tokens - num_cached
        self.cached_tokens += num_cached


class WorkerLink:
    """An established connection."""

    def __init__(self, info: WorkerInfo, client: RpcClient, now: Callable[[], float] = time.perf_counter) -> None:
        self.info = info
        self.report = WorkerReport()
        self.counts = LinkCounts()
        self._client = client
        self._now = now
        self._requests: dict[str, OutputReceiver] = {}
        self._untold: deque[str] | None = None
        """Once the connection has ended: the requests that are not told yet. Some may have been released since."""
        self._all_told = asyncio.Event()
        self._is_retiring = False
        self._ended = asyncio.Event()
        self._introduced = asyncio.Event()
        self.publish_secret = b""
        """Checks the worker's published messages; empty for a worker that seals nothing."""
        self.first_activity: Activity | None = None
        """What it had done when the connection was made."""
        client.on_message(self._on_message)
        client.on_disconnect(self._on_disconnect)

    def __repr__(self) -> str:
        return f"WorkerLink({self.info.worker_id}, requests={len(self._requests)})"

    async def introduce(self, timeout_s: float) -> None:
        """Learn the worker's ``publish_secret`` and ``first_activity``. Raises WorkerUnavailableError."""
        self._client.send(Ping(0))
        try:
            async with asyncio.timeout(timeout_s):
                await self._introduced.wait()
        except TimeoutError as exc:
            raise WorkerUnavailableError(f"{self.info.worker_id} did not answer in {timeout_s:g} s") from exc
        if not self.is_open:
            raise WorkerUnavailableError(f"connection to {self.info.worker_id} lost")

    @property
    def load(self) -> LoadMetrics | None:
        """What the worker said last of its load."""
        return self.report.load

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def is_open(self) -> bool:
        return not self._ended.is_set() and self._client.is_connected

    def submit(self, request: GenerateRequest, receiver: OutputReceiver) -> None:
        """Raises WorkerUnavailableError if the connection is lost or full."""
        if not self.is_open:
            raise WorkerUnavailableError(f"no connection to {self.info.worker_id}")
        self._client.send(request)
        self._requests[request.request_id] = receiver

    def release(self, request_id: str) -> None:
        """The request has ended; later outputs for it are dropped."""
        if self._requests.pop(request_id, None) is not None:
            self._end_if_retired()

    def abort(self, request_id: str) -> None:
        """End a request that the worker still computes."""
        if self._requests.pop(request_id, None) is not None:
            # Else the worker would continue this request, and every request that is aborted later.
            self._send_or_break_off(AbortRequest(request_id), f"abort {request_id}")
            self._end_if_retired()

    def session_paused(self, paused: SessionPaused) -> None:
        """Tell what the session of a request does that has ended. A hint: if it cannot be sent, it is left out."""
        with suppress(WorkerUnavailableError):
            if self.is_open:
                self._client.send(paused)

    def prefill_lost(self, request_id: str) -> None:
        """The prefill worker of this paired request will not do its part."""
        if request_id in self._requests:
            self._send_or_break_off(PrefillLost(request_id), f"tell that the prefill of {request_id} is lost")

    def retire(self) -> None:
        """The worker has left discovery: the connection ends with its last request."""
        self._is_retiring = True
        self._end_if_retired()

    def revive(self, info: WorkerInfo) -> None:
        """The worker is still, or again, in discovery."""
        self.info = info
        self._is_retiring = False

    async def wait_ended(self) -> None:
        """Return when the connection is lost or no longer needed."""
        await self._ended.wait()

    async def close(self) -> None:
        """Close the connection, and return once the remaining requests are told that the worker is lost."""
        self._ended.set()
        try:
            await self._client.close()
            self._lose_requests()
            await self._all_told.wait()
        finally:
            self._lose_requests()
            self._tell_lost(math.inf)

    def _on_message(self, message: Message) -> None:
        if self._ended.is_set():
            return
        if isinstance(message, OutputBatch):
            now_s = time.monotonic()
            for output in message.outputs:
                # Looked up each time: the output before this one may have ended other requests.
                receiver = self._requests.get(output.request_id)
                if receiver is None:
                    continue
                try:
                    receiver.deliver(output, now_s)
                except MissingTokensError as exc:
                    self._break_off(exc.message)
                except Exception:  # noqa: BLE001 - one request's defect must not end the others
                    _log.exception("an output of %s could not be processed", output.request_id)
                    receiver.broken()
                if self._untold is not None:
                    return  # outputs were lost before this one; all requests go elsewhere
        elif isinstance(message, Pong):
            self.publish_secret, self.first_activity = message.publish_secret, message.activity
            self._introduced.set()
        elif isinstance(message, RequestRefused):
            receiver = self._requests.pop(message.request_id, None)
            if receiver is not None:
                _tell(receiver, receiver.refused, message)
                self._end_if_retired()

    def _send_or_break_off(self, message: Message, purpose: str) -> None:
        try:
            self._client.send(message)
        except WorkerUnavailableError as exc:
            self._break_off(f"cannot {purpose}: {exc}")

    def _break_off(self, reason: str) -> None:
        """End the connection. Its owner closes it, and the worker cancels the requests on it."""
        if not self._ended.is_set():
            _log.warning("closing the connection to %s (%s); its requests migrate", self.info.worker_id, reason)
            self._on_disconnect()

    def _on_disconnect(self) -> None:
        self._introduced.set()
        self._ended.set()
        self._lose_requests()

    def _lose_requests(self) -> None:
        if self._untold is None:
            self._untold = deque(self._requests)
            self._tell_lost(LOSS_TURN_S)

    def _tell_lost(self, for_s: float) -> None:
        """Tell requests in order, for so many seconds, that the worker is lost; the others in later turns of the loop.

        Until then a request runs here, as far as it knows: it may still be released or aborted.
        """
        begun_s = self._now()
        while self._untold:
            receiver = self._requests.pop(self._untold.popleft(), None)
            if receiver is None:
                continue
            _tell(receiver, receiver.worker_lost, self.info.worker_id)
            spent_s = self._now() - begun_s
            if spent_s >= for_s:
                asyncio.get_running_loop().call_later(spent_s, self._tell_lost, LOSS_TURN_S)
                return
        self._all_told.set()

    def _end_if_retired(self) -> None:
        if self._is_retiring and not self._requests:
            self._ended.set()


def _tell(receiver: OutputReceiver, tell: Callable[[Any], None], news: object) -> None:
    try:
        tell(news)
    except Exception:  # noqa: BLE001 - one request's defect must not end the others
        _log.exception("a request could not go on elsewhere after %r", news)
        receiver.broken()


class MissingTokensError(KvrelayError):
    """Outputs were lost on their way, so the connection that lost them must end."""


def unseen_part(output: TokenOutput, num_known: int) -> TokenOutput | None:
    """The part of ``output`` that is new to an answer with ``num_known`` known tokens; None if nothing is new.

    Raises MissingTokensError if the output begins further on.
    """
    if output.position == num_known:
        return output
    if output.position > num_known:
        raise MissingTokensError(f"tokens {num_known} to {output.position - 1} of {output.request_id} are missing")
    num_seen = num_known - output.position
    if num_seen >= len(output.token_ids) and output.finish_reason is None:
        return None
    logprobs = output.logprobs[num_seen:] if output.logprobs is not None else None
    return msgspec.structs.replace(output, token_ids=output.token_ids[num_seen:], logprobs=logprobs, position=num_known)


def contradicts(output: TokenOutput, known: Sequence[int]) -> bool:
    """Whether ``output`` has another token than the known answer at a position that is known."""
    return any(token != expected for token, expected in zip(output.token_ids, known[output.position :], strict=False))
