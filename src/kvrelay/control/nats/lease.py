"""A lease in a NATS key-value bucket: a key that is written once, and keepalives in a separate stream.

It owns the keepalives, at a third of the time to live, and registering again. The lease is lost if no keepalive has
succeeded for a whole time to live, or if its key is gone. It was revoked if an operator deleted that key. A holder that
watches discovery is told of the deletion; a holder that does not watch checks before each keepalive.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from uuid import uuid4

from kvrelay.control.held_lease import HeldLease
from kvrelay.control.nats.bucket import Bucket, LeaseValue
from kvrelay.control.nats.jetstream import WrongSequenceError
from kvrelay.core.tasks import end_tasks
from kvrelay.errors import ControlUnavailableError, LeaseLostError

_log = logging.getLogger(__name__)


class NatsLease(HeldLease):
    """A lease of this process, with the keys that hang on it."""

    def __init__(self, bucket: Bucket, ttl_s: float, holder: str, is_watched: Callable[[], bool]) -> None:
        """``is_watched`` says whether ``wake`` is called at once when the lease's key is deleted."""
        super().__init__(ttl_s)
        self._bucket = bucket
        self._is_watched = is_watched
        self._is_suspect = False
        self._holder = holder
        self._seq = 0
        self.num_keepalives = 0
        """Sent for this lease."""
        self._values: dict[str, bytes] = {}
        self._is_registered = True
        self._is_stopped = False
        self._timer: asyncio.TimerHandle | None = None
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return (
            f"NatsLease({self._lease_id}, ttl_s={self._ttl_s:g}, keys={len(self._values)}, "
            f"keepalives={self.num_keepalives})"
        )

    async def start(self) -> None:
        """Grant the lease and begin to send keepalives."""
        await self._grant()
        self._task = asyncio.get_running_loop().create_task(self._keep_alive(), name=f"lease {self._lease_id}")

    def wake(self) -> None:
        """Send a keepalive now: the lease may be lost."""
        self._is_suspect = True
        self._wake.set()

    async def put(self, key: str, value: bytes) -> None:
        """Put under this lease. Raises LeaseLostError after ``revoke``."""
        async with self._lock:
            if self.is_given_back:
                raise LeaseLostError(f"lease {self._lease_id} was revoked")
            if not self._lease_id:
                raise ControlUnavailableError("the lease was lost and is not granted again yet")
            await self._bucket.put(key, value, self._lease_id)
            self._values[key] = value

    def detach(self, key: str) -> None:
        """The key no longer hangs on this lease."""
        self._values.pop(key, None)

    async def revoke(self) -> None:
        if self.is_given_back:
            return
        self._give_back()
        await self.stop()
        # The lease first: all its keys then end at once for every watcher.
        await self._bucket.end_lease(self._lease_id)
        for key in self._values:
            await self._bucket.delete(key)
        self._values.clear()

    async def stop(self) -> None:
        """End the keepalives."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            await end_tasks([self._task])

    async def _keep_alive(self) -> None:
        delay_s = self._ttl_s / 3
        # Cancellation alone is not enough: asyncio.wait_for in 3.11 swallows one that arrives with the result.
        while not self._is_stopped:
            try:
                async with asyncio.timeout(delay_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                async with self._lock:
                    await self._refresh_or_register()
                delay_s = self._ttl_s / 3
            except ControlUnavailableError as exc:
                _log.debug("lease %s not refreshed: %s", self._lease_id, exc)
                delay_s = min(self._ttl_s / 6, 1.0)

    async def _refresh_or_register(self) -> None:
        if self._lease_id and not await self._refresh():
            await self._end()
        if not self._lease_id:
            await self._grant()
        if not self._is_registered:
            for key, value in list(self._values.items()):
                await self._bucket.put(key, value, self._lease_id)
            self._is_registered = True

    async def _end(self) -> None:
        """The server no longer has the lease: run the callbacks, find out why, and prepare for a new lease."""
        self._tell_lost()
        is_revoked = await self._bucket.was_revoked(self._lease_id)
        self._lease_id = ""
        self._is_registered = False
        if is_revoked:
            keys = list(self._values)
            self._values.clear()
            self._tell_revoked()
            for key in keys:
                await self._bucket.delete(key)

    async def _refresh(self) -> bool:
        """Send a keepalive. False if the lease was ended or the server has lost it."""
        if self._is_suspect or not self._is_watched():
            if not await self._bucket.has_lease(self._lease_id):
                return False
            self._is_suspect = False
        try:
            await self._send_keepalive(self._lease_id)
            return True
        except WrongSequenceError:
            pass
        if not await self._bucket.has_lease(self._lease_id):
            return False
        last = await self._bucket.last_keepalive(self._lease_id)
        if last is not None and last.is_end:
            # The keeper that expired the lease may have died before it deleted the key.
            await self._bucket.finish_expiry(self._lease_id)
            return False
        # Only we write these keepalives: the server has lost the last one, or stored one whose answer got lost.
        self._seq = 0 if last is None else last.seq
        await self._send_keepalive(self._lease_id)
        return True

    async def _grant(self) -> None:
        lease_id = uuid4().hex[:16]
        sent_s = time.monotonic()
        self._seq = await self._bucket.grant_lease(lease_id, LeaseValue(self._ttl_s, self._holder))
        self.num_keepalives = 1
        self._is_suspect = False
        self._refreshed(sent_s)
        self._lease_id = lease_id

    async def _send_keepalive(self, lease_id: str) -> None:
        sent_s = time.monotonic()
        self._seq = await self._bucket.refresh_lease(lease_id, self._seq)
        self.num_keepalives += 1
        self._refreshed(sent_s)

    def _refreshed(self, sent_s: float) -> None:
        """A refresh counts from the time it was sent. Others time it from its arrival, which is later."""
        left_s = sent_s + self._ttl_s - time.monotonic()
        if left_s <= 0:
            return  # answered too late to count
        self._confirmed(sent_s + self._ttl_s)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(left_s, self._tell_lost)
