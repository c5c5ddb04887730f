"""Items that wait: short ones first, the oldest every fourth time, none lost or taken twice."""

from __future__ import annotations

import random

from kvrelay.core.shortest_first import OLDEST_EVERY, ShortestFirst


def test_a_chat_is_taken_before_the_long_prompts_that_arrived_earlier() -> None:
    arrivals: ShortestFirst[str] = ShortestFirst()
    for number in range(200):
        arrivals.add(number, 8000, f"long{number}")
    arrivals.add(200, 30, "chat")
    assert arrivals.take() == "chat"
    assert arrivals.take() == "long0"


def test_short_ones_without_end_do_not_hold_up_a_long_one() -> None:
    arrivals: ShortestFirst[str] = ShortestFirst()
    arrivals.add(0, 8000, "long")
    for number in range(OLDEST_EVERY):
        arrivals.add(number + 1, 30, "chat")
        if arrivals.take() == "long":
            return
    raise AssertionError("the long prompt was not taken")


def test_what_is_removed_is_not_taken() -> None:
    arrivals: ShortestFirst[str] = ShortestFirst()
    arrivals.add(1, 1, "a")
    arrivals.add(2, 2, "b")
    assert arrivals.remove(1) == "a"
    assert arrivals.remove(1) is None
    arrivals.add(3, 3, "again")
    assert [arrivals.take(), arrivals.take(), arrivals.take()] == ["b", "again", None]


def test_each_is_taken_once() -> None:
    rng, arrivals = random.Random(1), ShortestFirst[int]()
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


def test_an_item_with_n_older_ones_is_taken_within_four_times_as_many_turns() -> None:
    """Whatever arrives, however short."""
    for seed in range(20):
        rng, items = random.Random(seed), ShortestFirst[int]()
        due: dict[int, int] = {}
        turn = 0
        for number in range(600):
            for _ in range(rng.choice((0, 1, 1, 2))):
                turn += 1
                taken = items.take()
                if taken is not None:
                    assert turn <= due.pop(taken)
            due[number] = turn + OLDEST_EVERY * (len(items) + 1)
            items.add(number, rng.choice((1, 1, 1, 30, 8000)), number)
        while due:
            turn += 1
            taken = items.take()
            assert taken is not None
            assert turn <= due.pop(taken)


def test_items_taken_by_age_do_not_pile_up() -> None:
    items: ShortestFirst[int] = ShortestFirst()
    for number in range(10):
        items.add(number, 8000, number)
    for number in range(10, 5000):
        items.add(number, 8000 if number % OLDEST_EVERY == 0 else 1, number)
        assert items.take() is not None
        assert len(items) == 10
    assert len(items._by_size) < 200  # memory shows nowhere else


def test_what_is_cleared_comes_in_order_of_arrival() -> None:
    items: ShortestFirst[str] = ShortestFirst()
    items.add(1, 9, "a")
    items.add(2, 1, "b")
    assert items.clear() == ["a", "b"]
    assert items.take() is None
