"""The cost model: it finds the truth from steps, starts sound, and no sample can break it."""

from __future__ import annotations

import math
import random
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.step_cost import MAX_CHUNK_TOKENS, MAX_COST_S, StepCost, StepWork, median_cost, prefill_pairs
from kvrelay.placement.cost_model import (
    MANY_DECODES,
    MANY_STEPS,
    MAX_SPREAD,
    PRIOR_SPREAD,
    SAMPLED_STEPS,
    SHORT_STEP_S,
    SPREAD_SHARE,
    RemoteCost,
    RemoteCostModel,
    Spread,
    StepCostModel,
    expected_lateness,
)
from kvrelay.placement.least_squares import RecursiveLeastSquares

MOCK = StepCost(0.002, 0.003, 1e-5, 0.0, 2.5e-5, 0.0)
CPU = StepCost(0.010, 0.014, 2e-3, 2e-7, 3e-3, 2e-7)


def some_work(rng: random.Random) -> StepWork:
    tokens = rng.choice((0, 0, 0, rng.randrange(1, 2048)))
    decodes = rng.randrange(0, 64) if tokens else rng.randrange(1, 64)
    return StepWork(tokens, tokens * rng.randrange(0, 8000), decodes, decodes * rng.randrange(1, 4000))


@pytest.mark.parametrize("truth", [MOCK, CPU], ids=["mock", "cpu"])
def test_it_finds_the_truth_from_noisy_steps(truth: StepCost) -> None:
    rng, model = random.Random(1), StepCostModel()
    for _ in range(600):
        work = some_work(rng)
        model.add(work, truth.step_seconds(work) * rng.uniform(0.95, 1.05))
    works = [some_work(rng) for _ in range(200)]
    errors = [abs(model.cost.step_seconds(work) / truth.step_seconds(work) - 1.0) for work in works]
    assert sum(errors) / len(errors) < 0.05
    assert max(errors) < 0.5
    assert model.relative_error < 0.1
    assert model.cost.prefill_token_s == pytest.approx(truth.prefill_token_s, rel=0.15)


def test_what_answers_cost_is_learnt_from_steps_with_prefills() -> None:
    """Under overload there are no others. What two answers once showed says little of a hundred."""
    rng, model, truth = random.Random(7), StepCostModel(), StepCost(0.007, 0.007, 3e-5, 1e-9, 1e-5, 5e-8)

    def add(work: StepWork, factor: float) -> None:
        model.add(work, truth.step_seconds(work) * factor * rng.uniform(0.97, 1.03))

    for _ in range(100):  # Slower for a while: as if each answer cost ten times as much.
        add(StepWork(0, 0, 2, rng.randrange(600, 1000)), 1.05)
    for number in range(1000):
        decodes = min(number // 5, 100)
        add(StepWork(rng.randrange(64, 600), rng.randrange(0, 10**6), decodes, decodes * rng.randrange(300, 500)), 1.0)
    answers = StepWork(0, 0, 100, 40_000)
    assert model.cost.step_seconds(answers) == pytest.approx(truth.step_seconds(answers), rel=0.05)


def test_it_follows_a_worker_that_becomes_slower() -> None:
    rng, model = random.Random(2), StepCostModel()
    for factor in (1.0, 4.0):
        for _ in range(800):
            work = some_work(rng)
            model.add(work, MOCK.step_seconds(work) * factor)
        work = StepWork(1024, 0, 8, 8000)
        assert model.cost.step_seconds(work) == pytest.approx(MOCK.step_seconds(work) * factor, rel=0.1)


def test_decodes_alone_do_not_make_it_forget_what_a_prefill_costs() -> None:
    rng, model = random.Random(3), StepCostModel()
    for _ in range(400):
        work = some_work(rng)
        model.add(work, CPU.step_seconds(work))
    for _ in range(20_000):
        work = StepWork(0, 0, 8, 8 * rng.randrange(100, 200))
        model.add(work, CPU.step_seconds(work) * rng.uniform(0.8, 1.2))
    assert model.cost.prefill_token_s == pytest.approx(CPU.prefill_token_s, rel=0.5)


def test_of_many_short_prefills_a_part_is_a_sample_and_a_long_one_always_is() -> None:
    model = StepCostModel()
    for _ in range(MANY_STEPS + 40 * SAMPLED_STEPS):
        model.add(StepWork(32, 0, 0, 0), SHORT_STEP_S / 2)
    assert model.num_samples == MANY_STEPS + 40
    assert model.cost.step_seconds(StepWork(32, 0, 0, 0)) == pytest.approx(SHORT_STEP_S / 2, rel=0.2)
    for _ in range(10):
        model.add(StepWork(2048, 0, 0, 0), 2 * SHORT_STEP_S)
    assert model.num_samples == MANY_STEPS + 50


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e9])
def test_impossible_times_change_nothing(seconds: float) -> None:
    model = StepCostModel()
    before = model.cost
    model.add(StepWork(100, 0, 1, 1), seconds)
    assert (model.cost, model.num_samples, model.num_rejected) == (before, 0, 1)


def test_impossible_features_change_nothing() -> None:
    fit = RecursiveLeastSquares((1.0, 1.0))
    for features in ((math.nan, 1.0), (-1.0, 0.0), (math.inf, 1.0), (0.0, 0.0)):
        assert not fit.add(features, 1.0)
    assert fit.coefficients == (1.0, 1.0)
    with pytest.raises(ValueError, match="above zero"):
        RecursiveLeastSquares((1.0, 0.0))


def test_what_another_thread_reads_is_never_below_zero() -> None:
    """Metrics and frontends get the coefficients while the engine's thread adds samples."""
    lowest: list[float] = []

    class Read(RecursiveLeastSquares):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            with suppress(AttributeError):  # not made yet
                lowest.append(min(self.coefficients))

    fit = Read((1.0, 1.0))
    for features, seconds in ((1.0, 0.0), 3.0), ((1.0, 1.0), 1.0), ((1.0, 2.0), 0.1):
        fit.add(features, seconds)
    assert fit.coefficients[1] == 0.0, "negative by the samples"
    assert min(lowest) >= 0.0


def test_one_sample_is_believed_where_it_says_something() -> None:
    model = StepCostModel()
    work = StepWork(1000, 0, 0, 0)
    model.add(work, 0.5)
    assert 0.05 < model.cost.step_seconds(work) < 0.6
    assert model.cost.is_sound


@pytest.mark.parametrize("truth", [MOCK, CPU], ids=["mock", "cpu"])
def test_steps_that_are_all_alike_are_predicted_and_nothing_is_made_up(truth: StepCost) -> None:
    """Chunks of one size on a busy machine: base, token and pair cannot be told apart."""
    for seed in range(5):
        rng, model = random.Random(seed), StepCostModel()
        for number in range(1000):
            work = StepWork(2048 if number % 4 else 1856, (number % 4) * 2048 * 2048, 0, 0)
            model.add(work, truth.step_seconds(work) * rng.choice((1.0, 1.1, 1.3, 3.0)))
            if number > 100:
                ratio = model.cost.step_seconds(work) / truth.step_seconds(work)
                assert 0.8 < ratio < 3.0
        assert model.relative_error < 0.8
        small = StepWork(64, 0, 0, 0)
        assert model.cost.step_seconds(small) < truth.step_seconds(StepWork(2048, 0, 0, 0)) * 3


def test_a_pause_of_the_process_moves_it_a_little_only() -> None:
    rng, model = random.Random(4), StepCostModel()
    for _ in range(500):
        work = some_work(rng)
        model.add(work, MOCK.step_seconds(work) * rng.uniform(0.9, 1.1))
    work = StepWork(0, 0, 16, 1000)
    before = model.cost.step_seconds(work)
    model.add(work, 10.0)
    assert model.cost.step_seconds(work) < 1.5 * before


def test_any_stream_of_samples_leaves_estimates_finite_and_monotone() -> None:
    rng = random.Random(5)
    for _ in range(30):
        model = StepCostModel()
        for _ in range(200):
            model.add(some_work(rng), rng.choice((1e-9, 1e-4, 0.003, 1.0, 500.0, math.nan, -1.0)) * rng.random())
        cost = model.cost
        assert cost.is_sound
        last = 0.0
        for tokens in (0, 1, 64, 1000, 100_000, 10**9):
            seconds = cost.prefill_seconds(tokens, num_before=tokens, num_decodes=5)
            assert last <= seconds <= MAX_COST_S
            last = seconds
        steps = [cost.step_seconds(StepWork(100, 0, decodes, 0)) for decodes in (0, 1, 10, 10_000)]
        assert steps == sorted(steps)


def test_equal_samples_give_equal_models() -> None:
    def fitted() -> StepCost:
        rng, model = random.Random(6), StepCostModel()
        for _ in range(100):
            model.add(some_work(rng), rng.random())
        return model.cost

    assert fitted() == fitted()


def chunk_within(cost: StepCost, step_s: float, num_before: int = 0, num_decodes: int = 0, num_context: int = 0) -> int:
    """The most prefill tokens with which a step takes at most ``step_s``."""
    rest_s = cost.prefill_s + cost.decode_s * num_decodes + cost.context_s * num_context
    return cost.tokens_within(step_s - rest_s, num_before)


def test_a_chunk_keeps_the_step_within_its_time() -> None:
    for target_s in (0.02, 0.1, 1.0):
        chunk = chunk_within(CPU, target_s, num_before=500, num_decodes=2, num_context=1000)
        seconds, more_s = (
            CPU.step_seconds(StepWork(count, prefill_pairs(count, 500), 2, 1000)) for count in (chunk, chunk + 1)
        )
        assert seconds <= target_s < more_s or chunk == 0
    assert chunk_within(MOCK, 0.02) in (1699, 1700)
    assert chunk_within(MOCK, -1.0) == 0
    nearly_free = StepCost(prefill_token_s=5e-324, pair_s=0.0)  # the quotient is infinite
    assert chunk_within(nearly_free, 0.001) == 0
    assert chunk_within(nearly_free, 1.0) == MAX_CHUNK_TOKENS


@pytest.mark.parametrize("chunk", [100, 250, 1000])
def test_the_steps_of_a_prefill_take_what_the_prefill_takes(chunk: int) -> None:
    """Whatever its chunks, a prompt has the same pairs."""
    steps_s = [CPU.step_seconds(StepWork(chunk, prefill_pairs(chunk, begun))) for begun in range(300, 1300, chunk)]
    assert sum(steps_s) == pytest.approx(CPU.prefill_seconds(1000, num_before=300, chunk=chunk))


VLLM_STEPS_MS = {
    (200, 0): 12.6,
    (450, 0): 25.3,
    (450, 450): 32.1,
    (450, 900): 39.7,
    (450, 1350): 49.4,
    (600, 0): 35.0,
    (600, 600): 47.1,
    (600, 1200): 61.2,
    (900, 0): 54.0,
    (900, 900): 87.8,
    (1800, 0): 136.5,
}
"""CPU time of steps of vLLM 0.32 (bundled model in float32, one thread): tokens of a prompt after others of it."""


def test_it_knows_what_a_whole_prompt_costs_beside_its_parts() -> None:
    """The tokens of one chunk look at each other, too: without these pairs 1,800 tokens at once seemed to take as long
    as four parts of 450 without any before them, and no coefficients were right for both."""
    rng, model = random.Random(5), StepCostModel()
    steps = [(StepWork(count, prefill_pairs(count, begun)), ms / 1e3) for (count, begun), ms in VLLM_STEPS_MS.items()]
    for _ in range(40):
        for work, seconds in rng.sample(steps, len(steps)):
            model.add(work, seconds)
    assert [model.cost.step_seconds(work) for work, _ in steps] == [
        pytest.approx(seconds, rel=0.08) for _, seconds in steps
    ]
    assert model.spread < 0.05


def test_a_prefill_in_more_chunks_takes_longer_and_adds_the_same_beside() -> None:
    assert MOCK.prefill_seconds(8000, chunk=2048) == pytest.approx(4 * 0.003 + 0.08)
    assert MOCK.prefill_seconds(8000, chunk=512) > MOCK.prefill_seconds(8000, chunk=2048)
    assert MOCK.added_seconds(8000, chunk=2048) == pytest.approx(4 * 0.001 + 0.08)
    assert MOCK.prefill_seconds(0) == MOCK.added_seconds(0) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e-9, 1e9])
def test_nonsense_of_a_worker_is_not_sound(value: float) -> None:
    assert not StepCost(prefill_token_s=value).is_sound
    assert not RemoteCost(wait_token_s=value).is_sound
    assert 0.0 <= StepCost(prefill_token_s=value).prefill_seconds(10) <= MAX_COST_S
    assert 0.0 <= RemoteCost(wait_token_s=value).seconds(10, 10) <= MAX_COST_S


def test_the_way_through_the_queue_is_found() -> None:
    rng, model = random.Random(7), RemoteCostModel()
    truth = RemoteCost(0.004, 1.05e-5, 1e-6, 0.003, 1e-5)
    for _ in range(400):
        tokens, ahead = rng.randrange(300, 8000), rng.choice((0, rng.randrange(40_000)))
        prefill_s = truth.prefill_s + truth.prefill_token_s * tokens
        model.add(tokens, ahead, truth.seconds(tokens, ahead) * rng.uniform(0.97, 1.03), prefill_s)
    for tokens, ahead in ((500, 0), (8000, 0), (8000, 100_000)):
        assert model.cost.seconds(tokens, ahead) == pytest.approx(truth.seconds(tokens, ahead), rel=0.2)
    assert model.cost.wait_token_s == pytest.approx(truth.wait_token_s, rel=0.15)


def test_a_prefill_worker_that_reports_nonsense_is_not_believed() -> None:
    model = RemoteCostModel()
    for prefill_s in (math.nan, -1.0, 99.0, 0.0):
        model.add(1000, 0, 0.05, prefill_s)
    assert model.num_samples == 4
    assert model.cost.is_sound
    assert model.cost.prefill_token_s == RemoteCost().prefill_token_s
    model.add(1000, 0, math.nan, 0.01)
    assert model.num_rejected == 1


def test_expected_lateness_grows_with_the_estimate_and_the_spread() -> None:
    assert expected_lateness(0.5, 0.0, 0.3) == pytest.approx(0.2)
    assert expected_lateness(0.2, 0.0, 0.3) == 0.0
    assert expected_lateness(0.2, 0.5, -0.1) == pytest.approx(0.3)
    assert expected_lateness(0.0, 0.5, 0.3) == 0.0
    for spread in (0.0, 1e-4, 0.1, 0.5, 1.0):
        found = [expected_lateness(number / 50, spread, 0.3) for number in range(100)]
        assert found == sorted(found)
        assert all(math.isfinite(value) and value >= 0.0 for value in found)
    scattered = [expected_lateness(0.2, spread, 0.3) for spread in (0.0, 0.1, 0.3, 0.6)]
    assert scattered == sorted(scattered)
    rng = random.Random(1)
    times = [0.2 * rng.lognormvariate(0.0, 0.4) for _ in range(100_000)]
    mean_s = sum(max(time_s - 0.3, 0.0) for time_s in times) / len(times)
    assert expected_lateness(0.2, 0.4, 0.3) == pytest.approx(mean_s, rel=0.05)


def test_errors_of_a_model_that_still_learns_are_not_its_spread() -> None:
    """The prior may be wrong by a factor of ten: that says nothing of how the steps scatter."""
    model = StepCostModel(StepCost(0.04, 0.06, 5e-4, 5e-8, 5e-4, 1e-8))
    for number in range(40):
        work = StepWork(64 * (1 + number % 4), 0, 4, 100)
        model.add(work, StepCost().step_seconds(work))
    assert model.spread < PRIOR_SPREAD


def test_a_spread_that_is_not_measured_goes_back_to_the_prior() -> None:
    """A large spread makes chunks small and the way dear; not taken, the way is not measured."""
    model = StepCostModel()
    rng = random.Random(3)
    for _ in range(200):
        model.add(StepWork(64, 0, 4, 100), StepCost().step_seconds(StepWork(64, 0, 4, 100)) * rng.choice((0.4, 2.5)))
    scattered = model.spread
    assert scattered > 1.5 * PRIOR_SPREAD
    for _ in range(40 * MANY_STEPS):
        model.add(StepWork(0, 0, 4, 100), StepCost().step_seconds(StepWork(0, 0, 4, 100)))
    assert model.spread < (scattered + PRIOR_SPREAD) / 2


def test_a_spread_begins_cautious_and_a_pause_counts_little() -> None:
    spread = Spread()
    assert spread.value == PRIOR_SPREAD
    for _ in range(100):
        spread.add(0.01, 0.01)
    exact = spread.value
    assert exact < 0.05
    spread.add(100.0, 0.01)
    assert spread.value <= math.sqrt(1 + 3 * SPREAD_SHARE) * exact, "it counts as an error of two spreads"
    before = spread.value
    for seconds, estimate_s in ((math.nan, 0.01), (0.0, 0.01), (-1.0, 0.01), (0.01, 0.0)):
        spread.add(seconds, estimate_s)
    assert spread.value == before


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=300))
def test_no_sample_makes_a_spread_impossible(samples: list[tuple[float, float]]) -> None:
    spread = Spread()
    for seconds, estimate_s in samples:
        spread.add(seconds, estimate_s)
        assert 0.0 <= spread.value <= MAX_SPREAD


def test_absurd_times_keep_a_spread_bounded() -> None:
    spread = Spread()
    for number in range(1000):
        spread.add(*((600.0, 5e-324) if number % 2 else (5e-324, 600.0)))
    assert spread.value == pytest.approx(MAX_SPREAD)


@given(st.lists(st.floats(0.001, 1000.0), max_size=50))
def test_ageing_goes_to_the_prior_and_not_beyond(seconds: list[float]) -> None:
    spread = Spread()
    for each in seconds:
        spread.add(each, 1.0)
    distance = spread.value - PRIOR_SPREAD
    for _ in range(50):
        spread.age()
        nearer = spread.value - PRIOR_SPREAD
        assert min(distance, 0.0) - 1e-12 <= nearer <= max(distance, 0.0) + 1e-12
        distance = nearer


SECONDS = st.floats(0.0, MAX_COST_S) | st.sampled_from([5e-324, 1e-300, 1e-9])


@given(SECONDS, SECONDS, st.floats(0.0, MAX_SPREAD), st.floats(-1e6, 1e6) | SECONDS)
def test_expected_lateness_is_finite_and_monotone(one_s: float, other_s: float, spread: float, limit_s: float) -> None:
    less, more = (expected_lateness(seconds, spread, limit_s) for seconds in sorted((one_s, other_s)))
    assert 0.0 <= less <= more * (1 + 1e-9) + 1e-12
    assert math.isfinite(more)


def test_a_remote_model_that_begins_anew_has_no_scatter_yet() -> None:
    """The first times after it are far from the prior: that is not how they scatter."""
    model = RemoteCostModel()
    for number in range(60):
        model.add(1000, 0.0, 0.3 + 0.1 * (number % 2), 0.1)
    model.begin_anew()
    assert model.spread == PRIOR_SPREAD
    for _ in range(20):
        model.add(1000, 0.0, 5.0, 2.0)
    assert model.spread < PRIOR_SPREAD


def test_the_tokens_of_a_step_are_learnt_from_what_is_accepted() -> None:
    model, work = StepCostModel(), StepWork(0, 0, 8, 800)
    model.add(work, 0.01)
    assert model.cost.tokens_per_step == 1.0
    model.add(StepWork(0, 0, 8, 800, 12), 0.01)
    model.add(StepWork(64, 0, 4, 400, 10), 0.01)
    assert model.cost.tokens_per_step == 1.0 + 22 / 20
    assert model.cost.token_seconds(work) == model.cost.step_seconds(work) / 2.1


def test_tokens_of_long_ago_count_less() -> None:
    """After MANY_DECODES with an accepted token each, four times as many without one halve the sums eight times."""
    model = StepCostModel(StepCost(tokens_per_step=3.0))
    assert model.cost.tokens_per_step == 3.0, "the prior, until a token is accepted"
    for num_accepted, num_steps in ((64, MANY_DECODES // 64), (0, 4 * MANY_DECODES // 64)):
        for _ in range(num_steps):
            model.add(StepWork(0, 0, 64, 640, num_accepted), 0.01)
        if num_accepted:
            assert model.cost.tokens_per_step == 2.0
    assert 1.0 < model.cost.tokens_per_step < 1.0 + 1 / 64


@pytest.mark.parametrize("tokens", [0.0, 0.99, -2.0, math.nan, math.inf, 1001.0])
def test_a_step_yields_a_token_at_least_and_no_thousands(tokens: float) -> None:
    assert not StepCost(tokens_per_step=tokens).is_sound
    assert StepCost(tokens_per_step=2.4).is_sound


def test_workers_that_decode_tell_the_tokens_of_a_step() -> None:
    drafting = [("decode", StepCost(step_s=0.01, tokens_per_step=tokens)) for tokens in (2.0, 2.4)]
    cost, missing = median_cost([("prefill", StepCost(prefill_s=0.02)), *drafting])
    assert (cost.tokens_per_step, cost.step_s, cost.prefill_s, missing) == (2.2, 0.01, 0.02, ())
