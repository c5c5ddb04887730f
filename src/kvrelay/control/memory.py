"""The control plane inside one process, without a server: what ``kvrelay.LLM`` runs on, and simulations and tests.

A MemoryBroker is the server; each ``plane()`` is one process's connection to it. A task of the broker renews the leases
of its planes every ``tick_s`` and ends overdue ones. ``is_online`` and ``revoked`` are for tests, which let the server
go away and operators revoke leases.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import msgspec

from kvrelay.control.base import Lease, WatchEvent, WatchKind
from kvrelay.control.held_lease import HeldLease
from kvrelay.control.memory_events import MemoryEventBus, MemoryExchange
from kvrelay.control.memory_queue import MemoryPrefillQueue, MemoryQueue
from kvrelay.control.redelivery import MAX_ACK_WAIT_S, MAX_DELIVERIES
from kvrelay.control.unleased import UnleasedEntries
from kvrelay.core.clock import MonotonicClock
from kvrelay.errors import ControlUnavailableError, LeaseLostError

TICK_S = 0.02


class _Watcher(msgspec.Struct):
    """The state that one watch has reported so far."""

    plane: MemoryControlPlane
    prefix: str
    events: asyncio.Queue[WatchEvent] = msgspec.field(default_factory=asyncio.Queue)
    known: dict[str, bytes] = {}
    is_synced: bool = False


class MemoryBroker:
    """The simulated server. ``tick_s``: how often it looks whether a lease or an ack deadline is over."""

    def __init__(
        self, *, ack_wait_s: float = MAX_ACK_WAIT_S, max_deliveries: int = MAX_DELIVERIES, tick_s: float = TICK_S
    ) -> None:
        self._tick_s = tick_s
        self.clock = MonotonicClock()
        self.is_online = True
        self.entries: dict[str, tuple[bytes, str | None]] = {}
        self.unleased = UnleasedEntries()
        self.leases: dict[str, MemoryLease] = {}
        self.revoked: set[str] = set()
        self.planes: list[MemoryControlPlane] = []
        self.watchers: list[_Watcher] = []
        self.queue = MemoryQueue(self.clock, ack_wait_s, max_deliveries)
        self.exchange = MemoryExchange()
        self._ids = itertools.count(1)
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return (
            f"MemoryBroker({'online' if self.is_online else 'offline'}, entries={len(self.entries)}, "
            f"leases={len(self.leases)}, {self.queue!r})"
        )

    def plane(self) -> MemoryControlPlane:
        """Make the connection of a new process."""
        self.tick()
        plane = MemoryControlPlane(self)
        self.planes.append(plane)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._tick_forever())
        return plane

    def new_id(self) -> str:
        return f"{next(self._ids):016x}"

    def tick(self) -> None:
        """Renew the leases of live processes, end those of closed ones, and deliver unacknowledged entries again."""
        if not self.is_online:
            return
        for plane in self.planes:
            for lease in plane.discovery.leases:
                lease.tick()
        now = self.clock.now()
        for lease_id, lease in list(self.leases.items()):
            if now - lease.renewed_s >= lease.ttl_s:
                self.end_lease(lease_id)
        self.queue.tick()

    def close_plane(self, plane: MemoryControlPlane) -> None:
        self.planes.remove(plane)
        self.watchers = [item for item in self.watchers if item.plane is not plane]
        self.exchange.forget(plane)
        if not self.planes and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            self.tick()

    # -- keys ---------------------------------------------------------------------------------------------------------

    def end_lease(self, lease_id: str) -> None:
        """End a lease as if it had expired, or as its holder does."""
        self.leases.pop(lease_id, None)
        self.entries = {key: entry for key, entry in self.entries.items() if entry[1] != lease_id}
        self.notify()

    def revoke_lease(self, lease_id: str) -> None:
        """End a lease as an operator does."""
        self.revoked.add(lease_id)
        self.end_lease(lease_id)

    def visible(self, prefix: str = "") -> dict[str, bytes]:
        """The entries that count, in the order of their keys."""
        return {
            key: value
            for key, (value, lease_id) in sorted(self.entries.items())
            if key.startswith(prefix) and not self.unleased.refuses(key, has_lease=lease_id is not None)
        }

    def notify(self) -> None:
        """Report the changes to every watcher that can be reached."""
        for watcher in self.watchers:
            if not watcher.plane.is_connected:
                continue
            current = self.visible(watcher.prefix)
            for key in sorted(watcher.known.keys() - current.keys()):
                watcher.events.put_nowait(WatchEvent(WatchKind.DELETE, key))
            for key, value in current.items():
                if watcher.known.get(key) != value:
                    watcher.events.put_nowait(WatchEvent(WatchKind.PUT, key, value))
            watcher.known = current
            if not watcher.is_synced:
                watcher.is_synced = True
                watcher.events.put_nowait(WatchEvent(WatchKind.SYNCED, ""))


class MemoryLease(HeldLease):
    """A lease of one process."""

    def __init__(self, plane: MemoryControlPlane, ttl_s: float) -> None:
        super().__init__(ttl_s)
        self._plane = plane
        self.renewed_s = 0.0
        self._grant()

    async def _end_at_server(self) -> None:
        self._plane.check_connected()
        self._plane.broker.end_lease(self.lease_id)

    def hold(self, key: str, value: bytes) -> None:
        """The key hangs on this lease from now on."""
        self._values[key] = value

    def tick(self) -> None:
        """Refresh the lease. If the broker has forgotten it, register again under a new one; if an operator has revoked
        it, do not put its keys again."""
        broker = self._plane.broker
        if self.is_given_back:
            return
        if broker.leases.get(self.lease_id) is self:
            self._renewed()
            return
        if self.lease_id in broker.revoked:
            self._values.clear()
            self._tell_revoked()
        else:
            self._tell_lost()
        self._grant()
        for key, value in self._values.items():
            broker.entries[key] = (value, self.lease_id)
        broker.notify()

    def _grant(self) -> None:
        broker = self._plane.broker
        self.lease_id = broker.new_id()
        broker.leases[self.lease_id] = self
        self._renewed()

    def _renewed(self) -> None:
        self.renewed_s = self._plane.broker.clock.now()
        self._confirmed(self.renewed_s)


class MemoryDiscovery:
    """Discovery in the broker's dictionary."""

    def __init__(self, plane: MemoryControlPlane) -> None:
        self._plane = plane
        self._broker = plane.broker
        self.leases: list[MemoryLease] = []

    @property
    def is_connected(self) -> bool:
        return self._plane.is_connected

    @property
    def num_unleased(self) -> int:
        return self._broker.unleased.num_refused

    async def grant(self, ttl_s: float) -> Lease:
        self._plane.check_connected()
        lease = MemoryLease(self._plane, ttl_s)
        self.leases.append(lease)
        return lease

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        self._plane.check_connected()
        assert lease is None or isinstance(lease, MemoryLease)
        if lease is not None and lease.is_given_back:
            raise LeaseLostError(f"lease {lease.lease_id} was revoked")
        self._detach(key)
        if lease is not None:
            lease.hold(key, value)
        self._broker.entries[key] = (value, lease.lease_id if lease is not None else None)
        self._broker.notify()

    async def delete(self, key: str) -> None:
        self._plane.check_connected()
        self._detach(key)
        self._broker.entries.pop(key, None)
        self._broker.notify()

    async def get(self, key: str) -> bytes | None:
        self._plane.check_connected()
        return self._broker.visible(key).get(key)

    async def list(self, prefix: str) -> dict[str, bytes]:
        self._plane.check_connected()
        return self._broker.visible(prefix)

    async def revoke_lease_of(self, key: str) -> bool:
        self._plane.check_connected()
        _, lease_id = self._broker.entries.get(key, (b"", None))
        if lease_id is None:
            return False
        self._broker.revoke_lease(lease_id)
        return True

    async def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        watcher = _Watcher(self._plane, prefix)
        self._broker.watchers.append(watcher)
        self._broker.notify()
        try:
            while True:
                yield await watcher.events.get()
        finally:
            if watcher in self._broker.watchers:
                self._broker.watchers.remove(watcher)

    def _detach(self, key: str) -> None:
        for lease in self.leases:
            lease.forget(key)


class MemoryControlPlane:
    """One process's connection to a MemoryBroker."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker
        self._is_closed = False
        self.discovery = MemoryDiscovery(self)
        self.prefill_queue = MemoryPrefillQueue(self, broker.queue)
        self.events = MemoryEventBus(self, broker.exchange)

    @property
    def is_connected(self) -> bool:
        return self.broker.is_online and not self._is_closed

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            for lease in self.discovery.leases:
                await lease.stop()
            self.broker.close_plane(self)

    def check_connected(self) -> None:
        """Raises ControlUnavailableError."""
        if not self.is_connected:
            raise ControlUnavailableError("no connection to the in-memory control plane")
