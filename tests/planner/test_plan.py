"""``plan`` on a fleet of fluid: properties that hold for any demand, and the faults of the issue one by one."""

from __future__ import annotations

import math
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.draws import examples
from tests.planner.toy import COST, OBJECTIVES, TICK_S, ToyFleet, loaded, steady, workers

from kvrelay.config import WorkerRole
from kvrelay.core.events import LoadMetrics, TokenCounts
from kvrelay.core.step_cost import CostSource, StepCost
from kvrelay.planner import (
    Action,
    Demand,
    FleetView,
    Hold,
    Narrow,
    PlannerState,
    Start,
    Stop,
    Widen,
    WorkerView,
    not_begun,
    plan,
    released,
)
from kvrelay.planner.capacity import shape_of

shapes = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
demands = st.tuples(st.integers(0, 12), st.integers(100, 8000), st.integers(10, 800))


@examples(8, 30)
def test_constant_demand_is_not_answered_by_oscillation(num_examples: int) -> None:
    num_acting = 0

    @settings(max_examples=num_examples, deadline=None, derandomize=True)
    @given(shapes, demands, st.integers(0, 6))
    def check(shape: tuple[int, int, int], demand: tuple[int, int, int], extra: int) -> None:
        nonlocal num_acting
        fleet = ToyFleet(workers(*shape), max_workers=extra and sum(shape) + extra)
        num_reversals = 0
        for tick in range(350):
            fleet.tick(steady(*demand))
            # A worker that does both is narrowed after five minutes, one at a time, and what follows from that later.
            assert fleet.state.num_reversals <= num_reversals or tick * TICK_S <= 500.0, fleet.actions
            num_reversals = fleet.state.num_reversals
        num_acting += bool(fleet.actions)

    check()
    assert num_acting >= num_examples / 3, "a planner that never acts does not oscillate either"


def test_after_a_burst_the_fleet_comes_back_to_what_costs_least() -> None:
    fleet = ToyFleet(workers(1, 1), max_workers=4)
    run(fleet, steady(1, 1000, 100), 60)
    run(fleet, steady(8, 1000, 200), 120)
    assert len(fleet.fleet) == 4
    # What bursts before this one may have cost in patience.
    fleet.state = msgspec.structs.replace(fleet.state, num_reversals=5)
    run(fleet, steady(1, 1000, 100), 900)
    assert len(fleet.fleet) <= 2
    assert fleet.actions[-1][0] < 60 + 120 + 800


def test_lateness_that_no_fleet_can_avoid_keeps_no_worker() -> None:
    """500 tokens take 0.12 s, and long prompts more than 1.25 times that, on any worker."""
    fleet = ToyFleet(workers(3, 1), max_workers=4)
    objectives = msgspec.structs.replace(OBJECTIVES, ttft_s=0.05)
    for _ in range(60):
        fleet.tick(steady(0.5, 500, 50), objectives)
    assert len(fleet.fleet) == 3, "the third prefill worker shortens no wait, the second one does"


def reasons(fleet: ToyFleet, demand: Demand, ticks: int) -> str:
    return "\n".join(fleet.tick(demand).reason for _ in range(ticks))


def test_reasons_are_words_and_objectives_for_people() -> None:
    """8 prompts a second of 1,000 tokens, 0.225 s each, need 1.8 workers; a step with one answer takes 21 ms."""
    told = reasons(ToyFleet(workers(1, 1), max_workers=4), steady(8, 1000, 20), 20)
    assert re.search(
        r"^start prefill: first token is expected to take [\d.]+ s, objective 2 s; a second prefill worker is expected "
        r"to make it [\d.]+ s$",
        told,
        re.M,
    )
    assert "s/s" not in told
    told = reasons(ToyFleet(workers(1, 1), max_workers=2), steady(12, 4000, 20), 20)
    none = reasons(ToyFleet(workers(1, 1)), steady(12, 4000, 20), 20)
    assert "no worker can be started here (--max-workers), and no single change is worth its cost: first token" in none
    slots = r"all 2 slots are used, and no single .*: first token is expected to take [\d.]+ s, objective 2 s$"
    assert re.search(slots, told, re.M)
    told = reasons(ToyFleet(workers(3, 1), max_workers=4), steady(1, 400, 20), 20)
    assert re.search(
        r"^stop: without p\d, time between tokens is expected to take 0.02 s, objective 0.08 s$", told, re.M
    )


def test_a_plan_by_estimates_says_so() -> None:
    for source, is_estimated in ((CostSource.MEASURED, False), (CostSource.ESTIMATED, True)):
        fleet = ToyFleet(workers(1, 1, step_cost_source=source))
        action = fleet.tick(steady(1, 1000, 100))
        assert ("estimates" in action.reason) is is_estimated


@examples(25, 60)
def test_changes_are_bounded_whatever_comes(num_examples: int) -> None:
    kinds: set[type] = set()

    @settings(max_examples=num_examples, deadline=None, derandomize=True)
    @given(shapes, st.lists(demands, min_size=1, max_size=3), st.integers(0, 10), st.integers(1, 3))
    def check(shape: tuple[int, int, int], phases: list[tuple[int, int, int]], extra: int, min_workers: int) -> None:
        objectives = msgspec.structs.replace(OBJECTIVES, min_workers=min_workers)
        fleet = ToyFleet(workers(*shape), max_workers=extra and sum(shape) + extra)
        fewest = min(min_workers, sum(shape))
        for phase in phases:
            for _ in range(20):
                action = fleet.tick(steady(*phase), objectives)
                if isinstance(action, Hold):
                    continue
                kinds.add(type(action))
                assert len(fleet.due) == 1  # no other change is under way
                if isinstance(action, Start):
                    assert len(fleet.fleet) < fleet.max_workers
                else:
                    assert action.worker_id in fleet.fleet
                assert math.isfinite(action.numbers.gain_s)
                assert math.isfinite(action.numbers.cost_s)
            assert shape_of(fleet.view()).is_allowed
            assert len(fleet.fleet) >= fewest

    check()
    assert kinds == {Widen, Narrow, Start, Stop}


def states() -> st.SearchStrategy[ToyFleet]:
    def run(given: tuple[tuple[int, int, int], tuple[int, int, int], int]) -> ToyFleet:
        fleet = ToyFleet(workers(*given[0]), max_workers=8)
        for _ in range(given[2]):
            fleet.tick(steady(*given[1]))
        return fleet

    return st.tuples(shapes, demands, st.integers(1, 40)).map(run)


@examples(25, 60)
def test_equal_inputs_give_equal_plans_also_after_a_journey_through_json(num_examples: int) -> None:
    kinds: set[type] = set()

    @settings(max_examples=num_examples, deadline=None, derandomize=True)
    @given(states(), demands, st.booleans())
    def check(fleet: ToyFleet, demand: tuple[int, int, int], is_later: bool) -> None:
        # Later the evidence of the last looks has become enough.
        view = msgspec.structs.replace(fleet.view(), now_s=fleet.now_s + 60.0 * is_later)
        given = (view, steady(*demand), OBJECTIVES, fleet.state)
        again = tuple(msgspec.json.decode(msgspec.json.encode(value), type=type(value)) for value in given)
        assert plan(*given) == plan(*given) == plan(*again)  # type: ignore[arg-type]
        kinds.add(type(plan(*given)[0][0]))

    check()
    assert len(kinds) >= 3, kinds


@examples(2, 4)
def test_more_demand_never_wants_fewer_workers(num_examples: int) -> None:
    growth = []

    @settings(max_examples=num_examples, deadline=None, derandomize=True)
    @given(st.integers(1, 3), st.integers(500, 6000), st.integers(20, 400))
    def check(rate: int, prompt: int, answer: int) -> None:
        sizes = []
        for times in (1, 2, 4):
            fleet = ToyFleet(workers(1, 1), max_workers=12)
            for _ in range(400):
                fleet.tick(steady(rate * times, prompt, answer))
            sizes.append(len(fleet.fleet))
        assert sizes == sorted(sizes)
        growth.append(sizes[-1] - sizes[0])

    check()
    assert max(growth) >= 2, growth


# -- what it does -----------------------------------------------------------------------------------------------------


def run(fleet: ToyFleet, demand: Demand, seconds: int) -> list[type]:
    start = len(fleet.actions)
    for _ in range(round(seconds / TICK_S)):
        fleet.tick(demand)
    return [type(action) for _, action in fleet.actions[start:]]


def test_long_answers_open_a_second_door_within_one_window_and_then_close_the_first() -> None:
    fleet = ToyFleet(workers(3, 1))
    assert run(fleet, steady(3, 400, 360), 60)[:2] == [Widen, Narrow]
    assert fleet.actions[0][0] <= OBJECTIVES.window_s + 2 * TICK_S
    assert shape_of(fleet.view()).prefill == 2
    assert shape_of(fleet.view()).decode == 2


def test_long_prompts_widen_first_and_narrow_when_they_have_lasted() -> None:
    fleet = ToyFleet(workers(1, 3))
    assert run(fleet, steady(3, 3600, 40), 250) == [Widen]
    assert run(fleet, steady(3, 3600, 40), 150)[0] is Narrow
    (widened_s, _), (narrowed_s, narrow) = fleet.actions[:2]
    assert isinstance(narrow, Narrow)
    assert narrow.role is WorkerRole.PREFILL
    assert narrowed_s - widened_s >= 60 * OBJECTIVES.window_s


def waiting(fleet: ToyFleet, tokens: int) -> ToyFleet:
    """So many wait at its first prefill worker."""
    fleet.fleet["p0"] = loaded(fleet.fleet["p0"], num_prefill_tokens=tokens)
    return fleet


def test_a_backlog_that_stands_is_overload_whatever_the_rate_says() -> None:
    """Forty users in a closed loop, whose prefills all go to one prefill worker: a prompt of 2,000 tokens takes it 0.44
    s, so 2 requests come in a second, which the four workers would do easily, and 36 wait for 15 s."""
    fleet = ToyFleet(workers(1, 3))
    fleet.fleet["p0"] = loaded(fleet.fleet["p0"], num_prefill_tokens=72_000)
    run(fleet, steady(2, 2000, 100), 30)
    at_s, action = fleet.actions[0]
    assert isinstance(action, Widen)
    assert at_s <= 3 * OBJECTIVES.window_s + 2 * TICK_S, "one in which it stood, and two of evidence"
    assert action.numbers.ttft_s > 5 * OBJECTIVES.ttft_s
    assert action.numbers.ttft_then_s < action.numbers.ttft_s / 2


def by_turns(fleet: ToyFleet, *demands: Demand) -> None:
    """Each counts alone."""
    for demand in demands * 5:
        fleet.state = msgspec.structs.replace(fleet.state, samples=())
        fleet.tick(demand)


def test_two_changes_that_are_better_by_turns_are_both_worth_it_all_the_time() -> None:
    """Now a prefill worker more is better, now a decode worker; neither is the best change for a whole window."""
    fleet = ToyFleet(workers(1, 1), max_workers=8)
    by_turns(fleet, steady(4, 3000, 300), steady(4, 2000, 400))
    at_s, action = fleet.actions[0]
    assert isinstance(action, Start)
    assert at_s <= OBJECTIVES.window_s + 2 * TICK_S


def test_a_look_that_disagrees_takes_back_one_that_agreed_and_does_not_begin_the_count_anew() -> None:
    heavy, none = steady(6, 4000, 100), steady(0)
    fleet = ToyFleet(workers(1, 1), max_workers=3)
    by_turns(fleet, heavy, none)
    assert fleet.actions == []
    by_turns(fleet, heavy, heavy, none)
    assert isinstance(fleet.actions[0][1], Start)


def test_workers_are_started_while_they_help_and_stopped_after_three_quiet_windows() -> None:
    fleet = ToyFleet(workers(1, 1), max_workers=6)
    run(fleet, steady(6), 300)
    grown = len(fleet.fleet)
    assert 4 <= grown <= 6
    run(fleet, steady(0), 30)
    assert fleet.state.num_reversals == 1, "what comes back next must be worth more"
    run(fleet, steady(0), 270)
    assert len(fleet.fleet) == 2  # one of each role
    first_stop_s = next(at_s for at_s, action in fleet.actions if isinstance(action, Stop))
    assert first_stop_s >= 300 + 3 * OBJECTIVES.window_s


def test_a_fleet_of_workers_that_do_both_grows_by_such() -> None:
    fleet = ToyFleet(workers(both=2), max_workers=5)
    run(fleet, steady(3), 20)
    assert [action.role for _, action in fleet.actions if isinstance(action, Start)] == [WorkerRole.BOTH]


def test_a_start_is_dearer_than_a_change_of_role() -> None:
    """Nothing is saved until the worker is ready, and it is not free."""
    assert run(ToyFleet(workers(2, 1), max_workers=4), steady(3, 400, 360), 20) == [Widen, Narrow]


def test_a_change_of_role_that_saves_hardly_more_than_the_model_errs_is_left() -> None:
    """36,000 tokens a second are six times what two workers prefill; two more doors would still leave most of it."""
    fleet = ToyFleet(workers(2, 2))
    assert run(fleet, steady(6, 6000, 20), 20) == []
    assert "no single change is worth its cost" in fleet.tick(steady(6, 6000, 20)).reason


ZERO = msgspec.structs.replace(OBJECTIVES, min_workers=0, quiet_s=100.0)


def quiet(fleet: ToyFleet, seconds: float) -> None:
    for _ in range(round(seconds / TICK_S)):
        fleet.tick(steady(0), ZERO)


@pytest.mark.parametrize("shape", [(0, 0, 1), (1, 1, 0), (2, 3, 1)])
def test_after_a_quiet_time_all_workers_stop_and_those_that_take_requests_last(shape: tuple[int, int, int]) -> None:
    fleet = ToyFleet(workers(*shape), max_workers=9)
    fleet.tick(steady(1), ZERO)
    last_s = fleet.now_s
    quiet(fleet, 400)
    assert not fleet.fleet
    last = [(at_s, action) for at_s, action in fleet.actions if isinstance(action, Stop)]
    assert last[-1][0] >= last_s + ZERO.quiet_s
    assert last[-1][1].worker_id[0] in "db"


def test_from_zero_a_request_starts_one_worker_and_is_waited_for_no_evidence() -> None:
    fleet = ToyFleet(workers(both=1), max_workers=2)
    quiet(fleet, 200)
    assert not fleet.fleet
    assert isinstance(fleet.tick(steady(0), ZERO), Hold)
    action = fleet.tick(steady(1), ZERO)
    assert isinstance(action, Start)
    assert action.role is WorkerRole.BOTH
    assert fleet.state.num_reversals == 0, "it must not cost later changes their evidence"
    quiet(fleet, fleet.start_s + ZERO.quiet_s / 2)
    assert len(fleet.fleet) == 1


def test_a_request_that_waits_for_a_first_worker_is_demand_until_one_is_there() -> None:
    """However often the start fails: it came once, and waits."""
    empty, state, starts = view_of(max_workers=2), PlannerState(), 0
    for second in range(0, 600, 2):
        view = msgspec.structs.replace(empty, now_s=float(second), num_unplaced=1)
        (action,), state = plan(view, steady(0), ZERO, state)
        starts += isinstance(action, Start)
    assert starts >= 4
    (action,), _ = plan(empty, steady(0), ZERO, PlannerState())
    assert isinstance(action, Hold)


@pytest.mark.parametrize(
    ("stays", "load"),
    [
        ({"may_stop": False}, {}),
        ({"is_held": True}, {}),
        ({"is_ready": False}, {}),
        ({}, {"num_admitted": 1}),
        ({}, {"num_waiting": 1}),
    ],
)
def test_a_worker_that_has_to_stay_keeps_those_that_it_needs(stays: dict[str, object], load: dict[str, int]) -> None:
    """A prefill worker alone would leave requests without an answer, and no worker would be started for them."""
    prefill, decode = workers(1, 1)
    fleet = ToyFleet((msgspec.structs.replace(loaded(prefill, **load), **stays), decode), max_workers=4)
    state, view = PlannerState(), fleet.view()
    for second in range(0, 600, 2):
        (action,), state = plan(msgspec.structs.replace(view, now_s=float(second)), steady(0), ZERO, state)
        assert isinstance(action, Hold)


def test_a_worker_set_by_hand_is_left_alone_until_it_is_released() -> None:
    fleet = ToyFleet(workers(3, 1))
    run(fleet, steady(1), 5)
    for name in ("p0", "p1", "p2"):
        fleet.fleet[name] = msgspec.structs.replace(fleet.fleet[name], role=WorkerRole.DECODE)
        fleet.tick(steady(1))
        fleet.fleet[name] = msgspec.structs.replace(fleet.fleet[name], role=WorkerRole.PREFILL)
        fleet.tick(steady(1))
    assert fleet.state.held == ("p0", "p1", "p2")
    assert run(fleet, steady(3, 400, 360), 60) == []
    fleet.state = released(fleet.state, {"p1"})
    run(fleet, steady(3, 400, 360), 60)
    assert {action.worker_id for _, action in fleet.actions if isinstance(action, Widen | Narrow)} == {"p1"}


def test_a_role_set_by_hand_while_the_planner_changes_it_is_held_too() -> None:
    fleet = ToyFleet(workers(3, 1), delay_s=60.0)
    run(fleet, steady(3, 400, 360), 20)
    assert fleet.state.pending is not None
    name = fleet.state.pending.worker_id
    assert fleet.state.held == (), "it still has the role that it had"
    fleet.due.clear()
    fleet.fleet[name] = msgspec.structs.replace(fleet.fleet[name], role=WorkerRole.DECODE)
    fleet.tick(steady(3, 400, 360))
    assert fleet.state.held == (name,)
    assert fleet.state.pending is None


def test_a_worker_that_dies_while_its_role_changes_holds_nothing_up() -> None:
    fleet = ToyFleet(workers(3, 1), delay_s=60.0)
    while fleet.state.pending is None:
        fleet.tick(steady(3, 400, 360))
    name = fleet.state.pending.worker_id
    dead = fleet.fleet.pop(name)
    fleet.tick(steady(3, 400, 360))
    assert fleet.state.pending is None
    assert fleet.state.num_reversals == 1, "if the change has killed it, the next one must be worth more"
    fleet.fleet[name] = dead
    fleet.tick(steady(3, 400, 360))
    assert fleet.state.held == (), "it had only lost its lease; nobody has changed its role by hand"


def test_a_worker_that_dies_while_another_starts_does_not_hide_it() -> None:
    fleet = ToyFleet(workers(both=2), max_workers=4)
    while fleet.state.pending is None:
        fleet.tick(steady(8))
    assert isinstance(fleet.actions[-1][1], Start)
    del fleet.fleet["b1"]
    fleet.tick(steady(8))
    assert fleet.state.pending is not None
    fleet.due.clear()
    fleet.fleet["started"] = loaded(fleet.fleet["b0"], worker_id="started")
    fleet.tick(steady(0))
    assert fleet.state.pending is None


def test_a_suggestion_that_is_not_carried_out_stays_the_same() -> None:
    demand, view, state = steady(3, 400, 360), ToyFleet(workers(3, 1)).view(), PlannerState()
    wanted = set()
    for second in range(60):
        view = msgspec.structs.replace(view, now_s=float(second))
        (action,), after = plan(view, demand, OBJECTIVES, state)
        state = not_begun(view, state, after)
        if second >= 10:
            wanted.add((type(action), getattr(action, "worker_id", "")))
    assert wanted == {(Widen, "p0")}


# -- bad input and faults ---------------------------------------------------------------------------------------------


def only(view: FleetView, demand: Demand) -> Hold:
    """What a planner that has watched this for two minutes does."""
    state = PlannerState()
    for second in range(120):
        (action,), state = plan(msgspec.structs.replace(view, now_s=float(second)), demand, OBJECTIVES, state)
        assert isinstance(action, Hold), action
    return action


def view_of(*fleet: WorkerView, max_workers: int = 0) -> FleetView:
    return FleetView(now_s=0.0, workers=fleet, max_workers=max_workers, spread=0.03)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_costs_that_cannot_be_are_ignored(value: float) -> None:
    broken = StepCost(value, value, value, value, value, value)
    fleet = workers(3, 1)
    assert "published" in only(view_of(*(loaded(w, step_cost=broken) for w in fleet)), steady(3)).reason
    mixed = ToyFleet((loaded(fleet[0], step_cost=broken), *fleet[1:]))
    assert run(mixed, steady(3, 400, 360), 30)[0] is Widen


def test_the_first_steps_of_a_worker_do_not_count() -> None:
    cold = StepCost(2.0, 2.0, 1.0, 1.0, 1.0, 1.0)
    fleet = workers(1, 1, step_cost=cold, tokens=TokenCounts(num_steps=5))
    assert "published" in only(view_of(*fleet), steady(1)).reason
    warm = workers(2, 2)
    one_cold = view_of(*warm[:3], loaded(warm[3], step_cost=cold, tokens=TokenCounts(num_steps=5)))
    assert only(view_of(*warm), steady(1)) == only(one_cold, steady(1))


def test_frozen_workers_carry_nothing_and_are_not_touched() -> None:
    """Half of them: the planner itself is not cut off."""
    frozen = {"p0", "p1"}
    fleet = ToyFleet(tuple(msgspec.structs.replace(w, is_ready=w.worker_id not in frozen) for w in workers(3, 1)))
    assert run(fleet, steady(3, 400, 360), 30)[0] is Widen
    assert frozen.isdisjoint(getattr(action, "worker_id", "") for _, action in fleet.actions)


def test_a_planner_that_reaches_few_workers_holds() -> None:
    fleet = [msgspec.structs.replace(w, is_ready=w.worker_id == "d0") for w in workers(3, 1)]
    assert "cut off" in only(view_of(*fleet, max_workers=8), steady(9)).reason
    none = [msgspec.structs.replace(w, is_ready=False) for w in workers(1, 1)]
    assert "none of 2 workers" in only(view_of(*none, max_workers=8), steady(9)).reason


def test_a_worker_that_never_becomes_ready_is_waited_for_once_and_costs_patience() -> None:
    fleet = ToyFleet(workers(1, 1), max_workers=3)
    fleet.start_s = 5.0
    fleet.apply = lambda action: None  # type: ignore[method-assign]
    run(fleet, steady(6), 600)
    gaps = [after - before for (before, _), (after, _) in zip(fleet.actions, fleet.actions[1:])]
    assert gaps
    assert min(gaps) >= 2.0 * fleet.start_s
    assert gaps == sorted(gaps)  # each attempt waits longer
    assert gaps[-1] > 1.5 * gaps[0]


def test_an_objective_that_no_fleet_meets_is_told_once_and_buys_no_workers() -> None:
    fleet = ToyFleet(workers(1, 1), max_workers=9)
    prompt = 30_000  # takes 6 s alone, the objective is 2 s
    told = [action.reason for action in (fleet.tick(steady(0.0)) for _ in range(3)) if isinstance(action, Hold)]
    assert not any("objective:" in reason for reason in told)
    slow = Demand(duration_s=30.0, num_requests=1, num_prompt_tokens=prompt, num_uncached_tokens=prompt)
    reasons = [fleet.tick(slow).reason for _ in range(100)]
    assert sum("more workers do not shorten" in reason for reason in reasons) == 1
    assert fleet.actions == []


def test_one_slot_is_left_alone() -> None:
    assert isinstance(only(view_of(*workers(both=1), max_workers=1), steady(5)), Hold)
    assert isinstance(only(view_of(*workers(both=1)), steady(0)), Hold)


def test_a_sample_without_a_duration_changes_nothing() -> None:
    view = view_of(*workers(1, 1))
    for duration_s in (0.0, -1.0, math.nan, math.inf):
        _, state = plan(view, Demand(duration_s=duration_s, num_requests=9), OBJECTIVES, PlannerState())
        assert state.samples == ()


def test_costs_of_the_toy_are_sound() -> None:
    assert COST.is_sound


def extremes(most: float) -> st.SearchStrategy[float]:
    """The ends of what may be published, and what lies between."""
    return st.sampled_from([0.0, 5e-324, 1e-9, most]) | st.floats(0.0, most)


def test_nothing_that_workers_may_publish_makes_it_raise() -> None:
    counts = st.sampled_from([0, 1, 1 << 20, 1 << 40])
    costs = st.builds(StepCost, *(extremes(600.0) for _ in range(6)))
    loads = st.builds(
        LoadMetrics,
        worker_id=st.text("ab", min_size=1, max_size=3),
        num_running=counts,
        num_admitted=counts,
        num_waiting=counts,
        num_slots=counts,
        num_prefill_tokens=counts,
        num_blocks=counts,
        num_blocks_in_use=counts,
        cache_usage=extremes(1.0),
        prefix_hit_rate=extremes(1.0),
        step_cost=costs | st.none(),
        tokens=st.builds(TokenCounts, num_generated=counts, num_steps=counts) | st.none(),
    )
    views = st.builds(WorkerView, role=st.sampled_from(WorkerRole), load=loads, block_size=st.integers(1, 1 << 16))
    fleets = st.builds(
        FleetView,
        now_s=extremes(1e9),
        workers=st.lists(views, max_size=4).map(tuple),
        max_workers=st.integers(0, 6),
        num_queued_prefill_tokens=counts,
        num_unplaced=counts,
        spread=st.floats(),
    )
    asked = st.builds(
        Demand,
        duration_s=st.sampled_from([-1.0, 0.0, math.nan, math.inf]) | st.floats(1e-3, 1e6),
        num_requests=counts,
        num_prompt_tokens=counts,
        num_uncached_tokens=counts,
        sum_squares=extremes(1e24),
        num_ended=counts,
        num_ended_tokens=counts,
    )

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(st.lists(st.tuples(fleets, asked), min_size=1, max_size=3))
    def check(looks: list[tuple[FleetView, Demand]]) -> None:
        state = PlannerState()
        for fleet, demand in looks:
            (action,), state = plan(fleet, demand, OBJECTIVES, state)
            assert action.reason
            # A log is read again, and JSON has neither infinity nor NaN.
            assert msgspec.json.decode(msgspec.json.encode(action), type=Action) == action

    check()
