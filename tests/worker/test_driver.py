"""What both drivers of hand-offs share, with a ledger that does as it is told."""

from __future__ import annotations

from kvrelay.core.clock import ManualClock
from kvrelay.worker.driver import LedgerDriver


class Ledger:
    """Each event leads to two actions, its own letters."""

    def __init__(self) -> None:
        self.num_events = 0

    def handle(self, event: str, now_s: float) -> list[str]:
        self.num_events += 1
        return list(event)

    def next_tick_s(self) -> float | None:
        return None


async def test_an_event_is_counted_before_its_actions_are_seen() -> None:
    """Who waits for an effect finds it in the counts."""
    seen: list[object] = []

    class Driver(LedgerDriver[str]):
        def handled(self, event: str) -> None:
            seen.append(("counted", event, ledger.num_events))

    ledger = Ledger()
    driver = Driver(ledger, ManualClock(), {str: seen.append})
    driver.handle("ab")
    driver.handle("c")
    assert seen == [("counted", "ab", 1), "a", "b", ("counted", "c", 2), "c"]
