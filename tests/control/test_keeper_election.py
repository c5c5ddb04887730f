"""Who times the leases, with a clock moved by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvrelay.control.nats.keeper_election import MAX_INTERVAL_S, KeeperElection, KeeperState
from kvrelay.core.clock import ManualClock

TTL_S = 2.5
INTERVAL_S = 1.0


class Watchers:
    """Those that are up hear each other at once."""

    def __init__(self, count: int) -> None:
        self.clock = ManualClock(100.0)
        self.up = [KeeperElection(self.clock, f"{number:04}", number / count) for number in range(count)]
        self.said_s: list[float] = []

    @property
    def keepers(self) -> list[str]:
        return [one.own_id for one in self.up if one.state is KeeperState.KEEPING]

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * 100)):
            for one in self.up:
                one.pace(TTL_S)
                if one.tick():
                    self.said_s.append(self.clock.now())
                    for other in self.up:
                        other.heard(one.own_id)
            self.clock.advance(0.01)


def test_one_of_many_keeps_the_leases_and_says_so_at_a_steady_rate() -> None:
    group = Watchers(48)
    group.run(60.0)
    assert len(group.keepers) == 1
    assert len(group.said_s) <= 60.0 / INTERVAL_S + 1
    assert max(after - before for before, after in pairwise(group.said_s)) < 1.1 * INTERVAL_S


def test_another_takes_over_within_a_lease() -> None:
    group = Watchers(8)
    group.run(20.0)
    for _ in range(4):
        (keeper,) = group.keepers
        group.up = [one for one in group.up if one.own_id != keeper]
        group.run(TTL_S)
        assert len(group.keepers) == 1


def test_newcomers_do_not_unseat_the_keeper() -> None:
    group = Watchers(4)
    group.run(20.0)
    (keeper,) = group.keepers
    first = KeeperElection(group.clock, "!before all others", 0.0)
    group.up.append(first)
    assert first.state is KeeperState.TRIAL
    group.run(20.0)
    assert group.keepers == [keeper]
    assert first.state is KeeperState.RESTING


def test_of_two_keepers_the_greater_id_resigns() -> None:
    clock = ManualClock()
    one, two = KeeperElection(clock, "a", 0.0), KeeperElection(clock, "b", 0.0)
    clock.advance(100.0)
    assert one.tick()
    assert two.tick()
    one.heard("b")
    two.heard("a")
    assert (one.state, two.state) == (KeeperState.KEEPING, KeeperState.RESTING)
    assert one.tick()  # at once, for a keeper that has not heard it


def test_a_short_lease_that_appears_is_no_reason_to_take_over() -> None:
    clock = ManualClock()
    one = KeeperElection(clock, "a", 0.0)
    one.pace(None)
    clock.advance(2 * MAX_INTERVAL_S)
    one.heard("b")
    clock.advance(MAX_INTERVAL_S)
    one.pace(0.5)
    assert not one.tick()
    clock.advance(0.4)
    assert one.tick()


@pytest.mark.parametrize("heard", [True, False])
def test_a_watcher_without_permission_never_becomes_keeper(*, heard: bool) -> None:
    clock = ManualClock()
    one = KeeperElection(clock, "a", 0.0)
    one.forbid()
    for _ in range(10):
        clock.advance(100.0)
        if heard:
            one.heard("b")
        assert not one.tick()
        assert one.due_s() > clock.now()
    assert one.state is KeeperState.RESTING
