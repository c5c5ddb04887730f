"""Who is in a group: every end is told once, with the rank that has caused it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.dp.messages import AllLeft, Ended, Formed, GroupRefused, RankInfo
from kvrelay.dp.roster import Roster, RosterState
from kvrelay.errors import IllegalTransitionError


def info(rank: int, size: int = 2) -> RankInfo:
    return RankInfo(rank, size, f"host:{rank}", {})


def test_the_life_of_a_group():
    roster = Roster(2, "g")
    assert roster.registered(7, info(1)) is None
    assert roster.registered(8, info(0)) == Formed("g")
    assert roster.left(7) is None
    assert roster.left(7) is None
    assert roster.left(8) == AllLeft()
    assert roster.lost(7, "has ended") is None


def test_a_stranger_that_goes_is_no_loss():
    roster = Roster(2, "g")
    assert roster.lost(3, "has ended") is None
    assert roster.is_gathering


def test_one_that_has_left_is_still_needed():
    roster = Roster(2, "g")
    roster.registered(7, info(1))
    roster.registered(8, info(0))
    roster.left(7)
    assert roster.lost(7, "has ended") == Ended("rank 1 of the data-parallel group (host:1) has ended")
    assert roster.closed.startswith("rank 1")


def test_time_is_up_once():
    roster = Roster(3, "g")
    roster.registered(7, info(1, 3))
    assert roster.overdue(2.0) == GroupRefused("rank 0, 2 of the data-parallel group did not register within 2 s")
    with pytest.raises(IllegalTransitionError):
        roster.overdue(2.0)


def test_ranks_that_do_not_load_are_named():
    roster = Roster(3, "g")
    for part, rank in ((7, 2), (8, 0), (9, 1)):
        roster.registered(part, info(rank, 3))
    assert roster.ready(9) is None
    assert not roster.is_running
    reason = "rank 0 (host:0), 2 (host:2) of the data-parallel group did not load within 9 s"
    assert roster.not_loaded(9.0) == Ended(reason)
    assert roster.lost(9, "has ended") is None
    assert roster.closed == reason


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from(["left", "lost"]), st.integers(0, 3)), max_size=12))
def test_a_formed_group_ends_once(size: int, events: list[tuple[str, int]]):
    roster = Roster(size, "g")
    for rank in range(size):
        roster.registered(rank, info(rank, size))
    assert roster.state is RosterState.FORMED
    ends = []
    for kind, part in events:
        if part < size:
            told = roster.left(part) if kind == "left" else roster.lost(part, "has ended")
            ends += [told] if told is not None else []
    left = {part for kind, part in events if kind == "left" and part < size}
    assert len(ends) <= 1
    assert bool(ends) == (roster.state is RosterState.OVER)
    assert ends or len(left) < size
