"""Discovery on etcd: leases that are kept alive, watches that survive restarts, compaction and loss of data.

What it owns: the beat of leases, granting a lost one again and putting its keys again, listing and watching without a
gap. What it does not know: gRPC's errors and tokens (``etcd_channel``), what values mean.

    watch:  list at revision r ──> report the difference ──> stream from r + 1 ──(stream ends, r compacted)──┐
              ^                                                                                             │
              └───────────────────────────── wait a little ─────────────────────────────────────────────────┘
    lease:  beat every ttl / 3 ──(server forgot it, or no answer for ttl)──> on_lost, grant, put keys ──> beat ...
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from kvrelay.control.base import Lease, WatchEvent, WatchKind
from kvrelay.control.etcd_channel import EtcdAddress, EtcdChannel
from kvrelay.errors import ControlUnavailableError, KvrelayError, LeaseLostError

RETRY_S = 0.25
"""Pause between attempts while the server is away."""
RE_REGISTER_GRACE_S = 1.0
"""After a restart that lost the data, so long do watchers wait for the living to put their keys again."""

_log = logging.getLogger(__name__)


class EtcdLease:
    """A lease that lives until it is revoked. Contract: ``control.base.Lease``.

    etcd counts whole seconds and has a least time to live (2 s by default); ``ttl_s`` is what it granted.
    """

    def __init__(self, channel: EtcdChannel, wanted_ttl_s: float) -> None:
        self._channel = channel
        self._wanted_ttl_s = wanted_ttl_s
        self._id = 0
        self._ttl_s = wanted_ttl_s
        self._keys: dict[str, bytes] = {}
        self._lock = asyncio.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._poked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._alive_until_s = 0.0
        self._lost = False
        self.revoked = False

    @property
    def lease_id(self) -> str:
        """As ``etcdctl`` writes it; another one after a loss."""
        return f"{self._id:x}"

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

    @property
    def alive_until_s(self) -> float:
        return -math.inf if self._lost or self.revoked else self._alive_until_s

    def on_lost(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    async def revoke(self) -> None:
        if self.revoked:
            return
        self.revoked = True
        await self.stop()
        try:
            await self._channel.call(
                self._channel.leases.LeaseRevoke, self._channel.rpc.LeaseRevokeRequest(ID=self._id)
            )
        except LeaseLostError:
            pass  # gone already, and its keys with it

    async def start(self) -> None:
        await self._grant()
        self._task = asyncio.create_task(self._keep_alive(), name=f"etcd lease {self.lease_id}")

    async def stop(self) -> None:
        """End the beat; the lease runs out by itself."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def poke(self) -> None:
        """Something is wrong with the server: beat now."""
        self._poked.set()

    async def put(self, key: str, value: bytes) -> None:
        async with self._lock:
            if self.revoked:
                raise LeaseLostError("the lease was revoked")
            before = self._keys.get(key)
            self._keys[key] = value
            try:
                if not self._lost:
                    await self._put(key, value)
                    return
            except LeaseLostError:
                self._lose()
            except KvrelayError:
                self._restore(key, before)
                raise
            try:
                await self._register_again()
            except KvrelayError:
                self._restore(key, before)
                raise

    def forget(self, key: str) -> None:
        self._keys.pop(key, None)

    def _restore(self, key: str, before: bytes | None) -> None:
        """A put that failed must not come true by itself later."""
        if before is None:
            self._keys.pop(key, None)
        else:
            self._keys[key] = before

    async def _keep_alive(self) -> None:
        answered = True
        # Cancellation alone does not do: asyncio.wait_for, in 3.11, swallows one that comes with the result.
        while asyncio.current_task() is self._task:
            try:
                await asyncio.wait_for(self._poked.wait(), self._ttl_s / 3 if answered else RETRY_S)
            except TimeoutError:
                pass
            self._poked.clear()
            try:
                async with self._lock:
                    if not self._lost and not await self._beat():
                        self._lose()
                    if self._lost:
                        await self._register_again()
                answered = True
            except KvrelayError as exc:
                if answered:
                    _log.warning("lease %s could not be renewed: %s", self.lease_id, exc)
                answered = False
                if time.monotonic() > self._alive_until_s and not self._lost:
                    # Others see this process as gone by now.
                    self._lose()

    async def _beat(self) -> bool:
        """Renew; False when the server does not know the lease. Raises ControlUnavailableError."""
        channel = self._channel
        sent_s = time.monotonic()
        call = channel.leases.LeaseKeepAlive(
            timeout=min(channel.timeout_s, max(self._ttl_s / 3, RETRY_S)), metadata=channel.metadata
        )
        try:
            await call.write(channel.rpc.LeaseKeepAliveRequest(ID=self._id))
            answer = await call.read()
        except channel.rpc.AioRpcError as exc:
            if channel.token_expired(exc):
                await channel.authenticate()
            raise channel.mapped(exc) from exc
        except asyncio.InvalidStateError as exc:
            raise ControlUnavailableError(f"{channel.address} closed the stream") from exc
        finally:
            call.cancel()
        ttl_s = getattr(answer, "TTL", None)
        if ttl_s is None:
            raise ControlUnavailableError(f"{channel.address} closed the stream")
        if ttl_s > 0:
            self._alive_until_s = sent_s + ttl_s
        return bool(ttl_s > 0)

    def _lose(self) -> None:
        self._lost = True
        _log.warning("lease %s is lost", self.lease_id)
        for callback in self._callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001 - another room's fault must not end the lease
                _log.exception("a callback for the lost lease failed")

    async def _register_again(self) -> None:
        old_id = self._id
        await self._grant()
        for key, value in self._keys.items():
            await self._put(key, value)
        self._lost = False
        _log.info("lease %s replaces %x, %d keys are put again", self.lease_id, old_id, len(self._keys))
        try:
            # Its keys are under the new lease already, so nothing goes with it.
            await self._channel.call(self._channel.leases.LeaseRevoke, self._channel.rpc.LeaseRevokeRequest(ID=old_id))
        except KvrelayError:
            pass  # the server forgot it, which is how we got here; or it runs out by itself

    async def _grant(self) -> None:
        sent_s = time.monotonic()
        request = self._channel.rpc.LeaseGrantRequest(TTL=max(1, math.ceil(self._wanted_ttl_s)))
        answer = await self._channel.call(self._channel.leases.LeaseGrant, request)
        self._id, self._ttl_s = int(answer.ID), float(answer.TTL)
        self._alive_until_s = sent_s + self._ttl_s

    async def _put(self, key: str, value: bytes) -> None:
        request = self._channel.rpc.PutRequest(key=key.encode(), value=value, lease=self._id)
        await self._channel.call(self._channel.kv.Put, request)


class EtcdDiscovery:
    """Contract: ``control.base.Discovery``. Made by ``connect``."""

    def __init__(self, channel: EtcdChannel) -> None:
        self._channel = channel
        self._leases: list[EtcdLease] = []
        self._connected = True

    @classmethod
    async def connect(cls, url: str, *, namespace: str = "default", connect_timeout_s: float = 5.0) -> EtcdDiscovery:
        """Raises ConfigError, or ControlUnavailableError when no server answers in time.

        ``namespace`` only names the connection in errors: keys arrive complete.
        """
        channel = EtcdChannel(EtcdAddress.parse(url), connect_timeout_s)
        try:
            await channel.connect(connect_timeout_s)
        except ControlUnavailableError as exc:
            await channel.close()
            raise ControlUnavailableError(f"discovery of namespace {namespace}: {exc}") from exc
        except BaseException:
            await channel.close()
            raise
        return cls(channel)

    def __repr__(self) -> str:
        state = "connected" if self.is_connected else "not connected"
        return f"<EtcdDiscovery {self._channel.address}: {state}, {len(self._leases)} leases>"

    @property
    def is_connected(self) -> bool:
        """Whether the last contact with the server succeeded."""
        return self._connected and not self._channel.closed

    async def close(self) -> None:
        """End watches and beats. Leases that were not revoked run out by themselves. Idempotent."""
        for lease in self._leases:
            await lease.stop()
        await self._channel.close()

    async def grant(self, ttl_s: float) -> Lease:
        lease = EtcdLease(self._channel, ttl_s)
        await lease.start()
        self._leases = [other for other in self._leases if not other.revoked] + [lease]
        return lease

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        self._forget(key, except_for=lease)
        if lease is None:
            await self._channel.call(self._channel.kv.Put, self._channel.rpc.PutRequest(key=key.encode(), value=value))
        else:
            assert isinstance(lease, EtcdLease), "a lease of another discovery"
            await lease.put(key, value)

    async def delete(self, key: str) -> None:
        self._forget(key)
        await self._channel.call(self._channel.kv.DeleteRange, self._channel.rpc.DeleteRangeRequest(key=key.encode()))

    async def get(self, key: str) -> bytes | None:
        answer = await self._channel.call(self._channel.kv.Range, self._channel.rpc.RangeRequest(key=key.encode()))
        return bytes(answer.kvs[0].value) if answer.kvs else None

    async def list(self, prefix: str) -> dict[str, bytes]:
        return (await self._list(prefix))[0]

    async def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        known: dict[str, bytes] = {}
        synced = False
        while not self._channel.closed:
            try:
                found, revision = await self._list(prefix)
                if synced and not known.keys() <= found.keys():
                    # Perhaps the server has lost its data, and the living are about to put theirs again.
                    await asyncio.sleep(RE_REGISTER_GRACE_S)
                    found, revision = await self._list(prefix)
                self._connected = True
                for event in _differences(known, found):
                    yield event
                known = found
                if not synced:
                    synced = True
                    yield WatchEvent(WatchKind.SYNCED, "")
                async with contextlib.aclosing(self._stream(prefix, revision + 1)) as changes:
                    async for event in changes:
                        if event.kind is WatchKind.PUT:
                            known[event.key] = event.value
                        elif known.pop(event.key, None) is None:
                            continue
                        yield event
            except ControlUnavailableError as exc:
                if self._connected and not self._channel.closed:
                    _log.warning("the watch of %s is interrupted: %s", prefix, exc)
                self._connected = False
                for lease in self._leases:
                    lease.poke()
            await asyncio.sleep(RETRY_S)

    def _forget(self, key: str, except_for: Lease | None = None) -> None:
        """No lease may put it again."""
        for lease in self._leases:
            if lease is not except_for:
                lease.forget(key)

    async def _list(self, prefix: str) -> tuple[dict[str, bytes], int]:
        """Keys and values under ``prefix``, and the store's revision at which they were read."""
        start, end = _range(prefix)
        answer = await self._channel.call(
            self._channel.kv.Range, self._channel.rpc.RangeRequest(key=start, range_end=end)
        )
        return {item.key.decode(): bytes(item.value) for item in answer.kvs}, int(answer.header.revision)

    async def _stream(self, prefix: str, first_revision: int) -> AsyncGenerator[WatchEvent, None]:
        """Changes from ``first_revision`` on, until the stream ends for whatever reason."""
        channel = self._channel
        start, end = _range(prefix)
        call = channel.watches.Watch(metadata=channel.metadata)
        try:
            request = channel.rpc.WatchCreateRequest(key=start, range_end=end, start_revision=first_revision)
            await call.write(channel.rpc.WatchRequest(create_request=request))
            while True:
                answer = await call.read()
                if not hasattr(answer, "events") or answer.canceled or answer.compact_revision:
                    return  # ended, or what we wanted next is compacted: list again
                for event in answer.events:
                    yield _watch_event(event)
        except channel.rpc.AioRpcError as exc:
            if channel.token_expired(exc):
                await channel.authenticate()
            raise channel.mapped(exc) from exc
        except asyncio.InvalidStateError as exc:
            raise ControlUnavailableError(f"{channel.address} closed the stream") from exc
        except asyncio.CancelledError:
            if not channel.closed_under_us():
                raise
        finally:
            call.cancel()


def _watch_event(event: Any) -> WatchEvent:
    """From etcd's message; its types are 0 for PUT and 1 for DELETE."""
    key = event.kv.key.decode()
    return WatchEvent(WatchKind.DELETE, key) if event.type else WatchEvent(WatchKind.PUT, key, bytes(event.kv.value))


def _differences(known: dict[str, bytes], found: dict[str, bytes]) -> list[WatchEvent]:
    """What turns ``known`` into ``found``."""
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
