"""One process's control plane on NATS, put together; discovery may be elsewhere."""

from __future__ import annotations

import os
import socket
from typing import Protocol

from kvrelay.control.base import Discovery
from kvrelay.control.nats.connection import NatsConnection, ask_again
from kvrelay.control.nats.discovery import NatsDiscovery
from kvrelay.control.nats.event_bus import NatsEventBus
from kvrelay.control.nats.prefill_queue import NatsPrefillQueue
from kvrelay.control.redelivery import MAX_ACK_WAIT_S


class ClosableDiscovery(Discovery, Protocol):
    """A discovery service that its plane closes."""

    async def close(self) -> None: ...


class NatsControlPlane:
    """ControlPlane over one ``connection``. ``close`` ends all parts."""

    def __init__(
        self, connection: NatsConnection, discovery: ClosableDiscovery, prefill_queue: NatsPrefillQueue
    ) -> None:
        self.connection = connection
        self.discovery = discovery
        self.prefill_queue = prefill_queue
        self.events = NatsEventBus(connection)

    @classmethod
    async def connect(
        cls,
        url: str,
        namespace: str,
        connect_timeout_s: float,
        *,
        num_replicas: int = 0,
        ack_wait_s: float = MAX_ACK_WAIT_S,
        discovery: ClosableDiscovery | None = None,
    ) -> NatsControlPlane:
        """Raises ConfigError, ControlUnavailableError. ``num_replicas``: see ``JetStream``. ``discovery`` None: in a
        bucket of the same server."""
        connection = await NatsConnection.connect(url, connect_timeout_s)
        queue = NatsPrefillQueue(connection, namespace, num_replicas=num_replicas, ack_wait_s=ack_wait_s)
        try:
            if discovery is None:
                holder = f"{socket.gethostname()}:{os.getpid()}"
                discovery = bucket = NatsDiscovery(
                    connection, namespace, holder, num_replicas, answer_timeout_s=connect_timeout_s
                )
                await ask_again(bucket.start, connect_timeout_s)
            await ask_again(queue.start, connect_timeout_s)
        except BaseException:
            await connection.close()
            raise
        return cls(connection, discovery, queue)

    def __repr__(self) -> str:
        state = "connected" if self.is_connected else "not connected"
        return f"NatsControlPlane({self.connection.url}, {state}, {self.discovery!r}, {self.prefill_queue!r})"

    @property
    def is_connected(self) -> bool:
        return self.connection.is_connected

    async def close(self) -> None:
        await self.discovery.close()
        await self.prefill_queue.close()
        await self.connection.close()
