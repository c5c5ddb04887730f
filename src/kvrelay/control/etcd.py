"""Discovery on etcd: watches that survive restarts, compaction and loss of data.

It owns this process's leases (``etcd_lease``), listing, and watching without a gap. It does not know gRPC's errors and
tokens (``etcd_channel``), or what values mean.

    watch:  begin a stream ──> list at revision r ──> report the difference ──> stream what is after r ──(it ends)──┐
              ^                                                                                                    │
              └────────────────────────────────── wait a little ───────────────────────────────────────────────────┘

The stream begins before the listing, so whatever makes the listing worthless ends the stream, too: revisions alone say
nothing, for a server that lost its data counts from one again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import Any

from kvrelay.control.base import Lease, WatchEvent, WatchKind
from kvrelay.control.etcd_channel import RETRY_S, EtcdAddress, EtcdChannel
from kvrelay.control.etcd_lease import EtcdLease
from kvrelay.control.held_lease import forget_elsewhere
from kvrelay.control.unleased import UnleasedEntries
from kvrelay.errors import ControlUnavailableError, LeaseLostError

RE_REGISTER_GRACE_S = 1.0
"""After a restart that lost the data, watchers wait this long for live processes to put their keys again."""
NO_LEASE = 0
"""The lease of an entry without one, in etcd's messages."""

_log = logging.getLogger(__name__)


class EtcdDiscovery:
    """Contract: ``control.base.Discovery``. Made by ``connect``."""

    def __init__(self, channel: EtcdChannel) -> None:
        self.channel = channel
        self._leases: list[EtcdLease] = []
        self._unleased = UnleasedEntries()
        self._connected = True

    @classmethod
    async def connect(cls, url: str, *, namespace: str = "default", connect_timeout_s: float = 5.0) -> EtcdDiscovery:
        """Raises ConfigError, or ControlUnavailableError if no server answers in time.

        ``namespace`` is used in error messages only: keys arrive complete.
        """
        channel = EtcdChannel(EtcdAddress.parse(url), connect_timeout_s)
        try:
            await channel.connect(connect_timeout_s)
        except BaseException as exc:
            await channel.close()
            if isinstance(exc, ControlUnavailableError):
                raise ControlUnavailableError(f"discovery of namespace {namespace}: {exc}") from exc
            raise
        return cls(channel)

    def __repr__(self) -> str:
        state = "connected" if self.is_connected else "not connected"
        return f"<EtcdDiscovery {self.channel.address}: {state}, {len(self._leases)} leases>"

    @property
    def is_connected(self) -> bool:
        return self._connected and not self.channel.closed

    @property
    def num_unleased(self) -> int:
        return self._unleased.num_refused

    async def close(self) -> None:
        """End watches and keepalives. Leases that were not revoked expire by themselves. Idempotent."""
        for lease in self._leases:
            await lease.stop()
        await self.channel.close()

    async def grant(self, ttl_s: float) -> Lease:
        lease = EtcdLease(self.channel, ttl_s)
        await lease.start()
        self._leases = [other for other in self._leases if not other.is_given_back] + [lease]
        return lease

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        if lease is None:
            await self.channel.call(self.channel.kv.Put, self.channel.rpc.PutRequest(key=key.encode(), value=value))
        else:
            assert isinstance(lease, EtcdLease), "a lease of another discovery"
            await lease.put(key, value)
        forget_elsewhere(key, self._leases, lease)

    async def delete(self, key: str) -> None:
        forget_elsewhere(key, self._leases)
        await self.channel.call(self.channel.kv.DeleteRange, self.channel.rpc.DeleteRangeRequest(key=key.encode()))

    async def get(self, key: str) -> bytes | None:
        answer = await self.channel.call(self.channel.kv.Range, self.channel.rpc.RangeRequest(key=key.encode()))
        return self._counting(answer.kvs).get(key)

    async def list(self, prefix: str) -> dict[str, bytes]:
        return (await self._list(prefix))[0]

    async def revoke_lease_of(self, key: str) -> bool:
        channel = self.channel
        answer = await channel.call(channel.kv.Range, channel.rpc.RangeRequest(key=key.encode()))
        lease = next((item.lease for item in answer.kvs), NO_LEASE)
        if lease == NO_LEASE:
            return False
        with contextlib.suppress(LeaseLostError):  # it has ended since, and its entries with it
            await channel.call(channel.leases.LeaseRevoke, channel.rpc.LeaseRevokeRequest(ID=lease))
        return True

    async def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        known: dict[str, bytes] = {}
        synced = False
        while not self.channel.closed:
            try:
                async with contextlib.aclosing(self._stream(prefix)) as changes:
                    # If it ends at once, perhaps for an old token, the listing says why, or gets a new one.
                    await anext(changes, None)
                    found, revision = await self._list(prefix)
                    if synced and not known.keys() <= found.keys():
                        # The server may have lost its data, and live processes are about to put their keys again.
                        await asyncio.sleep(RE_REGISTER_GRACE_S)
                        found, revision = await self._list(prefix)
                    self._connected = True
                    for event in _differences(known, found):
                        yield event
                    known = found
                    if not synced:
                        synced = True
                        yield WatchEvent(WatchKind.SYNCED, "")
                    async for change in changes:
                        if change.kv.mod_revision <= revision:
                            continue
                        event = self._watch_event(change)
                        if event.kind is WatchKind.PUT:
                            known[event.key] = event.value
                        elif known.pop(event.key, None) is None:
                            continue
                        else:
                            self._poke_holders(event.key)
                        yield event
            except ControlUnavailableError as exc:
                if self._connected and not self.channel.closed:
                    _log.warning("the watch of %s was interrupted (%s); listing again", prefix, exc)
                self._connected = False
                for lease in self._leases:
                    lease.wake()
            await asyncio.sleep(RETRY_S)

    def _poke_holders(self, key: str) -> None:
        """The key is gone, perhaps because its lease has ended."""
        for lease in self._leases:
            if lease.holds(key):
                lease.wake()

    async def _list(self, prefix: str) -> tuple[dict[str, bytes], int]:
        """Keys and values under ``prefix``, and the store's revision at which they were read."""
        start, end = _range(prefix)
        answer = await self.channel.call(self.channel.kv.Range, self.channel.rpc.RangeRequest(key=start, range_end=end))
        return self._counting(answer.kvs), int(answer.header.revision)

    async def _stream(self, prefix: str) -> AsyncGenerator[Any, None]:
        """None once the server watches, then etcd's messages of all changes, until the stream ends for any reason."""
        channel = self.channel
        start, end = _range(prefix)
        call = channel.watches.Watch(metadata=channel.metadata)
        try:
            request = channel.rpc.WatchCreateRequest(key=start, range_end=end)
            async with channel.streaming(call):
                await channel.begin(call, channel.rpc.WatchRequest(create_request=request))
                while True:
                    answer = await call.read()
                    if not hasattr(answer, "events") or answer.canceled or answer.compact_revision:
                        return  # the stream ended, or what comes next is compacted: list again
                    if answer.created:
                        yield None
                    for change in answer.events:
                        yield change
        except asyncio.CancelledError:
            if not channel.closed_under_us():
                raise

    def _counting(self, items: Iterable[Any]) -> dict[str, bytes]:
        """Keys and values of the entries that count: under a lease, or settings."""
        found = ((item.key.decode(), item) for item in items)
        return {
            key: bytes(item.value)
            for key, item in found
            if not self._unleased.refuses(key, has_lease=item.lease != NO_LEASE)
        }

    def _watch_event(self, event: Any) -> WatchEvent:
        """From etcd's message; its types are 0 for PUT and 1 for DELETE. A put that does not count ends the entry that
        it replaces."""
        key = event.kv.key.decode()
        if event.type or self._unleased.refuses(key, has_lease=event.kv.lease != NO_LEASE):
            return WatchEvent(WatchKind.DELETE, key)
        return WatchEvent(WatchKind.PUT, key, bytes(event.kv.value))


def _differences(known: dict[str, bytes], found: dict[str, bytes]) -> list[WatchEvent]:
    """The events that turn ``known`` into ``found``."""
    gone = [WatchEvent(WatchKind.DELETE, key) for key in known if key not in found]
    new = [WatchEvent(WatchKind.PUT, key, value) for key, value in found.items() if known.get(key) != value]
    return gone + new


def _range(prefix: str) -> tuple[bytes, bytes]:
    """etcd's [start, end) for all keys that begin with ``prefix``."""
    start = prefix.encode()
    head = start.rstrip(b"\xff")
    if not head:
        return start or b"\0", b"\0"
    return start, head[:-1] + bytes([head[-1] + 1])
