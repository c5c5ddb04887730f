"""When refused clients come back: one after the other, so that nearly all of them are taken at the second try."""

from __future__ import annotations

import heapq
import math

import pytest

from kvrelay.core.clock import ManualClock
from kvrelay.core.completion_rate import CompletionRate
from kvrelay.core.return_times import MARGIN, MAX_RETURN_S, ReturnTimes


def test_each_client_is_told_a_later_time_than_the_one_before() -> None:
    clock = ManualClock()
    times = ReturnTimes(clock)
    assert [times.next_s(1.0, 0.5) for _ in range(4)] == pytest.approx([1.0 + MARGIN * 0.5 * n for n in range(4)])
    clock.advance(100.0)
    assert times.next_s(1.0, 0.5) == 1.0, "their places have passed"


def test_impossible_values_and_the_bound() -> None:
    times = ReturnTimes(ManualClock())
    for spacing_s in (0.0, -1.0, math.nan, math.inf):
        assert times.next_s(2.0, spacing_s) == pytest.approx(2.0)
    for room_in_s in (math.nan, math.inf, -1.0):
        assert ReturnTimes(ManualClock()).next_s(room_in_s, 0.1) == 1.0
    told = [times.next_s(1.0, 50.0) for _ in range(30)]
    assert max(told) == MAX_RETURN_S
    assert told == sorted(told)


class Server:
    """Ends ``per_s`` requests a second, and lets ``limit`` of them wait."""

    def __init__(self, per_s: float, limit: int) -> None:
        self.clock = ManualClock()
        self.rate = CompletionRate(self.clock)
        self.returns = ReturnTimes(self.clock)
        self.num_waiting = 0
        self._limit = limit
        self._every_s = 1.0 / per_s
        self._next_end_s = self._every_s

    def pass_until(self, at_s: float) -> None:
        while self._next_end_s <= at_s:
            self.clock.advance(self._next_end_s - self.clock.now())
            if self.num_waiting:
                self.num_waiting -= 1
                self.rate.add(1)
            self._next_end_s += self._every_s
        self.clock.advance(max(at_s - self.clock.now(), 0.0))

    def ask(self) -> float | None:
        """None if taken, else the seconds to wait, as HTTP's header has them."""
        if self.num_waiting < self._limit:
            self.num_waiting += 1
            return None
        return math.ceil(self.returns.next_s(self.rate.retry_after_s(1), self.rate.spacing_s(1)))


@pytest.mark.parametrize(("per_s", "limit", "num_clients"), [(20.0, 64, 600), (5.0, 16, 300), (100.0, 256, 2666)])
def test_nine_in_ten_clients_of_a_burst_are_taken_at_the_second_try(per_s: float, limit: int, num_clients: int) -> None:
    server = Server(per_s, limit)
    for _ in range(int(10 * per_s)):
        server.ask()
        server.pass_until(server.clock.now() + 1.0 / per_s)
    due = [(server.clock.now() + number * 1e-3, number, 1) for number in range(num_clients)]
    tries: dict[int, int] = {}
    while due:
        at_s, number, attempt = heapq.heappop(due)
        server.pass_until(at_s)
        wait_s = server.ask()
        if wait_s is None:
            tries[number] = attempt
        else:
            heapq.heappush(due, (server.clock.now() + wait_s, number, attempt + 1))
    refused = [attempt for attempt in tries.values() if attempt > 1]
    assert len(tries) == num_clients
    assert len(refused) > num_clients / 2
    assert sum(attempt == 2 for attempt in refused) >= 0.9 * len(refused)
    assert server.clock.now() < 10 + 2 * num_clients / per_s, "nobody waits much longer than the work takes"
