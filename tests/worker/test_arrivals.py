"""Requests on their way to the engine: short ones first, the oldest every fourth time, none lost or taken twice."""

from __future__ import annotations

import random

from kvrelay.worker.arrivals import OLDEST_EVERY, Arrivals


def test_a_chat_is_taken_before_the_long_prompts_that_arrived_earlier() -> None:
    arrivals: Arrivals[str] = Arrivals()
    for number in range(200):
        arrivals.add(number, 8000, f"long{number}")
    arrivals.add(200, 30, "chat")
    assert arrivals.take() == "chat"
    assert arrivals.take() == "long0"


def test_short_ones_without_end_do_not_hold_up_a_long_one() -> None:
    arrivals: Arrivals[str] = Arrivals()
    arrivals.add(0, 8000, "long")
    for number in range(OLDEST_EVERY):
        arrivals.add(number + 1, 30, "chat")
        if arrivals.take() == "long":
            return
    raise AssertionError("the long prompt was not taken")


def test_what_is_removed_is_not_taken() -> None:
    arrivals: Arrivals[str] = Arrivals()
    arrivals.add(1, 1, "a")
    arrivals.add(2, 2, "b")
    assert arrivals.remove(1) == "a"
    assert arrivals.remove(1) is None
    arrivals.add(3, 3, "again")
    assert [arrivals.take(), arrivals.take(), arrivals.take()] == ["b", "again", None]


def test_each_is_taken_once() -> None:
    rng, arrivals = random.Random(1), Arrivals[int]()
    waiting: set[int] = set()
    for number in range(2000):
        if rng.random() < 0.6:
            arrivals.add(number, rng.randrange(50), number)
            waiting.add(number)
        elif waiting and rng.random() < 0.2:
            gone = rng.choice(sorted(waiting))
            assert arrivals.remove(gone) == gone
            waiting.remove(gone)
        else:
            taken = arrivals.take()
            assert (taken is None) == (not waiting)
            waiting.discard(-1 if taken is None else taken)
        assert len(arrivals) == len(waiting)
