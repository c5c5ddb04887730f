"""What the control plane's contract suites run against: the in-memory broker, and a real NATS server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from tests.contracts.faulty_broker import FaultyBroker
from tests.contracts.prefill_queue_contract import PARTITION
from tests.patience import PATIENCE_S

from kvrelay.control.base import Discovery, EventBus, Lease, PrefillQueue
from kvrelay.control.memory import MemoryControlPlane
from kvrelay.control.nats.bucket import Bucket
from kvrelay.control.nats.connection import NatsConnection
from kvrelay.control.nats.discovery import NatsDiscovery
from kvrelay.control.nats.event_bus import NatsEventBus
from kvrelay.control.nats.jetstream import JetStream, JetStreamError, WrongSequenceError
from kvrelay.control.nats.prefill_queue import NatsPrefillQueue
from kvrelay.control.nats_process import NatsServerProcess

ACK_WAIT_S = 30.0
"""Longer than any test that does not set its own."""
MAX_DELIVERIES = 2
STORE_FAILED = 10049


async def expire_lease(bucket: Bucket, lease_id: str) -> None:
    """As a keeper does that has not heard the holder, who lives: at once, whatever is in flight."""
    while True:
        last = await bucket.last_keepalive(lease_id)
        assert last is not None
        try:
            return await bucket.expire_lease(lease_id, last.seq)
        except WrongSequenceError:
            pass  # a keepalive came between


class MemoryServer:
    """A broker with faults on the real clock; each ``connect_*`` is another process."""

    def __init__(self) -> None:
        self.ttl_s = 1.5
        """The tests share the loop that renews leases. A busy machine may hold it up for more than half a second."""
        self.broker = FaultyBroker(ack_wait_s=ACK_WAIT_S, max_deliveries=MAX_DELIVERIES)
        self._planes: dict[object, MemoryControlPlane] = {}

    @property
    def ack_wait_s(self) -> float:
        return self.broker.queue.ack_wait_s

    @ack_wait_s.setter
    def ack_wait_s(self, value: float) -> None:
        self.broker.queue.ack_wait_s = value

    def plane(self) -> MemoryControlPlane:
        plane = self.broker.plane()
        self._planes[plane.discovery] = plane
        return plane

    async def disconnect(self, discovery: Discovery) -> None:
        await self._planes.pop(discovery).close()

    async def revoke_lease(self, lease: Lease) -> None:
        self.broker.revoke_lease(lease.lease_id)

    async def push_raw(self, data: bytes) -> None:
        self.broker.queue.push_raw(PARTITION, data)

    async def num_dead_letters(self) -> int:
        return len(self.broker.queue.dead_letters)

    async def go_away(self) -> None:
        self.broker.go_offline()

    async def come_back(self, *, is_wiped: bool) -> None:
        self.broker.go_online(is_wiped=is_wiped)

    async def close(self) -> None:
        for plane in self._planes.values():
            await plane.close()


class MemoryDiscoveryServer(MemoryServer):
    async def connect(self) -> Discovery:
        return self.plane().discovery


class MemoryQueueServer(MemoryServer):
    async def connect(self) -> PrefillQueue:
        return self.plane().prefill_queue


class MemoryBusServer(MemoryServer):
    async def connect(self) -> EventBus:
        return self.plane().events


class NatsServer:
    """A namespace of its own on a real server, which other tests use after us."""

    def __init__(self, process: NatsServerProcess) -> None:
        self.ttl_s = 1.0
        self.ack_wait_s = ACK_WAIT_S
        self.process = process
        self.connections: list[NatsConnection] = []

    async def open(self) -> NatsConnection:
        connection = await NatsConnection.connect(self.process.url, PATIENCE_S)
        self.connections.append(connection)
        return connection

    async def go_away(self) -> None:
        self.process.kill()

    async def come_back(self, *, is_wiped: bool) -> None:
        if is_wiped and self.process.store_dir is not None:
            wipe(self.process.store_dir)
        await asyncio.to_thread(self.process.start)

    async def close(self) -> None:
        for connection in self.connections:
            await connection.close()
        await asyncio.to_thread(self.process.start)


class NatsDiscoveryServer(NatsServer):
    def __init__(self, process: NatsServerProcess) -> None:
        super().__init__(process)
        self._discoveries: list[NatsDiscovery] = []

    async def connect(self) -> Discovery:
        discovery = NatsDiscovery(await self.open(), "test")
        await started(discovery.start)
        self._discoveries.append(discovery)
        return discovery

    async def disconnect(self, discovery: Discovery) -> None:
        assert isinstance(discovery, NatsDiscovery)
        await discovery.close()

    async def revoke_lease(self, lease: Lease) -> None:
        connection = await self.open()
        await connection.request(
            f"$KV.kvrelay_test.kvrelay.test.leases.{lease.lease_id}", b"", headers={"KV-Operation": "DEL"}
        )

    async def close(self) -> None:
        for discovery in self._discoveries:
            await discovery.close()
        await super().close()


class NatsQueueServer(NatsServer):
    def __init__(self, process: NatsServerProcess) -> None:
        super().__init__(process)
        self._queues: list[NatsPrefillQueue] = []

    async def connect(self) -> PrefillQueue:
        queue = NatsPrefillQueue(await self.open(), "test", ack_wait_s=self.ack_wait_s, max_deliveries=MAX_DELIVERIES)
        await started(queue.start)
        self._queues.append(queue)
        return queue

    async def push_raw(self, data: bytes) -> None:
        await JetStream(await self.open()).publish(f"kvrelay.test.prefill.queue.{PARTITION}", data)

    async def num_dead_letters(self) -> int:
        return (await JetStream(await self.open()).stream_info("kvrelay_test_prefill_dead")).state.messages

    async def close(self) -> None:
        for queue in self._queues:
            await queue.close()
        await super().close()


class NatsBusServer(NatsServer):
    async def connect(self) -> EventBus:
        return NatsEventBus(await self.open())


async def started(start: Callable[[], Awaitable[None]]) -> None:
    """The server may still remove the files of a stream that ``clear`` has deleted, and refuse a new one meanwhile."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await start()
            except JetStreamError as exc:
                if exc.err_code != STORE_FAILED:
                    raise
            await asyncio.sleep(0.05)


def wipe(store_dir: Path) -> None:
    """Delete all streams. The server must not run."""
    shutil.rmtree(store_dir / "jetstream")


async def clear(process: NatsServerProcess) -> None:
    """Delete all streams, without the cost of a restart."""
    connection = await NatsConnection.connect(process.url, PATIENCE_S)
    for stream in ("KV_kvrelay_test", "kvrelay_test_keepalives", "kvrelay_test_prefill", "kvrelay_test_prefill_dead"):
        reply = json.loads((await connection.request(f"$JS.API.STREAM.DELETE.{stream}", b"")).data)
        assert reply.get("success") or reply["error"]["code"] == 404, reply
    await connection.close()


@contextlib.asynccontextmanager
async def closing(server: NatsServer | MemoryServer) -> AsyncIterator[object]:
    if isinstance(server, NatsServer):
        await clear(server.process)
    try:
        yield server
    finally:
        await server.close()
