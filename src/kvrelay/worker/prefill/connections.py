"""Connections of a prefill worker to the decode workers whose prefills it computes, made at first use and kept.

It owns the RPC clients, and the pings that follow releases. A message over a connection that ends may or may not have
arrived; its sender decides what follows.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence

from kvrelay.control.base import Discovery, Keys
from kvrelay.core.control_codec import decode_kv_metadata
from kvrelay.core.latest import Latest
from kvrelay.core.layout import Compatibility
from kvrelay.core.messages import Ping, Pong
from kvrelay.core.tasks import TaskSet
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import IncompatiblePeerError, ProtocolError, WorkerUnavailableError
from kvrelay.handoff.messages import HandoffReleased
from kvrelay.rpc.base import RpcClient
from kvrelay.rpc.wire import Message
from kvrelay.worker.locks import KeyedLocks

_log = logging.getLogger(__name__)

MAX_REMEMBERED = 4096

Connect = Callable[[str, str], Awaitable[RpcClient]]
"""Opens a connection to an address by its public key (empty: none); raises WorkerUnavailableError."""


class DecodePeer:
    """One decode worker, as a prefill worker sees it."""

    def __init__(self, worker_id: str, address: str, client: RpcClient, on_message: OnMessage) -> None:
        self.worker_id = worker_id
        self.address = address
        self.client = client
        self._on_message = on_message
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._nonces = itertools.count(1)
        client.on_message(self._receive)

    async def tell(self, messages: Sequence[HandoffReleased], timeout_s: float) -> None:
        """Return when all messages have arrived. Raises WorkerUnavailableError if that is not confirmed in time."""
        nonce = next(self._nonces)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pings[nonce] = future
        try:
            for message in messages:
                self.client.send(message)
            self.client.send(Ping(nonce))
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError as exc:
            raise WorkerUnavailableError(f"{self.worker_id} did not answer a ping in {timeout_s:g} s") from exc
        finally:
            del self._pings[nonce]

    def lost(self) -> None:
        """The connection has ended: no answer will come."""
        for future in self._pings.values():
            if not future.done():
                future.set_exception(WorkerUnavailableError(f"connection to {self.worker_id} lost"))

    def _receive(self, message: Message) -> None:
        if not isinstance(message, Pong):
            self._on_message(self, message)
            return
        ping = self._pings.get(message.nonce)
        if ping is not None and not ping.done():
            ping.set_result(None)


OnMessage = Callable[[DecodePeer, Message], None]


class DecodePeers:
    """All of them. ``on_lost(worker_id)`` runs when a connection ends. ``address_of``: by discovery, of a worker that
    no queue entry has named."""

    def __init__(
        self,
        connect: Connect,
        discovery: Discovery,
        keys: Keys,
        *,
        on_message: OnMessage,
        on_lost: Callable[[str], None],
        address_of: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self._connect = connect
        self._discovery = discovery
        self._keys = keys
        self._on_message = on_message
        self._on_lost = on_lost
        self._address_of = address_of
        self._peers: dict[str, DecodePeer] = {}
        self._addresses: Latest[str, str] = Latest(MAX_REMEMBERED)
        self._connecting = KeyedLocks()
        self._closing = TaskSet()

    def remember(self, worker_id: str, address: str) -> None:
        """The worker's address, from its queue entries."""
        self._addresses[worker_id] = address

    async def get(self, worker_id: str) -> DecodePeer:
        """The connection to ``worker_id``. Raises WorkerUnavailableError or IncompatiblePeerError."""
        address = self._addresses.get(worker_id) or self._address_of(worker_id)
        if address is None:
            raise WorkerUnavailableError(f"where {worker_id} listens is not known")
        # What was begun is also ended with a worker that discovery lists no more.
        self._addresses[worker_id] = address
        async with self._connecting.hold(worker_id):
            old = self._peers.get(worker_id)
            if old is not None:
                if old.client.is_connected:
                    return old
                # Everything of the old connection ends before anything begins on a new one.
                self._lost(old)
            key = (await self._load(worker_id)).public_key
            peer = DecodePeer(worker_id, address, await self._connect(address, key), self._on_message)
            peer.client.on_disconnect(lambda: self._lost(peer))
            self._peers[worker_id] = peer
            return peer

    async def kv_metadata(self, worker_id: str, terms: Compatibility) -> KvMetadata:
        """The worker's memory, from discovery. Raises WorkerUnavailableError or IncompatiblePeerError."""
        metadata = await self._load(worker_id)
        if metadata.kv_compatibility != terms.digest():
            difference = None if metadata.terms is None else terms.difference(metadata.terms)
            raise IncompatiblePeerError(f"{worker_id} has KV of another kind: {difference or 'it does not say which'}")
        return metadata

    async def _load(self, worker_id: str) -> KvMetadata:
        value = await self._discovery.get(self._keys.worker_kv_metadata(worker_id, 0))
        if value is None:
            raise WorkerUnavailableError(f"{worker_id} has no KV metadata in discovery")
        try:
            return decode_kv_metadata(f"{worker_id}/0", value)
        except ProtocolError as exc:
            raise IncompatiblePeerError(exc.message) from exc

    def _lost(self, peer: DecodePeer) -> None:
        if self._peers.get(peer.worker_id) is not peer:
            return
        del self._peers[peer.worker_id]
        peer.lost()
        self._closing.spawn(peer.client.close())
        self._on_lost(peer.worker_id)

    async def close(self) -> None:
        for peer in list(self._peers.values()):
            peer.lost()
            await peer.client.close()
        self._peers.clear()
        await self._closing.wait()
