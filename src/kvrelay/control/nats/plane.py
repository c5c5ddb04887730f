"""One process's control plane on NATS, put together."""

from __future__ import annotations

import os
import socket

from kvrelay.control.base import Discovery
from kvrelay.control.nats.connection import NatsConnection, ask_again
from kvrelay.control.nats.discovery import NatsDiscovery
from kvrelay.control.nats.event_bus import NatsEventBus
from kvrelay.control.nats.prefill_queue import NatsPrefillQueue
from kvrelay.control.redelivery import MAX_ACK_WAIT_S
from kvrelay.core.clock import Clock


class NatsControlPlane:
    """ControlPlane over one ``connection``. ``close`` ends all parts."""

    def __init__(self, connection: NatsConnection, discovery: NatsDiscovery, prefill_queue: NatsPrefillQueue) -> None:
        self.connection = connection
        self._discovery = discovery
        self._prefill_queue = prefill_queue
        self._events = NatsEventBus(connection)

    @classmethod
    async def connect(
        cls,
        url: str,
        namespace: str,
        connect_timeout_s: float,
        clock: Clock,
        *,
        num_replicas: int = 0,
        ack_wait_s: float = MAX_ACK_WAIT_S,
    ) -> NatsControlPlane:
        """Raises ConfigError, ControlUnavailableError. ``num_replicas``: see ``JetStream``."""
        connection = await NatsConnection.connect(url, connect_timeout_s)
        holder = f"{socket.gethostname()}:{os.getpid()}"
        discovery = NatsDiscovery(
            connection, namespace, clock, holder, num_replicas, answer_timeout_s=connect_timeout_s
        )
        queue = NatsPrefillQueue(connection, namespace, num_replicas=num_replicas, ack_wait_s=ack_wait_s)
        try:
            await ask_again(discovery.start, connect_timeout_s)
            await ask_again(queue.start, connect_timeout_s)
        except BaseException:
            await connection.close()
            raise
        return cls(connection, discovery, queue)

    def __repr__(self) -> str:
        state = "connected" if self.is_connected else "not connected"
        return f"NatsControlPlane({self.connection.url}, {state}, {self._discovery!r}, {self._prefill_queue!r})"

    @property
    def discovery(self) -> Discovery:
        return self._discovery

    @property
    def prefill_queue(self) -> NatsPrefillQueue:
        return self._prefill_queue

    @property
    def events(self) -> NatsEventBus:
        return self._events

    @property
    def is_connected(self) -> bool:
        return self.connection.is_connected

    async def close(self) -> None:
        await self._discovery.close()
        await self._prefill_queue.close()
        await self.connection.close()
