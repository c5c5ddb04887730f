"""The measure of demand: where it changed last, and what follows for the load."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from tests.planner.toy import OBJECTIVES, loaded, steady, workers

from kvrelay.core.events import TokenCounts
from kvrelay.planner import Demand, FleetView, PlannerState, Traffic, generated_since
from kvrelay.planner.base import Backlog
from kvrelay.planner.demand import MAX_WINDOWS, growth, heard, last_change, load_of, stands, total, trend, waits


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


@pytest.mark.parametrize("num_after", [1, 2])
def test_a_jump_is_found_where_it_is(num_after: int) -> None:
    rng = np.random.default_rng(1)
    samples = [poisson(rng, 1.0, 2000) for _ in range(20)] + [poisson(rng, 24.0, 2000) for _ in range(num_after)]
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


@pytest.mark.parametrize(
    ("tokens", "share"),
    [
        ((5000, 5000, 5000, 5000), 1.0),
        ((4000, 5000, 4000, 5000), 0.8),
        ((1000, 2000, 3000, 4000), 0.25),  # what has come meanwhile may drain
        ((5000, 5000, 0, 5000), 0.0),
        ((5000, 4000, 3000, 2000), 2000 / 500 / 60),  # gone in 4 s, and the horizon is 60 s
        ((5000, 5000, 5000), 0.0),  # 4 s are no window
    ],
)
def test_what_waits_stands_unless_it_was_gone_or_soon_will_be(tokens: tuple[int, ...], share: float) -> None:
    """Looks every 2 s."""
    backlog = [Backlog(2.0 * number, float(count), 0.0) for number, count in enumerate(tokens)]
    assert stands(backlog, OBJECTIVES) == pytest.approx((share, 0.0))


def test_that_decode_workers_take_no_prefills_is_remembered_until_they_do() -> None:
    """Else a worker that was widened for these prefills would be narrowed once their backlog is gone."""
    state = PlannerState(least_share=1.0)
    told = []
    for on_prefill, on_decode in ((9000, 0), (0, 0), (9000, 6000), (9000, 0)):
        prefill, decode = workers(1, 1)
        both = loaded(prefill, num_prefill_tokens=on_prefill), loaded(decode, num_prefill_tokens=on_decode)
        state = heard(state, steady(1, 3000), OBJECTIVES)
        load = load_of(FleetView(now_s=0.0, workers=both), state)
        state = waits(state, 0.0, load, OBJECTIVES.window_s)
        told.append(state.least_share)
    # Of 15,000 tokens each worker is at a prompt of 3,000; of the 9,000 that wait 3,000 do at the decode worker.
    assert told == pytest.approx([1.0, 1.0, 2 / 3, 2 / 3])


def test_running_answers_count_before_they_end() -> None:
    """Two requests a second, known to be 50 tokens long. Ten of them run that have had 3,000 tokens, and none ends."""
    arrived = msgspec.structs.replace(steady(2, 400), num_ended=0, num_ended_tokens=0)
    fleet = FleetView(now_s=0.0, workers=workers(1, 1, num_running=5))

    def answer_tokens(num_generated: int) -> float:
        demand = msgspec.structs.replace(arrived, num_generated_tokens=num_generated)
        return load_of(fleet, heard(PlannerState(answer_tokens=50.0), demand, OBJECTIVES)).answer_tokens

    assert answer_tokens(0) == 50.0
    assert answer_tokens(250) == 50.0  # 10 running answers, half done
    assert answer_tokens(3000) == 750.0  # of 4 requests


def test_requests_that_wait_for_their_kv_are_no_answers() -> None:
    state = heard(PlannerState(answer_tokens=30.0), steady(4, 400, 30), OBJECTIVES)
    waiting = FleetView(now_s=0.0, workers=workers(1, 1, num_admitted=60, num_running=2))
    assert load_of(waiting, state).answer_tokens == 30.0


def test_what_waits_is_beyond_a_prompt_a_worker_and_answers_wait_at_full_workers() -> None:
    """Two ready workers are at a prompt of 1,000 tokens each. Answers wait for a slot or for blocks, not for a step."""
    full = ({"num_admitted": 256, "num_waiting": 3}, {"cache_usage": 0.95, "num_waiting": 5}, {"num_waiting": 7})
    states = [loaded(worker, **load) for worker, load in zip(workers(0, 3), full)]
    unready = msgspec.structs.replace(loaded(states[0], num_prefill_tokens=9000), is_ready=False)
    view = FleetView(now_s=0.0, workers=(*states[:2], unready), num_queued_prefill_tokens=2500)
    load = load_of(view, heard(PlannerState(), steady(1, 1000), OBJECTIVES))
    assert (load.waiting_tokens, load.waiting_answers) == (500.0, 8.0)
    load = load_of(FleetView(now_s=0.0, workers=tuple(states)), PlannerState())
    assert (load.waiting_tokens, load.waiting_answers) == (0.0, 8.0)


def test_lengths_vary_by_their_squares() -> None:
    """A prompt of 1,000 tokens and one of 3,000: the deviation is half of the mean."""
    traffic = Traffic()
    for num_tokens in (1000, 3000):
        traffic.arrived(num_tokens)
    state = heard(PlannerState(), traffic.demand(2.0), OBJECTIVES)
    assert load_of(FleetView(now_s=0.0, workers=workers(1, 1)), state).variation == pytest.approx(0.5)


def test_generated_tokens_are_those_of_workers_that_answer_and_were_seen_before() -> None:
    before = workers(1, 2, tokens=TokenCounts(num_generated=100))[:-1]
    assert generated_since(before, workers(1, 2, tokens=TokenCounts(num_generated=130))) == 30
    assert generated_since(before, workers(1, 1, tokens=TokenCounts(num_generated=7))) == 0  # restarted
    assert generated_since(before, workers(1, 1, tokens=None)) == 0  # of an earlier release


def test_a_trend_is_a_slope_and_nothing_without_samples() -> None:
    assert trend([steady(1)] * 3) == 0.0
    assert trend([steady(3)] * 20) == pytest.approx(0.0)
    assert trend([steady(rate) for rate in range(1, 40)]) == pytest.approx(0.5, rel=0.2)  # one a tick of 2 s


def test_steady_arrivals_hardly_ever_seem_to_grow_and_a_ramp_does() -> None:
    rng = np.random.default_rng(3)
    assert sum(growth([poisson(rng, 3.0, 2000) for _ in range(24)]) > 0.0 for _ in range(300)) <= 6
    assert growth([poisson(rng, rate, 2000) for rate in np.linspace(3.0, 12.0, 24)]) == pytest.approx(0.16, rel=0.5)


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
