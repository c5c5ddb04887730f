"""Where an objective breaks, and which prefills are remote."""

from __future__ import annotations

import pytest
from benchmarks.simulator import crossing, in_turn, remote_share

from kvrelay.config import DisaggConfig
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.cluster import ClusterSpec
from kvrelay.simulate.costs import Costs


@pytest.mark.parametrize(
    ("attained", "rate"),
    [
        ([(1.0, 1.0), (2.0, 0.8)], 1.5),
        ([(1.0, 1.0), (2.0, 0.95), (4.0, 0.85)], 3.0),
        ([(1.0, 0.9), (2.0, 0.0)], 1.0),
        ([(1.0, 1.0), (2.0, 0.9)], None),
        ([(1.0, 0.5), (2.0, 0.4)], None),
    ],
)
def test_an_objective_breaks_between_two_rates(attained: list[tuple[float, float]], rate: float | None) -> None:
    assert crossing(attained) == (None if rate is None else pytest.approx(rate))


def test_a_load_after_another_keeps_its_times_and_its_order() -> None:
    first = [Arrival(time_s=0.5, prompt_tokens=9, answer_tokens=2)]
    second = [
        Arrival(time_s=1.0, prompt_tokens=8, answer_tokens=3),
        Arrival(time_s=0.25, prompt_tokens=7, answer_tokens=4, after=0),
    ]
    found = in_turn(first, second, 30.0)
    assert [(one.time_s, one.after, one.prompt_tokens) for one in found] == [
        (0.5, None, 9),
        (31.0, None, 8),
        (0.25, 1, 7),
    ]


def test_the_share_of_remote_prefills_is_that_of_the_second_load_alone() -> None:
    """By threshold: prompts above 256 tokens are remote. The load before has only remote ones, and does not count."""
    spec = ClusterSpec(1, 1, disagg=DisaggConfig(disagg_policy="threshold", max_local_prefill_length=256))
    served = [Arrival(time_s=at / 10, prompt_tokens=400, answer_tokens=4) for at in range(6)]
    arrivals = [Arrival(time_s=at / 10, prompt_tokens=400 if at == 0 else 40, answer_tokens=4) for at in range(4)]
    assert remote_share(spec, Costs(), served, arrivals, 0) == 0.25
    assert remote_share(spec, Costs(), (), served, 0) == 1.0
