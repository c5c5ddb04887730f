"""The ticks of a hand-off ledger: when it asks for them, and at no cost while it waits for nothing."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

from tests.patience import PATIENCE_S

from kvrelay.worker.driver import LedgerDriver


@dataclass
class Clock:
    now_s: float = 0.0

    def now(self) -> float:
        return self.now_s


@dataclass
class Alarm:
    """A ledger that wants a tick at the time of the last event; ``tick`` is the event that serves it."""

    due_s: float | None = None
    num_asked: int = 0
    ticked: asyncio.Event = field(default_factory=asyncio.Event)

    def handle(self, event: float | str, now_s: float) -> list[object]:
        if isinstance(event, float):
            self.due_s = event
        else:
            self.due_s = None
            self.ticked.set()
        return []

    def next_tick_s(self) -> float | None:
        self.num_asked += 1
        return self.due_s


async def _turns() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_an_idle_ledger_is_not_asked_and_an_event_of_any_thread_wakes_the_ticks() -> None:
    ledger, clock = Alarm(), Clock()
    driver: LedgerDriver[float | str] = LedgerDriver(ledger, "tick", clock, {})
    ticking = asyncio.create_task(driver.tick_forever())
    try:
        for _ in range(2):
            await _turns()
            asked = ledger.num_asked
            await asyncio.sleep(0.05)
            assert ledger.num_asked == asked
            thread = threading.Thread(target=driver.handle, args=(clock.now_s + 5.0,))
            thread.start()
            thread.join()
            await _turns()
            assert not ledger.ticked.is_set(), "it is not yet time"
            clock.now_s += 5.0
            await asyncio.wait_for(ledger.ticked.wait(), PATIENCE_S)
            ledger.ticked.clear()
            # The ticks notice that the ledger waits for nothing more.
            await asyncio.sleep(0.05)
    finally:
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
