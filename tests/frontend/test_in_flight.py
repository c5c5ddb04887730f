"""The bound on what a frontend has in flight."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from kvrelay.core.clock import ManualClock
from kvrelay.errors import InvalidInputError, OverloadedError
from kvrelay.frontend.in_flight import InFlight
from kvrelay.frontend.metrics import FrontendMetrics


def retry_after_s(in_flight: InFlight, num_sequences: int) -> float:
    with pytest.raises(OverloadedError, match="4 requests are in flight") as caught, in_flight.admitted(num_sequences):
        pass
    return caught.value.retry_after_s


def test_what_is_too_much_is_told_when_there_is_room() -> None:
    """Four may run; one ends every five seconds, and another one comes."""
    clock, metrics = ManualClock(), FrontendMetrics()
    in_flight = InFlight(4, metrics, clock)
    running: list[ExitStack] = []

    def begin() -> None:
        running.append(ExitStack())
        running[-1].enter_context(in_flight.admitted(1))

    for _ in range(4):
        begin()
    assert retry_after_s(in_flight, 1) == 1.0, "nothing has ended yet: nothing is known"
    for _ in range(6):
        clock.advance(5.0)
        running.pop(0).close()
        begin()
    assert retry_after_s(in_flight, 1) == pytest.approx(5.0, rel=0.2)
    assert retry_after_s(in_flight, 3) == pytest.approx(15.0, rel=0.2)
    for stack in running:
        stack.close()
    assert metrics.num_in_flight == 0
    clock.advance(10.0)
    with in_flight.admitted(4):
        assert retry_after_s(in_flight, 1) == 1.0, "what was before the frontend was idle says nothing"


def test_more_than_there_may_ever_be() -> None:
    in_flight = InFlight(4, FrontendMetrics(), ManualClock())
    with pytest.raises(InvalidInputError, match="is 5, above 4"), in_flight.admitted(5):
        pass
