"""Checks of token ids agree with min, max and types at every length."""

from __future__ import annotations

import random
from array import array

import pytest

from kvrelay.core.token_ids import FEW, are_below, from_bytes, outside, packed_below, to_bytes, words_of

LENGTHS = (1, 2, FEW, FEW + 1, 3000)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("bad", [-1, -(2**70), 400, 2**32, 2**32 + 5, 2**64, 2**70])
def test_one_bad_id_is_found_wherever_it_is(length: int, bad: int) -> None:
    rng = random.Random(length)
    ids = [rng.randrange(400) for _ in range(length)]
    for at in {0, length // 2, length - 1}:
        wrong = [*ids[:at], bad, *ids[at + 1 :]]
        assert packed_below(wrong, 400) is None
    packed = packed_below(ids, 400)
    assert packed is not None
    assert packed.tolist() == ids


def test_the_first_item_that_is_no_id_is_named() -> None:
    assert outside([5, 399, 400, -1], 400) == "400"
    assert outside([5, -1], 400) == "-1"
    assert outside([1, "a"], 400) == "a value of type str"
    assert outside([10**5000], 400) == "a value of type int"


@pytest.mark.parametrize("length", [0, *LENGTHS])
def test_what_was_sent_is_unpacked(length: int) -> None:
    ids = list(range(2**32 - length, 2**32))
    assert words_of(to_bytes(ids)).tolist() == from_bytes(to_bytes(ids)) == ids


def test_none_are_below_anything_and_the_last_id_counts() -> None:
    assert are_below(array("I"), 1)
    for length in LENGTHS:
        assert are_below(array("I", [399] * length), 400)
        assert not are_below(array("I", [399] * length), 399)
        assert packed_below([399] * length, 400) is not None


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("other", ["a", [1], 1.0, None])
def test_other_items_are_no_token_ids(length: int, other: object) -> None:
    for at in {0, length // 2, length - 1}:
        items: list[object] = [7] * length
        items[at] = other
        assert packed_below(items, 400) is None  # type: ignore[arg-type]
