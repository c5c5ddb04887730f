"""Latest: a bound, an order, and what counts as the latest."""

from __future__ import annotations

import copy

from kvrelay.core.latest import Latest


def filled(capacity: int, keys: str) -> Latest[str, int]:
    latest: Latest[str, int] = Latest(capacity)
    for number, key in enumerate(keys):
        latest[key] = number
    return latest


def test_the_oldest_entry_is_dropped_beyond_the_capacity() -> None:
    latest = filled(3, "abc")
    assert list(latest.items()) == [("a", 0), ("b", 1), ("c", 2)]
    latest["d"] = 3
    assert list(latest) == ["b", "c", "d"]
    assert "a" not in latest
    assert latest.get("a") is None
    assert repr(latest) == "Latest(3 of 3)"


def test_an_entry_that_is_set_again_is_the_latest() -> None:
    latest = filled(3, "abca")
    assert list(latest.items()) == [("b", 1), ("c", 2), ("a", 3)]
    latest["d"] = 4
    assert list(latest) == ["c", "a", "d"]


def test_reading_an_entry_leaves_the_order() -> None:
    latest = filled(2, "ab")
    assert latest["a"] == latest.get("a") == latest.setdefault("a", 7) == 0
    latest["c"] = 2
    assert list(latest) == ["b", "c"]


def test_a_removed_entry_makes_room() -> None:
    latest = filled(2, "ab")
    assert latest.pop("a") == 0
    assert latest.pop("a", None) is None
    latest["c"] = 2
    assert list(latest) == ["b", "c"]


def test_a_copy_has_the_same_entries_in_the_same_order_and_goes_its_own_way() -> None:
    latest: Latest[str, int] = Latest(2)
    latest["b"], latest["a"] = 1, 2
    other = copy.copy(latest)
    other["c"] = 3
    assert (list(latest), list(other)) == (["b", "a"], ["a", "c"])
