"""Discovery in a NATS key-value bucket.

It owns this process's leases and passes the events of its mirror to the watchers. Reads go through the mirror, too,
after it has caught up with the server. So they agree with the watches and with all earlier writes of other processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from kvrelay.control.base import Keys, Lease, WatchEvent, WatchKind
from kvrelay.control.held_lease import forget_elsewhere
from kvrelay.control.nats.bucket import Bucket
from kvrelay.control.nats.connection import NatsConnection
from kvrelay.control.nats.jetstream import JetStream
from kvrelay.control.nats.lease import NatsLease
from kvrelay.control.nats.mirror import Mirror

ANSWER_TIMEOUT_S = 5.0


class NatsDiscovery:
    """Discovery over one NATS connection and one namespace. All reads go through ``mirror``."""

    def __init__(
        self,
        connection: NatsConnection,
        namespace: str,
        holder: str = "",
        num_replicas: int = 0,
        *,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        """``answer_timeout_s``: for how long ``get`` and ``list`` wait for a server that pauses."""
        jetstream = JetStream(connection, num_replicas)
        keys = Keys(namespace)
        self._holder = holder
        self._answer_timeout_s = answer_timeout_s
        self._bucket = Bucket(jetstream, namespace)
        self._leases: list[NatsLease] = []
        self._watchers: dict[asyncio.Queue[WatchEvent], str] = {}
        self._has_synced = False
        self.mirror = Mirror(
            connection,
            jetstream,
            self._bucket,
            keys.lease_keeper,
            on_events=self._hand_out,
            on_synced=self._synced,
            on_lease_ended=self._lease_ended,
        )
        self._connection = connection
        connection.on_reconnected(self._wake_leases)

    def __repr__(self) -> str:
        return f"NatsDiscovery({self._bucket.name}, {self.mirror.table!r}, leases={self._leases})"

    @property
    def is_connected(self) -> bool:
        return self._connection.is_connected

    @property
    def num_unleased(self) -> int:
        return self.mirror.table.unleased.num_refused

    async def start(self) -> None:
        """Create the bucket if it does not exist."""
        await self._bucket.ensure()

    async def close(self) -> None:
        for lease in self._leases:
            await lease.stop()
        await self.mirror.close()

    async def grant(self, ttl_s: float) -> Lease:
        lease = NatsLease(self._bucket, ttl_s, self._holder, lambda: self.mirror.is_live)
        await lease.start()
        self._leases = [other for other in self._leases if not other.is_given_back]
        self._leases.append(lease)
        return lease

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        if lease is None:
            await self._bucket.put(key, value, None)
        else:
            assert isinstance(lease, NatsLease)
            await lease.put(key, value)
        forget_elsewhere(key, self._leases, lease)

    async def delete(self, key: str) -> None:
        forget_elsewhere(key, self._leases)
        await self._bucket.delete(key)

    async def get(self, key: str) -> bytes | None:
        return (await self._read()).get(key)

    async def list(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in sorted((await self._read()).items()) if key.startswith(prefix)}

    async def revoke_lease_of(self, key: str) -> bool:
        lease_id = self.mirror.table.lease_id_of(key) if key in await self._read() else None
        if lease_id is None:
            return False
        await self._bucket.end_lease(lease_id)
        return True

    async def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        self.mirror.start()
        queue: asyncio.Queue[WatchEvent] = asyncio.Queue()
        if self._has_synced:
            self._fill(queue, prefix)
        self._watchers[queue] = prefix
        try:
            while True:
                yield await queue.get()
        finally:
            del self._watchers[queue]

    async def _read(self) -> dict[str, bytes]:
        self.mirror.start()
        await self.mirror.catch_up(self._answer_timeout_s)
        return self.mirror.table.visible

    def _fill(self, queue: asyncio.Queue[WatchEvent], prefix: str) -> None:
        for key, value in sorted(self.mirror.table.visible.items()):
            if key.startswith(prefix):
                queue.put_nowait(WatchEvent(WatchKind.PUT, key, value))
        queue.put_nowait(WatchEvent(WatchKind.SYNCED, ""))

    def _hand_out(self, events: Sequence[WatchEvent]) -> None:
        for event in events:
            for queue, prefix in self._watchers.items():
                if event.key.startswith(prefix):
                    queue.put_nowait(event)

    def _synced(self) -> None:
        if not self._has_synced:
            self._has_synced = True
            for queue in self._watchers:
                queue.put_nowait(WatchEvent(WatchKind.SYNCED, ""))

    def _lease_ended(self, lease_id: str) -> None:
        for lease in self._leases:
            if lease.lease_id == lease_id:
                lease.wake()

    def _wake_leases(self) -> None:
        for lease in self._leases:
            lease.wake()
