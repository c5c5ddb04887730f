"""A burst of long prompts by cost: both workers share it, and chats wait for a step only."""

from __future__ import annotations

import pytest
from tests.engine.burst_simulation import BurstSimulation


@pytest.fixture(scope="module")
def alone_s() -> float:
    """The last first token of 60 long prompts on one worker."""
    simulation = BurstSimulation(num_workers=0)
    simulation.run(60)
    return simulation.last_first_token_s()


@pytest.mark.parametrize("way_s", [0.005, 0.05, 0.15])
def test_two_equal_workers_share_a_burst_however_long_the_way_is(way_s: float, alone_s: float) -> None:
    simulation = BurstSimulation(num_workers=1, way_s=way_s)
    simulation.run(60)
    assert simulation.last_first_token_s() <= 0.55 * alone_s
    assert simulation.workers[0].busy_s >= 0.8 * simulation.last_first_token_s()
    assert simulation.slowest_chat_s() <= 0.05


@pytest.mark.parametrize("way_s", [0.005, 0.15])
def test_two_prefill_workers_and_the_decode_worker_share_a_burst(way_s: float, alone_s: float) -> None:
    simulation = BurstSimulation(num_workers=2, way_s=way_s)
    simulation.run(60)
    assert simulation.last_first_token_s() <= 0.4 * alone_s
    assert all(worker.busy_s >= 0.7 * simulation.last_first_token_s() for worker in simulation.workers)
