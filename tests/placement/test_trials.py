"""A way that is not taken is not measured: it is tried now and then, if it would pay."""

from __future__ import annotations

from msgspec.structs import replace

from kvrelay.config import DisaggConfig
from kvrelay.core.clock import ManualClock
from kvrelay.core.step_cost import StepCost
from kvrelay.placement.base import Objectives, PrefillLoad, PrefillPlace, Situation
from kvrelay.placement.cost import CostPlacement
from kvrelay.placement.threshold import DisaggPolicy
from kvrelay.placement.trials import FIRST_TRIAL_S, MAX_TRIAL_S, Trials, WorkerTrials

COST = StepCost(0.002, 0.003, 6e-5, 0.0, 2.5e-5, 0.0)
LONG = Situation(
    num_tokens=1024,
    waited_s=0.0,
    num_here=0,
    num_remote_tokens=0,
    num_remote_prefills=0,
    chunk=200,
    num_decodes=8,
    num_context=1000,
    is_here_open=True,
    cost=COST,
    objectives=Objectives(0.5, 0.025),
)
CHAT = replace(LONG, num_tokens=64)


def made() -> tuple[CostPlacement, ManualClock]:
    clock = ManualClock()
    policy = DisaggPolicy(DisaggConfig())
    return CostPlacement(policy, lambda: PrefillLoad(1, 0), lambda _: None, clock), clock


def go(placement: CostPlacement, situation: Situation, seconds: float = 0.1) -> PrefillPlace | None:
    """Place a prefill; a remote one comes back at once, after ``seconds`` of which the half is computing."""
    decision = placement.decide(situation)
    placement.placed(decision)
    if decision.place is PrefillPlace.REMOTE:
        placement.prefill_took("r", seconds / 2)
        placement.came_back("r", situation.num_tokens, 0, seconds)
    return decision.place


def test_one_slow_prefill_does_not_close_the_remote_way_for_good() -> None:
    placement, clock = made()
    assert go(placement, LONG, seconds=8.0) is PrefillPlace.REMOTE
    assert go(placement, LONG) is PrefillPlace.LOCAL_CHEAPER, "it is dear, as far as is known"
    clock.advance(FIRST_TRIAL_S)
    assert go(placement, CHAT) is PrefillPlace.LOCAL_CHEAPER, "a chat is cheaper here in any case"
    assert placement.decide(LONG).is_trial
    assert str(placement.decide(LONG)).endswith(";trial")
    assert not placement.decide(replace(LONG, num_remote_tokens=1024, num_remote_prefills=1)).is_trial, (
        "one is under way"
    )
    assert go(placement, LONG) is PrefillPlace.REMOTE
    assert placement.num_trials == 1
    assert go(placement, LONG) is PrefillPlace.REMOTE, "it is known to be cheap now"
    assert placement.num_trials == 1
    go(placement, LONG, seconds=0.2)
    assert placement.model.cost.seconds(LONG.num_tokens, 0.0) < 0.19, "only the trial has replaced what was known"


def test_a_way_that_stays_dear_is_tried_ever_more_seldom() -> None:
    placement, clock = made()
    go(placement, LONG, seconds=8.0)
    num_remote = 0
    for _ in range(2400):
        clock.advance(0.25)
        num_remote += go(placement, LONG, seconds=8.0) is PrefillPlace.REMOTE
    assert 8 <= num_remote <= 18, "ten minutes"


def test_a_first_local_prefill_that_was_slow_does_not_close_the_local_way() -> None:
    placement, clock = made()
    for _ in range(20):
        placement.prefill_took("r", 0.004)
        placement.came_back("r", 64, 0, 0.03)
    slow = replace(CHAT, cost=replace(COST, prefill_s=0.5))
    assert go(placement, slow, 0.03) is PrefillPlace.REMOTE
    clock.advance(FIRST_TRIAL_S)
    assert placement.decide(slow).is_trial
    assert placement.decide(slow).place is PrefillPlace.LOCAL_CHEAPER
    assert not placement.decide(replace(slow, num_here=500)).is_trial, "a local prefill is under way"
    assert not placement.decide(replace(slow, is_here_open=False)).is_trial


def test_intervals_double_up_to_a_bound_and_begin_anew() -> None:
    clock = ManualClock()
    trials = Trials(clock)
    found = []
    for _ in range(10):
        start_s = clock.now()
        while not trials.is_due:
            clock.advance(0.25)
        found.append(clock.now() - start_s)
        trials.taken(is_trial=True)
    assert found[:3] == [FIRST_TRIAL_S, 2 * FIRST_TRIAL_S, 4 * FIRST_TRIAL_S]
    assert found[-1] == MAX_TRIAL_S
    trials.taken(is_trial=False)
    clock.advance(FIRST_TRIAL_S)
    assert trials.is_due


def test_each_worker_has_its_own_trials_and_looks_are_seldom() -> None:
    clock = ManualClock()
    trials = WorkerTrials(clock)
    doubts = trials.in_doubt(["a", "b"])
    assert doubts is not None
    assert doubts.tolist() == [False, False], "these came with this look"
    assert trials.in_doubt(["a", "b"]) is None
    clock.advance(FIRST_TRIAL_S)
    trials.taken("a", is_trial=False)
    doubts = trials.in_doubt(["b", "a"])
    assert doubts is not None
    assert doubts.tolist() == [True, False]


def test_a_worker_of_both_roles_has_two_rows() -> None:
    clock = ManualClock()
    doubts = WorkerTrials(clock).in_doubt(["a", "b", "a"])
    assert doubts is not None
    assert doubts.shape == (3,)
