"""Commands to workers over connections that stay open: for who asks every second or two.

A connection that breaks is made anew at the next call. Replies are matched by their nonce, so calls may overlap.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec

from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.messages import AdminReply, AdminRequest
from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import KvrelayError, ProtocolError, WorkerUnavailableError
from kvrelay.launch.request_plane import client_of
from kvrelay.rpc import CurveKeys, RpcClient
from kvrelay.rpc.wire import Message

CONNECT_TIMEOUT_S = 10.0
"""A worker on a busy machine may need seconds. The time that a call has ends its connecting, too."""


class _Connection:
    """To one worker. ``replies``: of calls that wait, by nonce."""

    def __init__(self, client: RpcClient) -> None:
        self.client = client
        self.replies: dict[int, asyncio.Future[AdminReply]] = {}
        client.on_message(self._receive)

    def _receive(self, message: Message) -> None:
        reply = self.replies.get(message.nonce) if isinstance(message, AdminReply) else None
        if isinstance(message, AdminReply) and reply is not None and not reply.done():
            reply.set_result(message)


def answer_of(worker_id: str, reply: AdminReply) -> Any:
    """The JSON of a worker's reply. Raises KvrelayError with the worker's own reason, ProtocolError if it is none."""
    if reply.error is not None:
        raise KvrelayError(f"{worker_id}: {reply.error}")
    try:
        return msgspec.json.decode(reply.payload)
    except UNREADABLE as exc:
        raise ProtocolError(f"the answer of {worker_id} is no JSON: {exc}") from exc


class WorkerCalls:
    """``known`` are the workers that can be called, as in discovery; the caller keeps that up to date."""

    def __init__(self, keys: CurveKeys) -> None:
        self._keys = keys
        self._connections: dict[str, _Connection] = {}
        self._nonces = itertools.count(1)
        self.known: dict[str, WorkerInfo] = {}

    async def ask(self, worker_id: str, command: str, argument: str = "", *, timeout_s: float) -> Any:
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

    async def forget_others(self) -> None:
        """Close the connections to workers that are not known any more."""
        for worker_id in set(self._connections) - set(self.known):
            await self._connections.pop(worker_id).client.close()

    async def close(self) -> None:
        """Close all connections."""
        self.known = {}
        await self.forget_others()

    async def _connection(self, worker_id: str) -> _Connection:
        connection = self._connections.get(worker_id)
        if connection is not None and connection.client.is_connected:
            return connection
        info = self.known.get(worker_id)
        if info is None:
            raise WorkerUnavailableError(f"{worker_id} is not in discovery")
        if connection is not None:
            await self._connections.pop(worker_id).client.close()
        client = client_of(info, self._keys, CONNECT_TIMEOUT_S)
        await client.start()
        if (other := self._connections.get(worker_id)) is not None:
            await client.close()
            return other
        self._connections[worker_id] = _Connection(client)
        return self._connections[worker_id]
