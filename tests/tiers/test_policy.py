"""What is worth keeping and loading: numbers in, numbers out."""

from __future__ import annotations

import pytest

from kvrelay.core.step_cost import StepCost
from kvrelay.tiers.policy import RETURNS_WINDOW, LoadTime, Returns, share_to_write


def test_later_blocks_of_a_prompt_are_dearer_to_compute() -> None:
    cost = StepCost(prefill_token_s=1e-3, pair_s=1e-6)
    assert cost.extra_seconds(16, 0) == pytest.approx(16 * 1e-3 + 16 * 8 * 1e-6)
    assert cost.extra_seconds(16, 1000) == pytest.approx(16 * 1e-3 + 16 * 1008 * 1e-6)
    whole = cost.extra_seconds(64, 0)
    assert sum(cost.extra_seconds(16, at) for at in range(0, 64, 16)) == pytest.approx(whole)


def test_a_queue_takes_all_and_then_less_and_less() -> None:
    fills = [0.0, 0.5, 0.6, 0.75, 1.0, 1.5]
    assert [share_to_write(fill) for fill in fills] == pytest.approx([1.0, 1.0, 0.8, 0.5, 0.0, 0.0])


def test_what_is_evicted_again_has_returned_and_the_oldest_are_forgotten() -> None:
    returns = Returns(num_slots=4)
    assert [returns.evicted(number, 0) for number in (1, 1, 2, 1, 5, 1)] == [False, True, False, True, False, False]


def test_the_share_that_returns_is_learned_for_each_depth() -> None:
    """Prompts with a common beginning of 8 blocks and an end of their own."""
    returns = Returns()
    for number in range(400):
        for index in range(32):
            returns.evicted(index + 1 if index < 8 else 1000 * number + 100 + index, index)
    assert returns.share(0) > 0.99
    assert returns.share(7) > 0.99
    assert returns.share(8) < 0.01
    assert returns.share(31) < 0.01
    assert returns.share(10**9) == 1.0, "nothing is known yet"


def test_a_share_that_falls_rises_again() -> None:
    returns, hashes = Returns(), iter(range(1, 10**6))
    for _ in range(4 * RETURNS_WINDOW):
        returns.evicted(next(hashes), 0)
    assert returns.share(0) < 0.02
    for _ in range(RETURNS_WINDOW):
        returns.evicted(1, 0)
    assert returns.share(0) > 0.6


def test_a_load_time_follows_its_loads() -> None:
    time = LoadTime(1e-3)
    for _ in range(40):
        time.took(10, 10 * 5e-3)
    assert time.block_s == pytest.approx(5e-3, rel=0.01)
    time.took(0, 9.0)
    assert time.block_s == pytest.approx(5e-3, rel=0.01), "a load of nothing says nothing"


def test_one_slow_load_says_little() -> None:
    time = LoadTime(1e-3)
    time.took(1, 10.0)
    assert time.block_s < 2e-3


def test_a_store_that_was_slow_is_tried_again() -> None:
    """A store ten times as slow as computing is tried about once in forty prompts."""
    time, computing_s, num_refused = LoadTime(1e-2), 1e-3, 0
    while time.block_s > computing_s:
        time.refused()
        num_refused += 1
    assert 30 < num_refused < 60
