"""Connections of a prefill worker to the decode workers whose prefills it computes, made at first use and kept.

It owns the RPC clients, the claims that wait for an answer, and the KV metadata that was loaded from discovery.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from kvrelay.control.base import Discovery, Keys
from kvrelay.core.handoff import HandoffAbandon, HandoffClaim, HandoffGrant, HandoffRefused, HandoffReleased
from kvrelay.core.messages import Message
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import IncompatiblePeerError, WorkerUnavailableError
from kvrelay.rpc.base import RpcClient

_log = logging.getLogger(__name__)

Connect = Callable[[str, str], Awaitable[RpcClient]]
"""Opens a connection to an address by its public key (empty: none); raises WorkerUnavailableError."""


class DecodePeer:
    """One decode worker, as a prefill worker sees it."""

    def __init__(self, worker_id: str, client: RpcClient, on_abandon: Callable[[HandoffAbandon], None]) -> None:
        self.worker_id = worker_id
        self.client = client
        self._on_abandon = on_abandon
        self._claims: dict[str, asyncio.Future[HandoffGrant | HandoffRefused]] = {}
        client.on_message(self._receive)

    async def claim(self, claim: HandoffClaim, timeout_s: float) -> HandoffGrant | HandoffRefused:
        """Ask for the hand-off. Raises WorkerUnavailableError when the connection ends or no answer comes in time."""
        future: asyncio.Future[HandoffGrant | HandoffRefused] = asyncio.get_running_loop().create_future()
        self._claims[claim.handoff_id] = future
        try:
            self.client.send(claim)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as exc:
            raise WorkerUnavailableError(f"{self.worker_id} did not answer a claim in {timeout_s:g} s") from exc
        finally:
            self._claims.pop(claim.handoff_id, None)

    def lost(self) -> None:
        """The connection has ended: nobody will answer the claims."""
        for future in self._claims.values():
            if not future.done():
                future.set_exception(WorkerUnavailableError(f"connection to {self.worker_id} lost"))

    def _receive(self, message: Message) -> None:
        match message:
            case HandoffGrant() | HandoffRefused():
                self._answer(message)
            case HandoffAbandon():
                self._on_abandon(message)
            case _:
                _log.warning("%s sent an unexpected %s", self.worker_id, type(message).__name__)

    def _answer(self, message: HandoffGrant | HandoffRefused) -> None:
        future = self._claims.get(message.handoff_id)
        if future is not None and not future.done():
            future.set_result(message)
        elif isinstance(message, HandoffGrant) and self.client.is_connected:
            # The claim was given up: the blocks set aside for us would stay quarantined until we leave.
            self.client.send(HandoffReleased(message.handoff_id, message.generation, "claim given up"))


class DecodePeers:
    """All of them. ``on_lost(worker_id)`` runs when a connection ends."""

    def __init__(
        self,
        connect: Connect,
        discovery: Discovery,
        keys: Keys,
        *,
        on_abandon: Callable[[HandoffAbandon], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._connect = connect
        self._discovery = discovery
        self._keys = keys
        self._on_abandon = on_abandon
        self._on_lost = on_lost
        self._peers: dict[str, DecodePeer] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def get(self, worker_id: str, address: str) -> DecodePeer:
        """The connection to ``worker_id``. Raises WorkerUnavailableError or IncompatiblePeerError."""
        async with self._opening.setdefault(worker_id, asyncio.Lock()):
            peer = self._peers.get(worker_id)
            if peer is not None and peer.client.is_connected:
                return peer
            key = (await self._load(worker_id, 0)).public_key
            peer = DecodePeer(worker_id, await self._connect(address, key), self._on_abandon)
            peer.client.on_disconnect(lambda: self._lost(worker_id))
            self._peers[worker_id] = peer
            return peer

    async def kv_metadata(self, worker_id: str, rank: int, compatibility: str) -> KvMetadata:
        """The worker's memory, from discovery. Raises WorkerUnavailableError or IncompatiblePeerError."""
        metadata = await self._load(worker_id, rank)
        if metadata.kv_compatibility != compatibility:
            raise IncompatiblePeerError(
                f"{worker_id} has KV of another kind ({metadata.kv_compatibility}, ours is {compatibility})"
            )
        return metadata

    async def _load(self, worker_id: str, rank: int) -> KvMetadata:
        value = await self._discovery.get(self._keys.worker_kv_metadata(worker_id, rank))
        if value is None:
            raise WorkerUnavailableError(f"{worker_id} has no KV metadata in discovery")
        try:
            return msgspec.json.decode(value, type=KvMetadata)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise IncompatiblePeerError(f"KV metadata of {worker_id} is malformed: {exc}") from exc

    def _lost(self, worker_id: str) -> None:
        peer = self._peers.pop(worker_id, None)
        self._opening.pop(worker_id, None)
        if peer is None:
            return
        peer.lost()
        task = asyncio.get_running_loop().create_task(peer.client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        self._on_lost(worker_id)

    async def close(self) -> None:
        for peer in list(self._peers.values()):
            peer.lost()
            await peer.client.close()
        self._peers.clear()
        if self._closing:
            await asyncio.gather(*self._closing)
