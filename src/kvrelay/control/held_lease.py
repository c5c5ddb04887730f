"""The holder's side of a lease, shared by all implementations: what this process knows of it, and the callbacks.

It owns the callbacks, the time until which others cannot have counted this process as dead, and the task that refreshes
the lease. It does not know the server: the subclasses refresh the lease and report the outcome here.

    _confirmed ──> _tell_lost ──> _confirmed ...        the lease expired: its keys are put again
                        └──> _tell_revoked              an operator revoked it: its keys are not put again
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence

from kvrelay.control.base import KEEPALIVES_PER_LEASE
from kvrelay.core.clock import next_beat_s
from kvrelay.core.tasks import end_tasks
from kvrelay.errors import KvrelayError

_log = logging.getLogger(__name__)

MAX_RETRY_S = 1.0


class HeldLease(ABC):
    """Contract: ``control.base.Lease``. The subclass implements ``_end_at_server`` and what ``_keep_alive`` runs."""

    def __init__(self, ttl_s: float) -> None:
        self.lease_id = ""
        self.ttl_s = ttl_s
        self.alive_until_s = -math.inf
        self._on_lost: list[Callable[[], None]] = []
        self._on_revoked: list[Callable[[], None]] = []
        self._is_lost = False
        self._values: dict[str, bytes] = {}
        """The keys that hang on this lease."""
        self._lock = asyncio.Lock()
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.is_given_back = False
        """Whether ``revoke`` was called."""

    def on_lost(self, callback: Callable[[], None]) -> None:
        self._on_lost.append(callback)

    def on_revoked(self, callback: Callable[[], None]) -> None:
        self._on_revoked.append(callback)

    def forget(self, key: str) -> None:
        """The key no longer hangs on this lease."""
        self._values.pop(key, None)

    def wake(self) -> None:
        """Send a keepalive now: the server or this lease may have a problem."""
        self._woken.set()

    async def stop(self) -> None:
        """End the keepalives; the lease expires by itself. Idempotent."""
        task, self._task = self._task, None
        if self._timer is not None:
            self._timer.cancel()
        if task is not None:
            await end_tasks([task])

    async def revoke(self) -> None:
        """This process ends the lease itself, so no callback runs."""
        if not self.is_given_back:
            self.is_given_back, self.alive_until_s = True, -math.inf
            await self.stop()
            await self._end_at_server()

    async def _put_again(self, put: Callable[[str, bytes], Awaitable[object]]) -> None:
        """All keys under a new lease, without those that are forgotten meanwhile."""
        for key in list(self._values):
            if (value := self._values.get(key)) is not None:
                await put(key, value)

    @abstractmethod
    async def _end_at_server(self) -> None: ...

    def _keep_alive(self, refresh: Callable[[], Awaitable[None]]) -> None:
        """From now on ``refresh`` the lease on its beats, and sooner after a failure."""
        self._task = asyncio.get_running_loop().create_task(self._run(refresh), name=f"lease {self.lease_id}")

    async def _run(self, refresh: Callable[[], Awaitable[None]]) -> None:
        loop, is_answered = asyncio.get_running_loop(), True
        # Cancellation alone is not enough: asyncio.wait_for in 3.11 swallows one that arrives with the result.
        while asyncio.current_task() is self._task:
            due_s = loop.time() + min(self.ttl_s / 6, MAX_RETRY_S)
            if is_answered:
                due_s = next_beat_s(loop.time(), self.ttl_s / KEEPALIVES_PER_LEASE)
            try:
                async with asyncio.timeout_at(due_s):
                    await self._woken.wait()
            except TimeoutError:
                pass
            self._woken.clear()
            try:
                async with self._lock:
                    await refresh()
                is_answered = True
            except KvrelayError as exc:
                if is_answered:
                    _log.warning("refreshing lease %s failed (%s); retrying", self.lease_id, exc)
                is_answered = False
            except Exception:  # noqa: BLE001 - without keepalives this process is dead to all others
                _log.exception("refreshing lease %s failed; retrying", self.lease_id)
                is_answered = False

    def _confirmed(self, sent_s: float) -> None:
        """The server has granted or refreshed the lease. A refresh counts from the time it was sent; others time it
        from its arrival, which is later."""
        if sent_s + self.ttl_s <= time.monotonic():
            return  # answered too late to count
        self.alive_until_s = sent_s + self.ttl_s
        self._is_lost = False
        self._time_out()

    def _time_out(self) -> None:
        """The lease is lost once it was not refreshed for its time to live, whatever the server says later. The timer
        is put off with each refresh, so it wakes no process whose lease is alive."""
        if self._timer is not None:
            self._timer.cancel()
        left_s = self.alive_until_s - time.monotonic()
        if left_s > 0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._time_out)
            return
        self._timer = None
        if not self.is_given_back:
            self._tell_lost()

    def _tell_lost(self) -> None:
        """Others may count this process as gone: the server says so, or the server was silent for too long."""
        self.alive_until_s = -math.inf
        if not self._is_lost:
            self._is_lost = True
            _log.warning("lease %s is lost; registering again under a new one", self.lease_id)
            _run(self._on_lost)

    def _tell_revoked(self) -> None:
        """The lease is lost because an operator wants this process to leave."""
        self._tell_lost()
        _log.warning("the lease was revoked; its keys are not registered again")
        _run(self._on_revoked)


def forget_elsewhere(key: str, leases: Iterable[HeldLease], holder: object = None) -> None:
    """Detach the key from all of these leases but ``holder``, so that no other one puts it again."""
    for lease in leases:
        if lease is not holder:
            lease.forget(key)


def _run(callbacks: Sequence[Callable[[], None]]) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception:  # noqa: BLE001 - another room's fault must not end the lease
            _log.exception("a callback of a lease failed")
