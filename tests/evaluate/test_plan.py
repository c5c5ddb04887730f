"""The plan of an evaluation: within its budget for every pace, and what has no time is named."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.evaluate.load import Point, fitted
from kvrelay.evaluate.plan import MIN_REQUESTS, POINT_S, Pace, Plan, Wish, pace_of, plan_of
from kvrelay.evaluate.sections import BY_IMPORTANCE, SECTIONS
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.costs import Costs

WISHES = (
    Wish("arrangements", 3, (Point("low", rate=0.5), Point("16 clients", concurrency=16))),
    Wish("sizes", simulated_s=4.0),
    Wish("loads", 2, (Point("1 client", concurrency=1), Point("64 clients", concurrency=64), Point("high", rate=0.9))),
    Wish("groups", 2, (Point("idle", idle_s=5.0),)),
    Wish("policies", 1, (Point("cost", rate=0.6), Point("always", rate=0.6))),
    Wish("policies", 1, (Point("together", rate=0.6),), 3.0),
)
seconds = st.floats(1e-3, 1e3)
paces = st.builds(Pace, start_s=seconds, warm_s=seconds, alone_s=seconds, per_s=st.floats(1e-3, 1e3))
budgets = st.floats(0.0, 4000.0)


def wishes_at(pace: Pace) -> list[Wish]:
    """With rates that are shares of what the machine does."""
    return [
        msgspec.structs.replace(
            wish,
            points=tuple(
                msgspec.structs.replace(point, rate=point.rate and point.rate * pace.per_s) for point in wish.points
            ),
        )
        for wish in WISHES
    ]


def walked_s(plan: Plan, wishes: list[Wish], pace: Pace, rounds: int) -> float:
    """Seconds of the same turns, one after another: each start, warm-up, request and pause."""
    total_s = 0.0
    for wish, share in zip(wishes, plan.shares, strict=True):
        taken = [point for point in wish.points if point.name in share.requests]
        if taken or (not wish.points and not share.left_out):
            total_s += wish.simulated_s
        for _ in range(wish.num_cases):
            for number in range(rounds):
                if taken and (number == 0 or not plan.is_held):
                    total_s += pace.start_s
                for point in taken:
                    total_s += POINT_S
                    if point.idle_s:
                        total_s += point.idle_s
                    elif point.rate:
                        total_s += pace.warm_s + share.requests[point.name] / point.rate + 2 * pace.alone_s
                    else:
                        # Each client needs as long for a request as one alone, or all need as long as the machine.
                        each_s = max(pace.alone_s / point.concurrency, 1.0 / pace.per_s)
                        total_s += pace.warm_s + share.requests[point.name] * each_s + 2 * pace.alone_s
    return total_s


@given(paces, st.integers(1, 3), st.floats(0.0, 10.0), budgets)
def test_no_plan_takes_more_than_its_budget(pace: Pace, rounds: int, send_s: float, budget_s: float) -> None:
    wishes = wishes_at(pace)
    plan = plan_of(wishes, pace, rounds, send_s, budget_s)
    assert plan.seconds <= budget_s
    # The bar's whole is the sum of its parts.
    assert plan.seconds == pytest.approx(walked_s(plan, wishes, pace, rounds))


@given(paces, st.integers(1, 3), st.floats(0.0, 10.0), budgets)
def test_a_point_has_enough_requests_or_is_named(pace: Pace, rounds: int, send_s: float, budget_s: float) -> None:
    wishes = wishes_at(pace)
    plan = plan_of(wishes, pace, rounds, send_s, budget_s)
    for wish, share in zip(wishes, plan.shares, strict=True):
        assert {point.name for point in wish.points} - set(share.left_out) == set(share.requests)
        for point in wish.points:
            if point.name in share.requests:
                assert share.requests[point.name] >= max(MIN_REQUESTS, point.concurrency)
        if not share.seconds:
            assert share.left_out


@given(paces, st.integers(1, 3), budgets, st.floats(1.0, 4.0))
def test_more_time_loses_no_point_of_the_first_section(pace: Pace, rounds: int, budget_s: float, times: float) -> None:
    wishes = wishes_at(pace)
    less, more = (plan_of(wishes, pace, rounds, 3.0, each_s).shares[0] for each_s in (budget_s, times * budget_s))
    assert set(less.requests) <= set(more.requests)


def test_requests_are_given_up_first_then_starts_then_points() -> None:
    pace = Pace(start_s=10.0, warm_s=1.0, alone_s=1.0, per_s=4.0)
    wish = Wish("loads", 2, (Point("16 clients", concurrency=16), Point("2 requests/s", rate=2.0)))
    # A point is 1.5 + 1 + 2 s and its requests: of 6 s of sending 24 with 4/s and 12 with 2/s; at least 16 and 6.
    wanted_s, fewest_s = 2 * (6 + 6 + 2 * 4.5), 2 * (4 + 3 + 2 * 4.5)
    assert plan_of([wish], pace, 2, 6.0, 40 + 2 * wanted_s).shares[0].requests == {"16 clients": 24, "2 requests/s": 12}
    few = plan_of([wish], pace, 2, 6.0, 40 + 2 * fewest_s)
    assert (few.shares[0].requests, few.is_held) == ({"16 clients": 16, "2 requests/s": 6}, False)
    held = plan_of([wish], pace, 2, 6.0, 20 + 2 * fewest_s)
    assert (held.is_held, held.shares[0].left_out) == (True, ())
    less = plan_of([wish], pace, 2, 6.0, 19 + 2 * fewest_s)
    # What is left over is for the points that stay.
    assert (less.shares[0].left_out, less.shares[0].requests) == (("2 requests/s",), {"16 clients": 24})
    assert less.seconds == 20 + 2 * 2 * (6 + 4.5)
    none = plan_of([wish], pace, 2, 6.0, 1.0)
    assert (none.seconds, none.shares[0].left_out) == (0.0, ("16 clients", "2 requests/s"))
    assert not none.has("loads")
    assert none.has("prefixes")


def test_pace_follows_from_costs_and_lengths() -> None:
    step = msgspec.structs.replace(
        Costs().step, step_s=0.04, prefill_s=0.1, prefill_token_s=1e-3, pair_s=0.0, decode_s=0.01, context_s=0.0
    )
    costs = msgspec.structs.replace(Costs(), step=step, between_steps_s=0.0)
    load = fitted([Arrival(time_s=0.0, prompt_tokens=400, answer_tokens=100)], 1024, 4096)
    pace = pace_of(costs, load, 7.0)
    # 0.1 + 400 ms of prefill, then 100 steps of 50 ms.
    assert pace.alone_s == pytest.approx(0.5 + 5.0)
    assert pace.warm_s == pytest.approx(1.0 + 16 * 0.05)
    # Sixteen together take 40 + 160 + 0 ms a step, less the one that is in both terms.
    assert 1 / pace.per_s == pytest.approx(0.5 + 100 * (0.05 / 16 + 0.01))
    assert pace_of(costs, load.shortened(2), 7.0).alone_s == pytest.approx(0.3 + 2.5)
    assert pace_of(costs, load, 7.0, per_s=0.5).per_s == 0.5


def test_each_section_has_its_importance() -> None:
    assert sorted(BY_IMPORTANCE) == sorted(SECTIONS)
