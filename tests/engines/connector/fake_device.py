"""A device whose streams run late, and in any order that their events permit."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

import torch

from kvrelay.engines.connector.device import Device, Event, HostDevice


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.is_over = False

    def is_done(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        """The host blocks: meanwhile the device goes on."""
        self._device.num_host_waits += 1
        while not self.is_over:
            self._device.run_one()


class FakeStream:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._work: deque[Callable[[], object] | FakeEvent] = deque()
        """Functions to run, and events to wait for."""

    def run(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def record(self) -> Event:
        event = FakeEvent(self._device)
        self._work.append(lambda: setattr(event, "is_over", True))
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        self._work.append(event)

    def can_run(self) -> bool:
        while self._work and isinstance(self._work[0], FakeEvent) and self._work[0].is_over:
            self._work.popleft()
        return bool(self._work) and not isinstance(self._work[0], FakeEvent)

    def run_one(self) -> None:
        work = self._work.popleft()
        assert not isinstance(work, FakeEvent)
        work()


class FakeDevice:
    """``run_one`` runs the next work of any stream. ``order`` decides which one."""

    is_host = False

    def __init__(self, order: random.Random) -> None:
        self._order = order
        self.compute, self.copies = FakeStream(self), FakeStream(self)
        self.num_host_waits = 0
        self.pinned: list[torch.Tensor] = []

    def pin(self, pool: torch.Tensor) -> None:
        self.pinned.append(pool)

    def index(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64)

    def run_one(self) -> bool:
        """False: nothing can run."""
        able = [stream for stream in (self.compute, self.copies) if stream.can_run()]
        if able:
            self._order.choice(able).run_one()
        return bool(able)

    def run_some(self) -> None:
        for _ in range(self._order.choice((0, 0, 1, 2, 5))):
            self.run_one()

    def finish(self) -> None:
        while self.run_one():
            pass


class FakeWatch:
    """A ``Watch`` without a thread: ``look`` calls what is due, in the order of the events."""

    def __init__(self) -> None:
        self._events: deque[tuple[Event, Callable[[], None]]] = deque()

    def when_done(self, event: Event, then: Callable[[], None]) -> None:
        self._events.append((event, then))

    def look(self) -> None:
        while self._events and self._events[0][0].is_done():
            self._events.popleft()[1]()


DEVICES: dict[str, Callable[[], Device]] = {"host": HostDevice, "late": lambda: FakeDevice(random.Random(0))}
"""Both must move the same bytes: in host memory without a buffer between pool and KV, elsewhere with one."""
