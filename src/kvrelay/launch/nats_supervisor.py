"""Restarts the NATS server of ``serve`` when it ends, with growing delays and without a limit of attempts.

Requests continue without the NATS server, so a failure to start it is no reason to end the cluster.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Protocol

from kvrelay.core.clock import Clock
from kvrelay.errors import KvrelayError

BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0)


class Server(Protocol):
    """The part of ``NatsServerProcess`` that the supervisor uses."""

    @property
    def is_running(self) -> bool: ...

    def start(self) -> str: ...


class NatsSupervisor:
    """Restarts the server if it has ended. Call ``check`` regularly."""

    def __init__(self, server: Server, clock: Clock) -> None:
        self._server = server
        self._clock = clock
        self._num_failures = 0
        self._due_s = 0.0

    def __repr__(self) -> str:
        return f"NatsSupervisor(is_running={self._server.is_running}, failures={self._num_failures})"

    async def check(self) -> None:
        """Start the server if it has ended and another attempt is due."""
        if self._server.is_running or self._clock.now() < self._due_s:
            return
        if not self._num_failures:
            _say("the NATS server ended: starting it again; requests continue with the known workers")
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
