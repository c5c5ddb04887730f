"""A lease in a NATS key-value bucket: a key that is written once, and keepalives in a separate stream.

It owns the keepalives and registering again. The lease is lost if no keepalive has succeeded for a whole time to live,
or if its key is gone. It was revoked if an operator deleted that key. A holder that watches discovery is told of the
deletion; a holder that does not watch checks before each keepalive.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from uuid import uuid4

from kvrelay.control.held_lease import HeldLease
from kvrelay.control.nats.bucket import Bucket, LeaseValue
from kvrelay.control.nats.jetstream import WrongSequenceError
from kvrelay.errors import ControlUnavailableError, LeaseLostError


class NatsLease(HeldLease):
    """A lease of this process, with the keys that hang on it."""

    def __init__(self, bucket: Bucket, ttl_s: float, holder: str, is_watched: Callable[[], bool]) -> None:
        """``is_watched`` says whether ``wake`` is called at once when the lease's key is deleted."""
        super().__init__(ttl_s)
        self._bucket = bucket
        self._is_watched = is_watched
        self._num_wakes = self._num_answered = 0
        """Doubts whether the lease is there, and those that the server has dispelled: another may come meanwhile."""
        self._holder = holder
        self._seq = 0
        self.num_keepalives = 0
        """Sent for this lease."""
        self._is_registered = True

    def __repr__(self) -> str:
        return (
            f"NatsLease({self.lease_id}, ttl_s={self.ttl_s:g}, keys={len(self._values)}, "
            f"keepalives={self.num_keepalives})"
        )

    async def start(self) -> None:
        """Grant the lease and begin to send keepalives."""
        await self._grant()
        self._keep_alive(self._refresh_or_register)

    def wake(self) -> None:
        self._num_wakes += 1
        super().wake()

    async def put(self, key: str, value: bytes) -> None:
        """Put under this lease. Raises LeaseLostError after ``revoke``."""
        async with self._lock:
            if self.is_given_back:
                raise LeaseLostError(f"lease {self.lease_id} was revoked")
            if not self.lease_id:
                raise ControlUnavailableError("the lease was lost and is not granted again yet")
            await self._bucket.put(key, value, self.lease_id)
            self._values[key] = value

    async def _end_at_server(self) -> None:
        # The lease first: all its keys then end at once for every watcher.
        await self._bucket.end_lease(self.lease_id)
        for key in self._values:
            await self._bucket.delete(key)
        self._values.clear()

    async def _refresh_or_register(self) -> None:
        if self.lease_id and not await self._refresh():
            await self._end()
        if not self.lease_id:
            await self._grant()
        if not self._is_registered:
            await self._put_again(lambda key, value: self._bucket.put(key, value, self.lease_id))
            self._is_registered = True

    async def _end(self) -> None:
        """The server no longer has the lease: run the callbacks, find out why, and prepare for a new lease."""
        self._tell_lost()
        is_revoked = await self._bucket.was_revoked(self.lease_id)
        self.lease_id = ""
        self._is_registered = False
        if is_revoked:
            keys = list(self._values)
            self._values.clear()
            self._tell_revoked()
            for key in keys:
                await self._bucket.delete(key)

    async def _refresh(self) -> bool:
        """Send a keepalive. False if the lease was ended or the server has lost it."""
        num_wakes = self._num_wakes
        if num_wakes > self._num_answered or not self._is_watched():
            if not await self._bucket.has_lease(self.lease_id):
                return False
            self._num_answered = num_wakes
        try:
            await self._send_keepalive(self.lease_id)
            return True
        except WrongSequenceError:
            pass
        if not await self._bucket.has_lease(self.lease_id):
            return False
        last = await self._bucket.last_keepalive(self.lease_id)
        if last is not None and last.is_end:
            # The keeper that expired the lease may have died before it deleted the key.
            await self._bucket.finish_expiry(self.lease_id)
            return False
        # Only we write these keepalives: the server has lost the last one, or stored one whose answer got lost.
        self._seq = 0 if last is None else last.seq
        await self._send_keepalive(self.lease_id)
        return True

    async def _grant(self) -> None:
        lease_id, num_wakes = uuid4().hex[:16], self._num_wakes
        sent_s = time.monotonic()
        self._seq = await self._bucket.grant_lease(lease_id, LeaseValue(self.ttl_s, self._holder))
        self.num_keepalives = 1
        self._num_answered = num_wakes
        self._confirmed(sent_s)
        self.lease_id = lease_id

    async def _send_keepalive(self, lease_id: str) -> None:
        sent_s = time.monotonic()
        self._seq = await self._bucket.refresh_lease(lease_id, self._seq)
        self.num_keepalives += 1
        self._confirmed(sent_s)
