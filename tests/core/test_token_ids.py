"""Checks of token ids agree with min, max and types at every length."""

from __future__ import annotations

import random

import pytest

from kvrelay.core.token_ids import FEW, are_below, are_token_ids

LENGTHS = (1, 2, FEW, FEW + 1, 3000)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("bad", [-1, -(2**70), 400, 2**32, 2**32 + 5, 2**64, 2**70])
def test_one_bad_id_is_found_wherever_it_is(length: int, bad: int) -> None:
    rng = random.Random(length)
    ids = [rng.randrange(400) for _ in range(length)]
    assert are_below(ids, 400)
    assert are_below(tuple(ids), 400)
    for at in {0, length // 2, length - 1}:
        wrong = [*ids[:at], bad, *ids[at + 1 :]]
        assert not are_below(wrong, 400)
        assert are_token_ids(wrong)


def test_none_are_below_anything_and_the_last_id_counts() -> None:
    assert are_below([], 1)
    for length in LENGTHS:
        assert are_below([399] * length, 400)
        assert not are_below([399] * length, 399)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("other", ["a", [1], 1.0, None])
def test_other_items_are_no_token_ids(length: int, other: object) -> None:
    for at in {0, length // 2, length - 1}:
        items: list[object] = [7] * length
        items[at] = other
        assert not are_token_ids(items)


def test_an_id_too_large_for_a_word_beside_a_text() -> None:
    assert not are_token_ids([2**70] + [1] * FEW + ["a"])
