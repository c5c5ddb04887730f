"""``--early-reject``: a request that would be late in any case is refused; one that may be in time never is."""

from __future__ import annotations

import pytest
from tests.engine.burst_simulation import BurstSimulation

from kvrelay.core.sampling import SamplingParams
from kvrelay.core.step_cost import StepCost
from kvrelay.engine.request import Request
from kvrelay.errors import ObjectiveMissedError
from kvrelay.placement.cost import PlacementState


def arrive(
    simulation: BurstSimulation, name: str, num_tokens: int, *, refuses_late: bool = True, begun: int = 0
) -> None:
    policy = simulation.placement
    placement = PlacementState(policy, policy.objectives(), refuses_late=refuses_late)
    sampling = SamplingParams(max_tokens=8)
    request = Request(name, [7] * num_tokens, sampling, output_token_ids=[5] * begun, placement=placement)
    simulation.arrived_s[name] = simulation.clock.now()
    simulation.engine.add_request(request)


def test_only_what_cannot_be_in_time_is_refused() -> None:
    simulation = BurstSimulation(num_workers=1)
    simulation.run(3)
    for number in range(40):
        simulation.add(f"long-{number}-late", 8000)
    with pytest.raises(ObjectiveMissedError, match="at best; the objective") as caught:
        arrive(simulation, "late", 8000)
    assert caught.value.status == 429
    assert caught.value.retry_after_s >= 1.0
    assert "late" not in simulation.engine.scheduler.requests
    arrive(simulation, "chat", 30)
    arrive(simulation, "late, not refused", 8000, refuses_late=False)
    arrive(simulation, "late, begun", 8000, begun=2)
    simulation.run(0)
    simulation.engine.check_integrity()
    arrive(simulation, "long-in-time", 8000)
    simulation.run(0)
    assert simulation.first_token_s["long-in-time"] - simulation.arrived_s["long-in-time"] <= 0.5


def test_nothing_is_refused_on_costs_that_cannot_be() -> None:
    placement = BurstSimulation(num_workers=1).placement
    assert placement.soonest_s(8000, 10**9, StepCost(prefill_token_s=float("nan"))) == 0.0
    sound = [placement.soonest_s(8000, before, StepCost()) for before in (0, 1000, 10**6, 10**12)]
    assert sound == sorted(sound)
    assert sound[-1] <= 3600.0
