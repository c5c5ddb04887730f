"""The order of waiting requests: short first, keys in turn, priorities that age, and no request waits for ever."""

from __future__ import annotations

import random

import pytest
from tests.draws import seeds

from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import RequestStatus
from kvrelay.engine.admission.fair import OVERTAKE, FairQueue, Shares
from kvrelay.engine.request import Request


class Line:
    """A queue whose requests are served one by one, with a number of arrival and a time."""

    def __init__(self, ageing_s: float = 10.0) -> None:
        self.shares = Shares()
        self.queue = FairQueue(ageing_s, self.shares)
        self.now_s = 0.0
        self._num_arrived = 0

    def add(self, size: int, *, priority: int = 0, tenant: str = "", begun: bool = False) -> Request:
        output = (1,) if begun else ()
        made = Request("r", [1], SamplingParams(), output_token_ids=output, priority=priority, tenant=tenant)
        self._num_arrived += 1
        made.arrival = self._num_arrived
        made.num_queued_tokens = size
        made.times.append((RequestStatus.WAITING, self.now_s))
        self.queue.push(made)
        return made

    def first(self) -> Request:
        return self.queue.candidates(self.now_s, 1)[0].request

    def serve(self) -> Request:
        found = self.first()
        self.queue.remove(found, is_admitted=True)
        return found


def test_short_ones_come_first_and_equal_ones_in_order_of_arrival() -> None:
    line = Line()
    requests = [line.add(size) for size in (800, 30, 800, 5)]
    assert [line.serve() for _ in range(4)] == [requests[index] for index in (3, 1, 0, 2)]
    assert len(line.queue) == 0


def test_one_keys_candidates_are_its_own_whoever_is_served_first() -> None:
    line = Line()
    line.add(1, tenant="a")
    own = [line.add(size, tenant="b") for size in (9, 2)]
    line.shares.charge("b", 100)
    assert line.first().tenant == "a"
    assert [found.request for found in line.queue.candidates(0.0, 10, "b")] == own[::-1]


def test_a_stream_that_stands_still_comes_before_new_ones() -> None:
    line = Line()
    line.add(1)
    begun = line.add(500, begun=True)
    assert line.first() is begun


def test_better_priorities_come_first_until_the_others_have_aged() -> None:
    line = Line(ageing_s=10)
    waiting = line.add(5)
    line.now_s = 9.9
    urgent = line.add(500, priority=-1)
    assert line.first() is urgent
    line.now_s = 10.0
    assert line.first() is waiting, "it has waited as long as a priority is worth"
    line.queue.remove(waiting)
    assert line.first() is urgent


def test_only_the_aged_request_overtakes_a_better_priority() -> None:
    line = Line(ageing_s=10)
    aged = line.add(5)
    line.now_s = 10.0
    line.add(3)
    line.add(4)
    urgent = line.add(500, priority=-1)
    assert [line.serve(), line.serve()] == [aged, urgent]


def test_without_ageing_priorities_are_strict() -> None:
    line = Line(ageing_s=0)
    line.add(1)
    line.now_s = 1e6
    urgent = line.add(500, priority=-1)
    assert line.first() is urgent


def test_keys_share_in_tokens_whatever_they_send() -> None:
    line, served = Line(), {"a": 0, "b": 0}
    for _ in range(400):
        for tenant, size in (("a", 100), ("b", 700)):
            if sum(request.tenant == tenant for request in line.queue.members()) < 5:
                line.add(size, tenant=tenant)
        found = line.serve()
        served[found.tenant] += found.num_queued_tokens
        assert abs(served["a"] - served["b"]) <= 700
    assert served["a"] == pytest.approx(served["b"], rel=0.1)


def test_no_priority_takes_the_turn_of_another_key() -> None:
    line = Line(ageing_s=0)
    for _ in range(50):
        line.add(5, tenant="greedy", priority=-(2**30))
    modest = [line.add(5, tenant="modest", priority=9) for _ in range(5)]
    own = line.add(5, tenant="modest")
    first = [line.serve() for _ in range(12)]
    assert [request.tenant for request in first] == ["greedy", "modest"] * 6
    assert [request for request in first if request.tenant == "modest"] == [own, *modest], "own priorities count"


def test_a_stream_of_another_key_that_stands_still_waits_for_its_turn() -> None:
    line = Line()
    for _ in range(3):
        line.add(5, tenant="a", begun=True)
    line.add(5, tenant="b")
    assert [line.serve().tenant for _ in range(4)] == ["a", "b", "a", "a"]


def test_a_key_pays_for_long_answers() -> None:
    line = Line()
    for _ in range(5):
        line.add(10, tenant="talker")
        line.add(10, tenant="other")
    assert line.serve().tenant == "talker"
    line.shares.charge("talker", 25)
    assert [line.serve().tenant for _ in range(5)] == ["other"] * 4 + ["talker"]


def test_a_key_that_asks_one_by_one_pays_as_well() -> None:
    """Its line is empty each time that it asks again. What it has been served must not be forgotten."""
    line, served = Line(), {"a": 0, "b": 0}
    for _ in range(60):
        line.add(10, tenant="a")
    line.add(100, tenant="b")
    for _ in range(50):
        found = line.serve()
        served[found.tenant] += found.num_queued_tokens
        if found.tenant == "b":
            line.add(100, tenant="b")
    assert abs(served["a"] - served["b"]) <= 100


def test_without_competition_nothing_is_owed() -> None:
    line = Line()
    line.add(5000, tenant="a")
    line.serve()
    line.shares.charge("a", 1000)
    line.add(5, tenant="a")
    line.add(5, tenant="b")
    assert [line.serve().tenant for _ in range(2)] == ["a", "b"]


def test_a_key_that_comes_late_neither_waits_for_the_others_nor_catches_up() -> None:
    line = Line()
    for _ in range(50):
        line.add(1000, tenant="flood")
    for _ in range(10):
        line.serve()
    chat = line.add(30, tenant="chat")
    assert chat in {line.serve(), line.serve()}
    late = [line.add(1000, tenant="late") for _ in range(20)]
    first = [line.serve() for _ in range(10)]
    assert 4 <= sum(request in late for request in first) <= 6


def test_short_ones_overtake_a_long_one_by_a_multiple_of_its_size_only() -> None:
    line = Line()
    long, work = line.add(1000), 0
    while True:
        line.add(50)
        found = line.serve()
        if found is long:
            break
        work += found.num_queued_tokens
    assert work == OVERTAKE * 1000


@pytest.mark.parametrize("seed", seeds(3, 20))
def test_no_request_waits_for_ever(seed: int) -> None:
    """Under an endless overload of everything that would come before it, a request is served within its bound."""
    rng, line = random.Random(seed), Line(ageing_s=5.0)
    for _ in range(20):
        line.add(rng.randrange(1, 2000), priority=rng.choice((-1, 0, 3)), tenant=rng.choice("abc"))
    marked = line.add(2000, priority=3, tenant="a")
    for _ in range(20_000):
        line.now_s += 0.05
        for priority in (-2, -1, 0, 3):
            tenant = rng.choice("abcd")
            line.add(rng.randrange(1, 50), priority=priority, tenant=tenant)
        if line.serve() is marked:
            break
    # 5 priorities of ageing for each older request of its class, at one request in 0.05 s.
    assert marked not in line.queue


def test_equal_histories_give_equal_orders() -> None:
    def history() -> list[int]:
        rng, line, order = random.Random(1), Line(), []
        for _ in range(300):
            line.now_s += rng.random()
            line.add(rng.randrange(1, 900), priority=rng.randrange(3), tenant=rng.choice("abc"))
            if rng.random() < 0.8:
                order.append(line.serve().arrival)
        return order

    assert history() == history()


def test_removal_from_anywhere() -> None:
    rng, line = random.Random(2), Line()
    requests = [line.add(rng.randrange(1, 9), priority=rng.randrange(3), tenant=rng.choice("ab")) for _ in range(60)]
    rng.shuffle(requests)
    for index, one in enumerate(requests):
        assert one in line.queue
        assert len(line.queue.candidates(1.0, 1000)) == len(line.queue) == 60 - index
        line.queue.remove(one)
    assert line.queue.candidates(1.0, 8) == []
    with pytest.raises(KeyError):
        line.queue.remove(requests[0])


def test_one_class_and_one_lane_have_the_order_of_many() -> None:
    """Candidates of a single priority and key are found by a shorter way. A class far behind makes no difference."""
    rng = random.Random(11)
    for _ in range(50):
        alone, beside = Line(), Line()
        beside.add(1, priority=99)
        for _ in range(rng.randrange(1, 8)):
            size, begun = rng.randrange(1, 50), rng.random() < 0.2
            for line in (alone, beside):
                line.add(size, begun=begun)
        for _ in range(3):
            found, all_found = alone.queue.candidates(0.0, 5), beside.queue.candidates(0.0, 5)
            sizes = [(entry.request.num_queued_tokens, entry.is_due) for entry in found]
            assert sizes == [
                (entry.request.num_queued_tokens, entry.is_due) for entry in all_found if entry.rank == 0
            ], "the same order, and up to the limit"
            if found:
                alone.serve()
                beside.serve()
