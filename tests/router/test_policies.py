"""The policies, each as a pure function of the candidates' numbers."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest

from kvrelay.config import RouterConfig
from kvrelay.placement.seconds import FEW, Candidates, LoadColumns
from kvrelay.router.policies import build_policy, pick_best, pick_softmax


def candidates(**columns: list[float]) -> Candidates:
    size = len(next(iter(columns.values())))

    def column(name: str) -> np.ndarray:
        return np.array(columns.get(name, [0.0] * size), dtype=np.float64)

    load = LoadColumns(**{name: column(name) for name in LoadColumns.__struct_fields__})
    return Candidates(prompt_tokens=1600, block_size=16, overlap_blocks=column("overlap_blocks"), load=load)


def choose(name: str, given: Candidates, times: int = 1, **settings: float) -> list[int]:
    policy = build_policy(RouterConfig(router=name, **settings))  # type: ignore[arg-type]
    rng = random.Random(1)
    return [policy.pick(policy.scores(given), rng) for _ in range(times)]


def test_dynamo_v0_weighs_overlap_cache_usage_and_waiting() -> None:
    given = candidates(overlap_blocks=[50, 10, 0], cache_usage=[0.5, 0.25, 0.0], num_waiting=[4, 1, 0])
    scores = build_policy(RouterConfig(router="dynamo-v0")).scores(given)
    assert scores.tolist() == pytest.approx([2 * 0.5 - 0.5 - 1.0, 2 * 0.1 - 0.25 - 0.25, 0.0])
    assert choose("dynamo-v0", given) == [2]


def test_dynamo_v0_without_anyone_waiting() -> None:
    given = candidates(overlap_blocks=[50, 100], cache_usage=[0.5, 0.9])
    assert build_policy(RouterConfig(router="dynamo-v0")).scores(given).tolist() == pytest.approx([0.5, 1.1])


def test_kv_cost_is_prefill_plus_context_in_tokens() -> None:
    given = candidates(overlap_blocks=[100, 50, 0], prefill_tokens=[500, 0, 0], context_tokens=[1000, 100, 40])
    scores = build_policy(RouterConfig(router="kv", decode_weight=0.5)).scores(given)
    assert scores.tolist() == pytest.approx([-(350 + 0 + 500), -(800 + 50), -(1600 + 20)])
    heavier = build_policy(RouterConfig(router="kv", overlap_weight=2.0, decode_weight=0.0)).scores(given)
    assert heavier.tolist() == pytest.approx([-350, 0, -1600])


@pytest.mark.parametrize(("extra_load", "expected"), [(1500, 0), (1700, 1)])
def test_kv_affinity_ends_where_the_load_exceeds_what_the_prefix_saves(extra_load: int, expected: int) -> None:
    given = candidates(overlap_blocks=[100, 0], context_tokens=[extra_load, 0])
    assert choose("kv", given, decode_weight=1.0) == [expected]


def test_kv_temperature_draws_by_softmax() -> None:
    given = candidates(overlap_blocks=[100, 99, 0])
    counts = Counter(choose("kv", given, times=2000, temperature=0.5))
    weights = [1.0, math.exp(-0.01 / 0.5), math.exp(-1 / 0.5)]
    for at, weight in enumerate(weights):
        assert counts[at] / 2000 == pytest.approx(weight / sum(weights), abs=0.04)


def test_softmax_never_draws_what_is_excluded() -> None:
    rng = random.Random(3)
    scores = np.array([-np.inf, -1.0, -2.0, -np.inf])
    assert {pick_softmax(scores, 5.0, rng) for _ in range(300)} == {1, 2}
    assert {pick_softmax(np.array([-np.inf, -1.0]), 5.0, rng) for _ in range(50)} == {1}


def test_round_robin_takes_turns() -> None:
    assert choose("round-robin", candidates(cache_usage=[0.0] * 3), times=7) == [0, 1, 2, 0, 1, 2, 0]


def test_round_robin_skips_the_excluded() -> None:
    policy = build_policy(RouterConfig(router="round-robin"))
    given, rng, picked = candidates(cache_usage=[0.0] * 3), random.Random(0), []
    for _ in range(4):
        scores = policy.scores(given)
        scores[1] = -np.inf
        picked.append(policy.pick(scores, rng))
    assert picked == [0, 2, 0, 2]


def test_random_reaches_everyone_about_equally() -> None:
    counts = Counter(choose("random", candidates(cache_usage=[0.0] * 4), times=4000))
    assert all(counts[at] == pytest.approx(1000, abs=130) for at in range(4))


def test_least_loaded_counts_prefill_and_context() -> None:
    assert choose("least-loaded", candidates(prefill_tokens=[50, 10, 0], context_tokens=[0, 30, 41])) == [1]


def test_power_of_two_never_takes_the_most_loaded_and_spreads_over_the_rest() -> None:
    picked = Counter(choose("power-of-two", candidates(context_tokens=[4, 3, 2, 1]), times=1200))
    assert picked[0] == 0
    assert picked[3] > picked[2] > picked[1] > 100


def test_power_of_two_with_one_candidate_left() -> None:
    policy = build_policy(RouterConfig(router="power-of-two"))
    scores = np.array([-np.inf, -1.0, -np.inf])
    assert policy.pick(scores, random.Random(0)) == 1


def test_ties_are_drawn_at_random() -> None:
    rng = random.Random(5)
    assert {pick_best(np.array([1.0, 2.0, 2.0]), rng) for _ in range(50)} == {1, 2}


def test_ties_of_few_and_of_many_are_drawn_alike() -> None:
    few = np.array([1.0, 2.0, 0.0, 2.0, 2.0])
    many = np.concatenate([few, np.zeros(FEW)])
    draws = [[pick_best(scores, rng) for _ in range(20)] for scores in (few, many) for rng in [random.Random(3)]]
    assert draws[0] == draws[1]
    assert set(draws[0]) == {1, 3, 4}


def test_kv_gives_a_new_prefix_to_the_worker_that_has_had_the_least() -> None:
    recent = [1.0, 0.5, 0.2, 0.6]
    scores = build_policy(RouterConfig(router="kv")).scores(candidates(recent_share=recent))
    assert int(scores.argmax()) == 2
    held = candidates(recent_share=recent, overlap_blocks=[5, 0, 0, 0])
    assert int(build_policy(RouterConfig(router="kv")).scores(held).argmax()) == 0
