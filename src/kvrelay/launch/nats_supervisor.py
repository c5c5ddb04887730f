"""Restarts the NATS server of ``serve`` when it ends, with growing delays and without a limit of attempts.

It also restarts a server that can no longer store, once there is room again. Requests continue without the NATS server,
so a failure to start it is no reason to end the cluster.
"""

from __future__ import annotations

import asyncio
import sys

from kvrelay.control.nats_process import NatsServerProcess
from kvrelay.core.clock import Clock
from kvrelay.errors import KvrelayError

BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0)
STORAGE_INTERVAL_S = 5.0
STORAGE_BACKOFF_S = (30.0, 60.0, 120.0, 300.0)
"""After a restart for its storage, how long the server is left alone: a restart may not help."""


class NatsSupervisor:
    """Restarts the server if it has ended or stores nothing. Call ``check`` regularly."""

    def __init__(self, server: NatsServerProcess, clock: Clock) -> None:
        self._server = server
        self._clock = clock
        self._num_failures = 0
        self._due_s = 0.0
        self._storage_due_s = 0.0
        self._num_storage_restarts = 0
        """Since the storage was last seen healthy."""
        self._waits_for_room = False

    def __repr__(self) -> str:
        return f"NatsSupervisor(is_running={self._server.is_running}, failures={self._num_failures})"

    async def check(self) -> None:
        """Start the server if it has ended and another attempt is due; restart it if its storage has failed."""
        if self._server.is_running:
            if self._clock.now() >= self._storage_due_s:
                await self._check_storage()
            return
        if self._clock.now() < self._due_s:
            return
        if not self._num_failures:
            _say("the NATS server ended: starting it again; requests continue with the known workers")
        await self._start()

    async def _check_storage(self) -> None:
        self._storage_due_s = self._clock.now() + STORAGE_INTERVAL_S
        problem = await asyncio.to_thread(self._server.storage_problem)
        if problem is None:
            self._num_storage_restarts, self._waits_for_room = 0, False
            return
        no_room = await asyncio.to_thread(self._server.room_problem)
        if no_room is not None:
            if not self._waits_for_room:
                _say(
                    f"the NATS server stores nothing ({problem}), and there is no room to restart it: {no_room}; "
                    "free space there; requests continue with the known workers"
                )
            self._waits_for_room = True
            return
        _say(f"the NATS server stores nothing ({problem}): restarting it; requests continue with the known workers")
        rest_s = STORAGE_BACKOFF_S[min(self._num_storage_restarts, len(STORAGE_BACKOFF_S) - 1)]
        self._storage_due_s = self._clock.now() + rest_s
        self._num_storage_restarts += 1
        self._waits_for_room = False
        await asyncio.to_thread(self._server.end)
        await self._start()

    async def _start(self) -> None:
        try:
            await asyncio.to_thread(self._server.start)
        except KvrelayError as exc:
            self._num_failures += 1
            delay_s = BACKOFF_S[min(self._num_failures, len(BACKOFF_S) - 1)]
            self._due_s = self._clock.now() + delay_s
            _say(f"the NATS server cannot be started: {exc.message}; next attempt in {delay_s:g} s")
            return
        if self._num_failures:
            _say(f"the NATS server runs again, after {self._num_failures + 1} attempts")
        self._num_failures, self._due_s = 0, 0.0


def _say(text: str) -> None:
    print(f"kvrelay: {text}", file=sys.stderr, flush=True)
