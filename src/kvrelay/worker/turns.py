"""The turns of a side in a real worker (``sides.ports.Turns``): a lock for its threads, its ticks, a way onto the event
loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.handoff.base import Tick
from kvrelay.transfer.thread import TransferThread
from kvrelay.worker.sides.side import Side

TICK_INTERVAL_S = 0.02
"""Precision of the ledgers' timers while they have something to wait for."""


class PeersInMemory:
    """Keeps the transfer thread polling while peers read or write our memory: they may depend on it. They never do if
    the engines move the KV (``moves_kv``)."""

    def __init__(self, transfer: TransferThread, *, moves_kv: bool) -> None:
        self._transfer = transfer
        self._moves_kv = moves_kv
        self._num_handoffs = 0

    def may_use(self, num_handoffs: int) -> None:
        """Peers may use it for so many hand-offs now."""
        if self._moves_kv:
            return
        for _ in range(self._num_handoffs, num_handoffs):
            self._transfer.open_handoff()
        for _ in range(num_handoffs, self._num_handoffs):
            self._transfer.close_handoff()
        self._num_handoffs = num_handoffs


class LoopTurns:
    """Made on the event loop."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.lock = threading.Lock()
        self._clock = clock or MonotonicClock()
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._is_idle = False
        """Whether the ticks wait for ``_wake``. Guarded by the lock."""
        self._loop_thread = threading.get_ident()

    def now(self) -> float:
        return self._clock.now()

    def plan_tick(self, due_s: Callable[[], float | None]) -> None:
        if self._is_idle and due_s() is not None:
            self._is_idle = False
            self.on_loop(self._wake.set)

    async def tick_forever(self, side: Side[Any]) -> None:
        """Send ``side`` ticks when one is due. Costs nothing while its ledger waits for nothing."""
        while True:
            with self.lock:
                due_s = side.next_tick_s()
                self._is_idle = due_s is None
            if due_s is None:
                await self._wake.wait()
                self._wake.clear()
                continue
            if due_s <= self._clock.now():
                side.handle(Tick())
            await asyncio.sleep(TICK_INTERVAL_S)

    def on_loop(self, function: Callable[..., object], *arguments: object) -> None:
        """At once if this is the loop's thread. Dropped if the loop is closed."""
        if threading.get_ident() == self._loop_thread:
            function(*arguments)
        else:
            self.soon(function, *arguments)

    def soon(self, function: Callable[..., object], *arguments: object) -> None:
        """From within an action. Dropped if the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)
