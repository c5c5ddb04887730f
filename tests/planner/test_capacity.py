"""The capacity model: finite and monotone in the load, and right about which side is short."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planner.toy import COST, OBJECTIVES

from kvrelay.core.step_cost import StepCost
from kvrelay.planner.capacity import Load, Shape, Worker, assess, standing

WORKER = Worker(cost=COST, kv_tokens=262_144, spread=0.03)
loads = st.builds(
    Load,
    requests_per_s=st.floats(0.01, 100.0),
    uncached_tokens=st.floats(1.0, 16_000.0),
    prompt_tokens=st.floats(16_000.0, 20_000.0),
    answer_tokens=st.floats(1.0, 2000.0),
    variation=st.floats(0.0, 2.0),
    waiting_tokens=st.floats(0.0, 1e6),
    waiting_answers=st.floats(0.0, 100.0),
)
shapes = st.builds(Shape, prefill=st.integers(0, 8), decode=st.integers(0, 8), both=st.integers(0, 8)).filter(
    lambda shape: shape.is_allowed
)
costs = st.builds(
    StepCost,
    step_s=st.floats(1e-4, 0.1),
    prefill_s=st.floats(0.0, 0.1),
    prefill_token_s=st.floats(0.0, 1e-3),
    pair_s=st.floats(0.0, 1e-7),
    decode_s=st.floats(0.0, 1e-2),
    context_s=st.floats(0.0, 1e-6),
    tokens_per_step=st.floats(1.0, 8.0),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(shapes, loads, costs, st.floats(1.0, 4.0), st.floats(0.0, 0.5))
def test_lateness_is_finite_and_rises_with_the_rate(
    shape: Shape, load: Load, cost: StepCost, times: float, spread: float
) -> None:
    worker = msgspec.structs.replace(WORKER, cost=cost, spread=spread)
    more = msgspec.structs.replace(load, requests_per_s=load.requests_per_s * times)
    before, after = (assess(shape, some, worker, OBJECTIVES) for some in (load, more))
    assert math.isfinite(after.lateness)
    assert 0.0 <= before.lateness <= after.lateness * (1.0 + 1e-9)


@pytest.mark.parametrize(
    ("shape", "rates", "prompt", "answer", "cost"),
    [
        (Shape(both=1), (0.92, 1.15), 510, 250, StepCost(0.0015, 0.05, 1.8e-4, 0.0, 2.3e-3, 0.0)),
        (Shape(both=4), (5.1, 7.65), 1200, 67, StepCost(0.0065, 0.066, 1.1e-4, 0.0, 5.3e-3, 0.0)),
        (Shape(both=4), (7.0, 7.7), 170, 680, StepCost(0.00042, 0.055, 1.6e-4, 0.0, 5e-4, 0.0)),
    ],
)
def test_larger_chunks_beside_more_answers_do_not_save_a_fleet(
    shape: Shape, rates: tuple[float, ...], prompt: int, answer: int, cost: StepCost
) -> None:
    """Where two decode steps exceed the objective, chunks grow with the running answers, and a prefill takes fewer
    expensive steps. The expected lateness fell with it, in the second example from 1,747 to 70 s/s."""
    worker = msgspec.structs.replace(WORKER, cost=cost)
    found = [
        assess(
            shape,
            Load(requests_per_s=rate, uncached_tokens=prompt, prompt_tokens=prompt, answer_tokens=answer),
            worker,
            OBJECTIVES,
        )
        for rate in rates
    ]
    assert found[0].lateness < found[1].lateness
    assert found[0].prefill_utilisation < found[1].prefill_utilisation


@settings(max_examples=50, deadline=None, derandomize=True)
@given(shapes, loads, costs)
def test_steps_that_cost_nothing_by_themselves_are_no_defect(shape: Shape, load: Load, cost: StepCost) -> None:
    """A fit over steps that were never empty may say so."""
    free = msgspec.structs.replace(cost, step_s=0.0, prefill_s=0.0, context_s=max(cost.context_s, 1e-9))
    assert free.is_sound
    for sent in (load, msgspec.structs.replace(load, uncached_tokens=0.0, answer_tokens=0.0)):
        assert math.isfinite(assess(shape, sent, msgspec.structs.replace(WORKER, cost=free), OBJECTIVES).lateness)


def late(shape: Shape, rate: float, prompt: int, answer: int) -> float:
    load = Load(requests_per_s=rate, uncached_tokens=prompt, prompt_tokens=prompt, answer_tokens=answer)
    return assess(shape, load, WORKER, OBJECTIVES).lateness


@pytest.mark.parametrize(("prompt", "answer", "best"), [(3600, 40, Shape(3, 1)), (400, 360, Shape(1, 3))])
def test_the_longer_half_gets_more_workers(prompt: int, answer: int, best: Shape) -> None:
    shapes = [Shape(prefill, 4 - prefill) for prefill in (1, 2, 3)]
    assert min(shapes, key=lambda shape: late(shape, 5.0, prompt, answer)) == best


def test_a_queue_counts_before_the_workers_are_saturated() -> None:
    alone = COST.prefill_seconds(2000)
    quiet, busy = (late(Shape(2, 6), share * 2 / alone, 2000, 10) for share in (0.3, 0.9))
    assert busy > 100 * quiet  # at 90 % utilisation first tokens are late, which a count at 100 % does not see


def test_a_backlog_counts() -> None:
    load = Load(requests_per_s=1.0, uncached_tokens=2000, prompt_tokens=2000, answer_tokens=50)
    behind = msgspec.structs.replace(load, waiting_tokens=100_000)
    full = msgspec.structs.replace(load, waiting_answers=500)
    for worse in (behind, full):
        assert (
            assess(Shape(1, 1), worse, WORKER, OBJECTIVES).lateness
            > assess(Shape(1, 1), load, WORKER, OBJECTIVES).lateness
        )


def test_a_backlog_that_stands_is_drained_by_more_workers_only() -> None:
    """100 prompts wait, by the costs for workers that are hardly busy."""
    load = Load(
        requests_per_s=1.0, uncached_tokens=2000, prompt_tokens=2000, answer_tokens=50, waiting_tokens=2e5, pulled=1.0
    )
    stood = standing(Shape(1, 3), load, WORKER, OBJECTIVES, 1.0, 0.0)
    now, more_decode, more_prefill = (
        assess(shape, stood, WORKER, OBJECTIVES) for shape in (Shape(1, 3), Shape(1, 4), Shape(2, 3))
    )
    wait_s = 100 * COST.prefill_seconds(2000)
    assert now.ttft_s > wait_s
    assert more_decode.lateness == pytest.approx(now.lateness, rel=0.05), "they do not take these prefills"
    assert more_prefill.lateness < now.lateness / 2
    free = standing(Shape(1, 3), msgspec.structs.replace(load, pulled=0.0), WORKER, OBJECTIVES, 1.0, 0.0)
    assert free.least_share == 0.0


def test_a_worker_that_does_both_pulls_prefills_into_its_answers() -> None:
    assert late(Shape(2, 1, 1), 3.0, 800, 360) > late(Shape(2, 2), 3.0, 800, 360)


def test_nothing_takes_requests_without_a_decode_worker() -> None:
    assert late(Shape(3, 0), 1.0, 100, 10) == OBJECTIVES.horizon_s


def test_steps_of_several_tokens_carry_as_many_times_the_answers() -> None:
    """2.5 tokens a step: as many answers run at once at 2.5 times the rate, and each is done 2.5 times as fast."""
    load = Load(requests_per_s=2.0, uncached_tokens=0.0, prompt_tokens=1000, answer_tokens=200)
    drafting = msgspec.structs.replace(WORKER, cost=msgspec.structs.replace(COST, tokens_per_step=2.5))
    one = assess(Shape(both=1), load, WORKER, OBJECTIVES)
    other = assess(Shape(both=1), msgspec.structs.replace(load, requests_per_s=5.0), drafting, OBJECTIVES)
    assert one.itl_s > COST.step_s
    assert (other.itl_s, other.drain_s) == pytest.approx((one.itl_s / 2.5, one.drain_s / 2.5))
