"""Where an objective breaks."""

from __future__ import annotations

import pytest
from benchmarks.simulator import crossing


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
