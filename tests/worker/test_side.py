"""What both sides share, with a ledger that does as it is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvrelay.core.clock import ManualClock
from kvrelay.worker.sides.side import Side
from kvrelay.worker.turns import LoopTurns


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

    class Recording(Side[str]):
        def handled(self, event: Any) -> None:
            seen.append(("counted", event, self.ledger.num_events))

        def carry_out(self, action: Any) -> None:
            seen.append(action)

    side = Recording(Ledger(), SimpleNamespace(turns=LoopTurns(ManualClock())))
    side.handle("ab")
    side.handle("c")
    assert seen == [("counted", "ab", 1), "a", "b", ("counted", "c", 2), "c"]
