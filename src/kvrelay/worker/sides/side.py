"""The common part of both sides: a ledger that any thread may call, and what follows from each event.

    any thread ── handle(event) ──> ledger ──> actions ──> ``carry_out`` each, in order, under one lock

Carrying out an action only passes it on (to an inbox, a queue, the event loop), so the lock is held for microseconds.
The answer to an action comes back as a separate event, never within the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from kvrelay.handoff.base import Tick
from kvrelay.worker.sides.ports import SidePorts

E = TypeVar("E")
T = TypeVar("T")
E_contra = TypeVar("E_contra", contravariant=True)


class Ledger(Protocol[E_contra]):
    """A ledger of ``kvrelay.handoff``."""

    def handle(self, event: E_contra | Tick, now_s: float) -> list[Any]: ...

    def next_tick_s(self) -> float | None: ...


class Side(Generic[E]):
    """Subclasses say how an action is carried out."""

    ledger: Any
    """A ``Ledger[E]``."""
    ports: Any
    """Its own kind of ``SidePorts``."""

    def __init__(self, ledger: Ledger[E], ports: SidePorts) -> None:
        self.ledger, self.ports = ledger, ports

    def handle(self, event: E | Tick) -> None:
        """Pass an event to the ledger, from any thread, and carry out the resulting actions."""
        turns, ledger = self.ports.turns, self.ledger
        with turns.lock:
            actions = ledger.handle(event, turns.now())
            # Before the actions: an observer of an action's effect must also see its count.
            self.handled(event)
            for action in actions:
                self.carry_out(action)
            turns.plan_tick(self.next_tick_s)

    def read(self, view: Callable[[], T]) -> T:
        """Run ``view`` while no event is handled. From any thread; it must be short."""
        with self.ports.turns.lock:
            return view()

    def next_tick_s(self) -> float | None:
        """When the next Tick is due; None: not before another event. Under the lock."""
        due_s: float | None = self.ledger.next_tick_s()
        return due_s

    def handled(self, event: E | Tick) -> None:
        """Called under the lock, after an event and before its actions are carried out."""

    def carry_out(self, action: Any) -> None:
        """Pass an action on. Under the lock."""
        raise NotImplementedError
