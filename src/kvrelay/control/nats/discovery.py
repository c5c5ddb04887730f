"""Discovery in a NATS key-value bucket.

It owns this process's leases, which it refreshes at a third of their time to live and counts as lost when no refresh
has succeeded for a whole one, and hands what its mirror sees to the watchers. Reads go through the mirror too, once it
has caught up with the server, so they agree with the watches and with what others have written before.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from uuid import uuid4

from kvrelay.control.base import Lease, WatchEvent, WatchKind
from kvrelay.control.nats.bucket import Bucket, LeaseValue
from kvrelay.control.nats.connection import NatsConnection
from kvrelay.control.nats.jetstream import JetStream, WrongSequenceError
from kvrelay.control.nats.mirror import Mirror
from kvrelay.core.clock import Clock
from kvrelay.errors import ControlUnavailableError, LeaseLostError

_log = logging.getLogger(__name__)


class NatsLease:
    """A lease of this process, with the keys that hang on it."""

    def __init__(self, bucket: Bucket, ttl_s: float, holder: str) -> None:
        self._bucket = bucket
        self._ttl_s = ttl_s
        self._holder = holder
        self._lease_id = ""
        self._seq = 0
        self._beats = 0
        self._values: dict[str, bytes] = {}
        self._on_lost: list[Callable[[], None]] = []
        self._is_revoked = False
        self._is_registered = True
        self._is_stopped = False
        self._alive_until_s = -math.inf
        self._is_told = False
        self._timer: asyncio.TimerHandle | None = None
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"NatsLease({self._lease_id}, ttl_s={self._ttl_s:g}, keys={len(self._values)}, beats={self._beats})"

    @property
    def lease_id(self) -> str:
        return self._lease_id

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

    @property
    def alive_until_s(self) -> float:
        return self._alive_until_s

    @property
    def is_revoked(self) -> bool:
        return self._is_revoked

    def on_lost(self, callback: Callable[[], None]) -> None:
        self._on_lost.append(callback)

    async def start(self) -> None:
        """Grant it and begin to keep it alive."""
        await self._grant()
        self._task = asyncio.get_running_loop().create_task(self._keep_alive(), name=f"lease {self._lease_id}")

    def wake(self) -> None:
        """Beat now: it may be lost."""
        self._wake.set()

    async def put(self, key: str, value: bytes) -> None:
        """Put under this lease. Raises LeaseLostError after ``revoke``."""
        async with self._lock:
            if self._is_revoked:
                raise LeaseLostError(f"lease {self._lease_id} was revoked")
            if not self._lease_id:
                raise ControlUnavailableError("the lease was lost and is not granted again yet")
            await self._bucket.put(key, value, self._lease_id)
            self._values[key] = value

    def detach(self, key: str) -> None:
        """The key no longer hangs on this lease."""
        self._values.pop(key, None)

    async def revoke(self) -> None:
        if self._is_revoked:
            return
        self._is_revoked = True
        self._alive_until_s = -math.inf
        await self.stop()
        # The lease first: with it all its keys are over, for everybody, at once.
        await self._bucket.end_lease(self._lease_id)
        for key in self._values:
            await self._bucket.delete(key)
        self._values.clear()

    async def stop(self) -> None:
        """No longer keep it alive."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _keep_alive(self) -> None:
        delay_s = self._ttl_s / 3
        # Cancellation alone does not do: asyncio.wait_for, in 3.11, swallows one that comes with the result.
        while not self._is_stopped:
            try:
                async with asyncio.timeout(delay_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                async with self._lock:
                    await self._beat()
                delay_s = self._ttl_s / 3
            except ControlUnavailableError as exc:
                _log.debug("lease %s not refreshed: %s", self._lease_id, exc)
                delay_s = min(self._ttl_s / 6, 1.0)

    async def _beat(self) -> None:
        if self._lease_id and not await self._refresh():
            _log.warning("lease %s is lost, registering again", self._lease_id)
            self._lease_id = ""
            self._is_registered = False
            self._tell_lost()
        if not self._lease_id:
            await self._grant()
        if not self._is_registered:
            for key, value in list(self._values.items()):
                await self._bucket.put(key, value, self._lease_id)
            self._is_registered = True

    async def _refresh(self) -> bool:
        """Write it again. False when somebody has ended it, or the server has lost it."""
        try:
            await self._write(self._lease_id, self._seq)
            return True
        except WrongSequenceError:
            seq = await self._bucket.lease_seq(self._lease_id)
        if seq is None:
            return False
        # Only we write it: an earlier beat arrived whose answer did not. That one does not tell when it was sent.
        self._seq = seq
        await self._write(self._lease_id, seq)
        return True

    async def _grant(self) -> None:
        lease_id = uuid4().hex[:16]
        self._beats = 0
        await self._write(lease_id, 0)
        self._lease_id = lease_id

    async def _write(self, lease_id: str, expected_seq: int) -> None:
        """Grant or refresh. It counts from when it was sent: others time it from when it arrived, which is later."""
        sent_s = time.monotonic()
        self._seq = await self._bucket.write_lease(lease_id, self._value(), expected_seq)
        left_s = sent_s + self._ttl_s - time.monotonic()
        if left_s <= 0:
            return  # answered too late to count
        self._alive_until_s = sent_s + self._ttl_s
        self._is_told = False
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(left_s, self._tell_lost)

    def _tell_lost(self) -> None:
        """Others may see this process as gone: the server says so, or nothing was heard of it for too long."""
        self._alive_until_s = -math.inf
        if self._is_told:
            return
        self._is_told = True
        _log.warning("lease %s counts as lost", self._lease_id or "(ended)")
        for callback in self._on_lost:
            callback()

    def _value(self) -> LeaseValue:
        self._beats += 1
        return LeaseValue(self._ttl_s, self._beats, self._holder)


class NatsDiscovery:
    """Discovery over one NATS connection and one namespace."""

    def __init__(
        self, connection: NatsConnection, namespace: str, clock: Clock, holder: str = "", num_replicas: int = 0
    ) -> None:
        jetstream = JetStream(connection, num_replicas)
        self._connection = connection
        self._holder = holder
        self._bucket = Bucket(jetstream, namespace)
        self._leases: list[NatsLease] = []
        self._watchers: dict[asyncio.Queue[WatchEvent], str] = {}
        self._has_synced = False
        self._mirror = Mirror(
            connection,
            jetstream,
            self._bucket,
            clock,
            on_events=self._hand_out,
            on_synced=self._synced,
            on_lease_ended=self._lease_ended,
        )
        connection.on_reconnected(self._wake_leases)

    def __repr__(self) -> str:
        return f"NatsDiscovery({self._bucket.name}, {self._mirror.table!r}, leases={self._leases})"

    async def start(self) -> None:
        """Create the bucket where there is none."""
        await self._bucket.ensure()

    async def close(self) -> None:
        for lease in self._leases:
            await lease.stop()
        await self._mirror.close()

    async def grant(self, ttl_s: float) -> Lease:
        lease = NatsLease(self._bucket, ttl_s, self._holder)
        await lease.start()
        self._leases = [other for other in self._leases if not other.is_revoked]
        self._leases.append(lease)
        return lease

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        for other in self._leases:
            if other is not lease:
                other.detach(key)
        if lease is None:
            await self._bucket.put(key, value, None)
        else:
            assert isinstance(lease, NatsLease)
            await lease.put(key, value)

    async def delete(self, key: str) -> None:
        for lease in self._leases:
            lease.detach(key)
        await self._bucket.delete(key)

    async def get(self, key: str) -> bytes | None:
        return (await self._read()).get(key)

    async def list(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in sorted((await self._read()).items()) if key.startswith(prefix)}

    async def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        self._mirror.start()
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
        self._mirror.start()
        await self._mirror.catch_up()
        return self._mirror.table.visible

    def _fill(self, queue: asyncio.Queue[WatchEvent], prefix: str) -> None:
        for key, value in sorted(self._mirror.table.visible.items()):
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
