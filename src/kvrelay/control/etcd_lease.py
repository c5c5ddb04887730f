"""A lease of this process on etcd, kept alive until it is revoked.

It owns the keepalives, granting a lost lease again, and putting its keys again. It does not know the watchers.

    keepalive on each beat ──(no answer for ttl, or the server forgot it)──> on_lost, grant, put keys ──> keepalive ...
                    └──(an operator revoked it)──> on_lost, on_revoked, forget keys, grant ──> keepalive ...

etcd only says that a lease does not exist. The lease was revoked if it has not expired by our clock and the server has
kept its data. A server that lost its data has lost revisions, or has something else at the revision of our last put.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import suppress
from typing import Any

from kvrelay.control.etcd_channel import RETRY_S, EtcdChannel, NoRevisionError
from kvrelay.control.held_lease import HeldLease
from kvrelay.errors import ControlUnavailableError, KvrelayError, LeaseLostError

_log = logging.getLogger(__name__)


class EtcdLease(HeldLease):
    """A lease, with the keys that hang on it.

    etcd counts whole seconds and has a minimum time to live (2 s by default); ``ttl_s`` is the granted one.
    ``lease_id`` is written as ``etcdctl`` writes it.
    """

    def __init__(self, channel: EtcdChannel, wanted_ttl_s: float) -> None:
        super().__init__(wanted_ttl_s)
        self._channel = channel
        self._wanted_ttl_s = wanted_ttl_s
        self._id = 0
        self._revision = 0
        """The store's revision in the last answer to this lease."""
        self._last_put: tuple[bytes, int] | None = None
        """Under this lease: the key, and the revision that it made."""
        self._is_registered = True

    async def start(self) -> None:
        """Grant the lease and begin to send keepalives."""
        await self._grant()
        self._keep_alive(self._refresh_or_register)

    async def _end_at_server(self) -> None:
        with suppress(LeaseLostError):  # the lease and its keys are gone already
            await self._revoke(self._id)

    def holds(self, key: str) -> bool:
        """Whether the key hangs on this lease."""
        return key in self._values

    async def put(self, key: str, value: bytes) -> None:
        """Put under this lease. Raises LeaseLostError if the lease was revoked."""
        async with self._lock:
            if self.is_given_back:
                raise LeaseLostError("the lease was revoked")
            if not self._is_registered:
                await self._register_again()
            try:
                await self._put(key, value)
            except LeaseLostError:
                if await self._is_revoked_now():
                    self.wake()
                    raise
                await self._register_again()
                await self._put(key, value)
            # Only now: a put that failed must not take effect later, when the keys are put again.
            self._values[key] = value

    async def _refresh_or_register(self) -> None:
        if self._is_registered:
            await self._is_revoked_now()
        if not self._is_registered:
            await self._register_again()

    def _tell_lost(self) -> None:
        self._is_registered = False
        super()._tell_lost()

    async def _is_revoked_now(self) -> bool:
        """Refresh the lease, or learn that it was lost, or revoked. Raises ControlUnavailableError."""
        sent_s = time.monotonic()
        answer = await self._ask_to_live()
        revision = int(answer.header.revision)
        if answer.TTL > 0:
            self._revision = revision
            self._confirmed(sent_s)
            return False
        if time.monotonic() < self.alive_until_s and revision >= self._revision and await self._has_last_put():
            self._values.clear()
            self._tell_revoked()
            return True
        self._tell_lost()
        return False

    async def _has_last_put(self) -> bool:
        """Whether the server, which is not behind the revision of our last put, has that put there."""
        if self._last_put is None:
            return True
        key, revision = self._last_put
        request = self._channel.rpc.RangeRequest(key=key, revision=revision)
        try:
            answer = await self._channel.call(self._channel.kv.Range, request)
        except NoRevisionError:  # compacted
            return True
        return any((entry.lease, entry.mod_revision) == (self._id, revision) for entry in answer.kvs)

    async def _ask_to_live(self) -> Any:
        """The server's answer to a refresh; its TTL is 0 if there is no such lease."""
        channel = self._channel
        call = channel.leases.LeaseKeepAlive(
            timeout=min(channel.timeout_s, max(self.ttl_s / 3, RETRY_S)), metadata=channel.metadata
        )
        async with channel.streaming(call):
            await channel.begin(call, channel.rpc.LeaseKeepAliveRequest(ID=self._id))
            answer = await call.read()
        if not hasattr(answer, "TTL"):
            raise ControlUnavailableError(f"{channel.address} closed the stream")
        return answer

    async def _register_again(self) -> None:
        old_id = self._id
        await self._grant()
        await self._put_again(self._put)
        self._is_registered = True
        _log.info("lease %s replaces %x; registered its %d keys again", self.lease_id, old_id, len(self._values))
        try:
            # The keys are under the new lease already, so revoking the old one deletes nothing.
            await self._revoke(old_id)
        except KvrelayError:
            pass  # usually the server forgot the old lease, which is why we are here; else it expires by itself

    async def _grant(self) -> None:
        sent_s = time.monotonic()
        request = self._channel.rpc.LeaseGrantRequest(TTL=max(1, math.ceil(self._wanted_ttl_s)))
        answer = await self._channel.call(self._channel.leases.LeaseGrant, request)
        self._id, self.ttl_s = int(answer.ID), float(answer.TTL)
        self.lease_id = f"{self._id:x}"
        self._revision, self._last_put = int(answer.header.revision), None
        self._confirmed(sent_s)

    async def _put(self, key: str, value: bytes) -> None:
        request = self._channel.rpc.PutRequest(key=key.encode(), value=value, lease=self._id)
        answer = await self._channel.call(self._channel.kv.Put, request)
        self._revision = int(answer.header.revision)
        self._last_put = request.key, self._revision

    async def _revoke(self, lease_id: int) -> None:
        await self._channel.call(self._channel.leases.LeaseRevoke, self._channel.rpc.LeaseRevokeRequest(ID=lease_id))
