"""A burst of long prompts by cost: both workers share it, and chats wait for a step only."""

from __future__ import annotations

import random

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


AGEING_S, NUM_CLIENTS = 2.0, 24


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_workers", [0, 1])
def test_clients_of_a_better_priority_starve_nobody(num_workers: int, seed: int) -> None:
    """24 of them always have a request here, and there are too few slots for all. A request of priority 0 has its first
    token within the ageing time and the time of what runs already."""
    rng = random.Random(seed)
    simulation = BurstSimulation(num_workers=num_workers, max_num_seqs=4, priority_ageing_s=AGEING_S)
    num_asked = 0
    others = [f"normal-{number}" for number in range(3)]
    while not simulation.first_token_s.keys() >= set(others):
        while simulation.engine.num_requests - len(others) * (num_asked > NUM_CLIENTS) < NUM_CLIENTS:
            num_tokens = rng.choice((30, 500, 4000))
            simulation.add(f"better-{num_asked}", num_tokens, rng.randrange(1, 40), priority=-1)
            num_asked += 1
            if num_asked == NUM_CLIENTS:
                for name in others:
                    simulation.add(name, rng.choice((30, 4000)))
        simulation.step()
        assert simulation.clock.now() < 10 * AGEING_S, "starved"
    waits = [simulation.first_token_s[name] - simulation.arrived_s[name] for name in others]
    assert min(waits) >= 0.5 * AGEING_S, "the test needs that it would starve without ageing"
    # Ageing moves one request of a class at a time, so the three come one after the other.
    assert max(waits) <= AGEING_S + 1.5
