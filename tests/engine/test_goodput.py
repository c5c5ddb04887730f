"""Goodput by policy, simulated: deciding by cost is the best at every rate, from almost idle to overload."""

from __future__ import annotations

import pytest
from tests.engine.goodput_simulation import GoodputSimulation, Machine, Policy

from kvrelay.placement.base import PrefillPlace

SECONDS = 12.0
NOISE_OF_RUNS = 0.02
OTHERS: tuple[Policy, ...] = ("threshold", "always", "aggregated")


def simulate(policy: Policy, rate: float, machine: Machine | None = None) -> GoodputSimulation:
    simulation = GoodputSimulation(policy, rate, machine=machine)
    simulation.run(SECONDS)
    return simulation


@pytest.mark.parametrize("rate", [0.5, pytest.param(3.0, marks=pytest.mark.matrix), 6.0])
def test_by_cost_as_many_answers_meet_their_objectives_as_under_the_best_other_policy(rate: float) -> None:
    by_cost = simulate("cost", rate).goodput()
    others = [simulate(policy, rate).goodput() for policy in OTHERS]
    assert by_cost >= max(others) - NOISE_OF_RUNS
    if rate == 6.0:
        assert by_cost >= 1.2 * min(others)


def test_a_first_prefill_that_is_slow_does_not_close_the_remote_way() -> None:
    simulation = simulate("cost", 2.0, Machine(cold=20.0))
    num_long = sum(not answer.is_chat for answer in simulation.answers)
    assert simulation.places[PrefillPlace.REMOTE] >= 0.7 * num_long
    assert simulation.goodput() >= 0.95
