"""The measure of demand: where it changed last, and what follows for the load."""

from __future__ import annotations

import numpy as np
import pytest
from tests.planner.toy import COST, OBJECTIVES, steady, workers

from kvrelay.planner import Demand, FleetView, PlannerState, Traffic
from kvrelay.planner.demand import MAX_WINDOWS, heard, last_change, load_of, total, trend


def poisson(rng: np.random.Generator, rate: float, prompt: float, seconds: float = 2.5) -> Demand:
    """Requests of a Poisson process with lognormal prompts."""
    lengths = rng.lognormal(np.log(prompt) - 0.125, 0.5, rng.poisson(rate * seconds))
    return Demand(
        duration_s=seconds,
        num_requests=len(lengths),
        num_prompt_tokens=int(lengths.sum()),
        num_uncached_tokens=int(lengths.sum()),
        sum_squares=float((lengths**2).sum()),
        num_ended=len(lengths),
        num_ended_tokens=100 * len(lengths),
    )


def test_a_jump_is_found_where_it_is() -> None:
    rng = np.random.default_rng(1)
    samples = [poisson(rng, 1.0, 2000) for _ in range(20)] + [poisson(rng, 24.0, 2000) for _ in range(2)]
    assert last_change(samples) == 20


@pytest.mark.parametrize("rate", [0.5, 3.0, 30.0])
def test_steady_demand_has_hardly_ever_changed(rate: float) -> None:
    rng = np.random.default_rng(2)
    found = [last_change([poisson(rng, rate, 2000) for _ in range(24)]) for _ in range(200)]
    assert sum(map(bool, found)) <= 4


def test_samples_are_bounded_and_short_ones_are_joined() -> None:
    state = PlannerState()
    for _ in range(1000):
        state = heard(state, steady(1), OBJECTIVES)
    seconds = total(state.samples).duration_s
    assert MAX_WINDOWS * OBJECTIVES.window_s <= seconds <= (MAX_WINDOWS + 1) * OBJECTIVES.window_s
    assert len(state.samples) <= 2 * MAX_WINDOWS + 1


def test_running_answers_count_before_they_end() -> None:
    state = heard(PlannerState(answer_tokens=50.0), steady(2, 400, 50), OBJECTIVES)
    idle, crowded = (
        load_of(FleetView(now_s=0.0, workers=workers(1, 1, num_running=count)), state, COST) for count in (0, 60)
    )
    assert idle.answer_tokens == 50.0
    assert crowded.answer_tokens > 200.0


def test_a_trend_is_a_slope_and_nothing_without_samples() -> None:
    assert trend([steady(1)] * 3) == 0.0
    assert trend([steady(3)] * 20) == pytest.approx(0.0)
    assert trend([steady(rate) for rate in range(1, 40)]) == pytest.approx(0.5, rel=0.2)  # one a tick of 2 s


def test_traffic_is_a_difference_and_the_cached_share_is_taken_off() -> None:
    traffic = Traffic()
    traffic.arrived(1000)
    before = traffic.plus(Traffic())
    traffic.arrived(3000)
    traffic.prefilled(1000, 750)
    traffic.ended(20)
    demand = traffic.since(before).demand(2.0)
    assert (demand.num_requests, demand.num_prompt_tokens, demand.num_uncached_tokens) == (1, 3000, 750)
    assert demand.sum_squares == 750.0**2
    assert (demand.num_ended, demand.num_ended_tokens) == (1, 20)
    assert before.since(traffic) == Traffic()  # a frontend that restarted
