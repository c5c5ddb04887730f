"""The common part of both drivers of hand-offs: a ledger that any thread may call, its ticks, a way onto the event
loop.

    any thread ── handle(event) ──> ledger ──> actions, carried out at once, in order, under one lock

Carrying out an action only passes it on (to an inbox, a queue, the event loop), so the lock is held for microseconds.
The answer to an action comes back as a separate event, never within the call.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from kvrelay.core.clock import Clock
from kvrelay.handoff.base import Tick
from kvrelay.transfer.thread import TransferThread

_log = logging.getLogger(__name__)

TICK_INTERVAL_S = 0.02
"""Precision of the ledgers' timers while they have something to wait for."""

E = TypeVar("E")
T = TypeVar("T")
E_contra = TypeVar("E_contra", contravariant=True)


class Ledger(Protocol[E_contra]):
    """A ledger of ``kvrelay.handoff``."""

    def handle(self, event: E_contra | Tick, now_s: float) -> list[Any]: ...

    def next_tick_s(self) -> float | None: ...


class PeersInMemory:
    """Keeps the transfer thread polling while peers read or write our memory: they may depend on it."""

    def __init__(self, transfer: TransferThread) -> None:
        self._transfer = transfer
        self._num_grants = 0

    def may_use(self, num_grants: int) -> None:
        """So many grants are out now."""
        for _ in range(self._num_grants, num_grants):
            self._transfer.open_handoff()
        for _ in range(num_grants, self._num_grants):
            self._transfer.close_handoff()
        self._num_grants = num_grants


class LedgerDriver(Generic[E]):
    """``carriers``: the function that carries out an action, by the action's type."""

    def __init__(self, ledger: Ledger[E], clock: Clock, carriers: dict[type, Callable[[Any], None]]) -> None:
        self._ledger = ledger
        self._clock = clock
        self._carriers = carriers
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._is_idle = False
        """Whether the ticks wait for ``_wake``. Guarded by the lock."""
        self._loop_thread = threading.get_ident()

    def handle(self, event: E | Tick) -> None:
        """Pass an event to the ledger, from any thread, and carry out the resulting actions."""
        with self._lock:
            actions = self._ledger.handle(event, self._clock.now())
            # Before the actions: an observer of an action's effect must also see its count.
            self.handled(event)
            for action in actions:
                self._carriers[type(action)](action)
            if self._is_idle and self._ledger.next_tick_s() is not None:
                self._is_idle = False
                self.on_loop(self._wake.set)

    def read(self, view: Callable[[], T]) -> T:
        """Run ``view`` while no event is handled. From any thread; it must be short."""
        with self._lock:
            return view()

    def handled(self, event: E | Tick) -> None:
        """For subclasses: called under the lock, after an event and before its actions are carried out."""

    async def tick_forever(self) -> None:
        """Send the ledger ticks when one is due. Costs nothing while the ledger waits for nothing."""
        while True:
            with self._lock:
                due_s = self._ledger.next_tick_s()
                self._is_idle = due_s is None
            if due_s is None:
                await self._wake.wait()
                self._wake.clear()
                continue
            if due_s <= self._clock.now():
                self.handle(Tick())
            await asyncio.sleep(TICK_INTERVAL_S)

    def on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run it on the event loop: at once if this is the loop's thread. Dropped if the loop is closed."""
        if threading.get_ident() == self._loop_thread:
            function(*arguments)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def soon(self, event: E) -> None:
        """Call ``handle`` on the event loop, from within an action."""
        self._loop.call_soon(self.handle, event)
