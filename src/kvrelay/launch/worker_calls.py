"""Commands to workers, of an operator and of the planner: the workers in discovery, and one client of them all.

Connections stay open, for callers that ask every second or two; one that breaks is made anew at the next call. Replies
are matched by their nonce, so calls may overlap. The time that a call has includes connecting.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from kvrelay.config import ControlConfig
from kvrelay.config.loading import nearest
from kvrelay.control.base import ControlPlane, Keys
from kvrelay.core.control_codec import decode_worker
from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.messages import AdminReply, AdminRequest
from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import KvrelayError, ProtocolError, WorkerUnavailableError
from kvrelay.launch.request_plane import client_of, operator_keys
from kvrelay.rpc import CurveKeys, RpcClient
from kvrelay.rpc.wire import Message

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
"""A worker on a busy machine may need seconds."""
COMMAND_TIMEOUT_S = 30.0


class _Connection:
    """To one worker. ``replies``: of calls that wait, by nonce."""

    def __init__(self, worker_id: str, client: RpcClient) -> None:
        self._worker_id = worker_id
        self.client = client
        self.replies: dict[int, asyncio.Future[AdminReply]] = {}
        client.on_message(self._receive)
        client.on_disconnect(self._lost)

    async def close(self) -> None:
        self._lost()
        await self.client.close()

    def _lost(self) -> None:
        """No answer will come."""
        for reply in self.replies.values():
            if not reply.done():
                reply.set_exception(WorkerUnavailableError(f"the connection to {self._worker_id} was lost"))

    def _receive(self, message: Message) -> None:
        reply = self.replies.get(message.nonce) if isinstance(message, AdminReply) else None
        if isinstance(message, AdminReply) and reply is not None and not reply.done():
            reply.set_result(message)


async def list_workers(control: ControlPlane, keys: Keys, level: int = logging.WARNING) -> list[WorkerInfo]:
    """The workers in discovery, by id. Malformed entries are logged and left out. Raises ControlUnavailableError."""
    workers = []
    for key, value in sorted((await control.discovery.list(keys.workers)).items()):
        try:
            workers.append(decode_worker(key.removeprefix(keys.workers), value))
        except ProtocolError as exc:
            _log.log(level, "ignored the discovery entry %s: %s", key, exc)
    return workers


def answer_of(worker_id: str, reply: AdminReply) -> Any:
    """The JSON of a worker's reply. Raises KvrelayError with the worker's own reason, ProtocolError if it is none."""
    if reply.error is not None:
        raise KvrelayError(f"{worker_id}: {reply.error}")
    try:
        return msgspec.json.decode(reply.payload)
    except UNREADABLE as exc:
        raise ProtocolError(f"the answer of {worker_id} is no JSON: {exc}") from exc


class WorkerCalls:
    """``known`` are the workers that can be called: those that ``look`` has found last, by id."""

    def __init__(self, control: ControlPlane, keys: Keys, curve_keys: CurveKeys) -> None:
        self._control, self._keys, self._curve_keys = control, keys, curve_keys
        self._connections: dict[str, _Connection] = {}
        self._nonces = itertools.count(1)
        self.known: dict[str, WorkerInfo] = {}

    async def look(self, level: int = logging.WARNING) -> list[WorkerInfo]:
        """The workers in discovery, by id. Connections to others end. Raises as ``list_workers``."""
        workers = await list_workers(self._control, self._keys, level)
        self.known = {info.worker_id: info for info in workers}
        await self._forget_others()
        return workers

    async def ask(
        self, worker_id: str, command: str, argument: str = "", *, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> Any:
        """The JSON answer. Raises WorkerUnavailableError, and as ``answer_of``."""
        nonce = next(self._nonces)
        reply: asyncio.Future[AdminReply] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connection(worker_id)
                connection.replies[nonce] = reply
                connection.client.send(AdminRequest(nonce, command, argument))
                answer = await reply
        except TimeoutError as exc:
            raise WorkerUnavailableError(f"{worker_id} did not answer in {timeout_s:g} s") from exc
        finally:
            if (known := self._connections.get(worker_id)) is not None:
                known.replies.pop(nonce, None)
        return answer_of(worker_id, answer)

    async def close(self) -> None:
        """Close all connections."""
        self.known = {}
        await self._forget_others()

    async def _forget_others(self) -> None:
        for worker_id in set(self._connections) - set(self.known):
            await self._connections.pop(worker_id).close()

    async def _connection(self, worker_id: str) -> _Connection:
        connection = self._connections.get(worker_id)
        if connection is not None and connection.client.is_connected:
            return connection
        info = self.known.get(worker_id)
        if info is None:
            raise WorkerUnavailableError(f"no worker {worker_id} in discovery{nearest(worker_id, self.known)}")
        if connection is not None:
            await self._connections.pop(worker_id).close()
        client = client_of(info, self._curve_keys, CONNECT_TIMEOUT_S)
        await client.start()
        if (other := self._connections.get(worker_id)) is not None:
            await client.close()
            return other
        self._connections[worker_id] = _Connection(worker_id, client)
        return self._connections[worker_id]


@asynccontextmanager
async def worker_calls(control: ControlPlane, config: ControlConfig) -> AsyncIterator[WorkerCalls]:
    """Calls as an operator, whom workers know until the context ends. Raises ControlUnavailableError."""
    async with operator_keys(control, config) as curve_keys:
        calls = WorkerCalls(control, Keys(config.namespace), curve_keys)
        try:
            yield calls
        finally:
            await calls.close()
