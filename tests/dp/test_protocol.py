"""No rank steps alone, none waits for ever, all sleep in the end: every order of events of small groups is visited."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.dp.group_world import Scenario, after, check, explore, first_state, is_quiet, moves

from kvrelay.dp.protocol import Coordinator, Participant, Round, StartStep, StepsUntil


def test_the_coordinator_tells_each_step_once():
    coordinator = Coordinator(lookahead=24)
    assert coordinator.start_step(1) == StepsUntil(25)
    assert coordinator.start_step(25) is None
    assert coordinator.start_step(26) == StepsUntil(50)
    assert coordinator.start_step(3) is None


def test_a_rank_asks_only_for_steps_that_it_was_not_told():
    rank = Participant()
    assert rank.begin_round(has_batch=False) == (Round.NO_STEP, None)
    assert rank.begin_round(has_batch=True) == (Round.REAL, StartStep(1))
    rank.notified(3)
    rank.notified(2)
    assert rank.begin_round(has_batch=True) == (Round.REAL, None)
    assert rank.begin_round(has_batch=False) == (Round.DUMMY, None)
    assert not rank.owes_step
    assert rank.begin_round(has_batch=False) == (Round.NO_STEP, None)


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_every_order_of_events_of_two_ranks(lookahead: int):
    report = explore(Scenario(num_ranks=2, lookahead=lookahead))
    assert not report.violation, report
    assert report.num_states > 1000


@pytest.mark.parametrize(("num_ranks", "lookahead", "requests"), [(3, 0, (1, 1)), (3, 1, (1, 1)), (4, 0, (1,))])
def test_every_order_of_events_of_more_ranks(num_ranks: int, lookahead: int, requests: tuple[int, ...]):
    report = explore(Scenario(num_ranks, lookahead, requests, num_repeats=0))
    assert not report.violation, report


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("num_ranks", "lookahead", "requests"), [(2, 3, (1, 2, 1)), (3, 1, (1, 2)), (3, 2, (2, 1)), (4, 1, (1,))]
)
def test_every_order_of_more_events(num_ranks: int, lookahead: int, requests: tuple[int, ...]):
    report = explore(Scenario(num_ranks, lookahead, requests))
    assert not report.violation, report


@given(st.integers(2, 6), st.integers(0, 4), st.lists(st.integers(1, 6), max_size=6), st.integers(0, 2**32))
def test_long_runs_of_larger_groups_end_asleep(num_ranks: int, lookahead: int, requests: list[int], seed: int):
    scenario = Scenario(num_ranks, lookahead, tuple(requests), num_repeats=4)
    draw, state = random.Random(seed), first_state(scenario)
    while possible := list(moves(scenario, state)):
        state = after(scenario, state, draw.choice(possible))
        check(scenario, state)
    assert is_quiet(scenario, state), state


# -- protocols that are wrong in one place ----------------------------------------------------------------------------


def sleeps_never(self: Participant) -> bool:
    return self.local_step <= self.coord_step


def heard_lowers(self: Participant, step: int) -> None:
    self.coord_step = step


def told_one_step_late(self: Participant) -> StartStep | None:
    is_told = self.local_step <= self.coord_step
    self.local_step += 1
    return None if is_told else StartStep(self.local_step)


def cleaning_steps(self: Participant, *, has_batch: bool) -> tuple[Round, StartStep | None]:
    return (Round.REAL if has_batch else Round.NO_STEP), self._new_step()


def dummies_are_not_counted(self: Participant, *, has_batch: bool) -> tuple[Round, StartStep | None]:
    if has_batch:
        return Round.REAL, self._new_step()
    return (Round.DUMMY if self.owes_step else Round.NO_STEP), None


def idle_ranks_sleep(self: Participant, *, has_batch: bool) -> tuple[Round, StartStep | None]:
    return (Round.REAL, self._new_step()) if has_batch else (Round.NO_STEP, None)


def tells_again(self: Coordinator, step: int) -> StepsUntil | None:
    if step < self.step:
        return None
    self.step = step + self._lookahead
    return StepsUntil(self.step)


def tells_what_was_asked(self: Coordinator, step: int) -> StepsUntil | None:
    if step <= self.step:
        return None
    self.step = step + self._lookahead
    return StepsUntil(step - 1)


def looks_twice_as_far(self: Coordinator, step: int) -> StepsUntil | None:
    if step <= self.step:
        return None
    self.step = step + 2 * self._lookahead + 2
    return StepsUntil(self.step)


MUTANTS: dict[str, tuple[type, str, Callable[..., object], int]] = {
    "a rank goes on after its last step (<= for <)": (Participant, "owes_step", property(sleeps_never), 1),  # type: ignore[dict-item]
    "a late notification lowers coord_step": (Participant, "notified", heard_lowers, 1),
    "a step is compared before it is counted": (Participant, "_new_step", told_one_step_late, 1),
    "a round that cleans up takes a step": (Participant, "begin_round", cleaning_steps, 1),
    "dummy batches are not counted": (Participant, "begin_round", dummies_are_not_counted, 1),
    "an idle rank takes no part": (Participant, "begin_round", idle_ranks_sleep, 1),
    "the coordinator tells a known step again (>= for >)": (Coordinator, "start_step", tells_again, 0),
    "the ranks hear of one step less": (Coordinator, "start_step", tells_what_was_asked, 0),
    "the lookahead is added twice": (Coordinator, "start_step", looks_twice_as_far, 1),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_protocol_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch):
    owner, attribute, wrong, lookahead = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, wrong)
    report = explore(Scenario(num_ranks=2, lookahead=lookahead), max_states=500_000)
    assert report.violation, report
