"""Relief is measured on real processes, by the planner's own actuator."""

from __future__ import annotations

import asyncio

import pytest
from benchmarks.relief import measure


@pytest.mark.matrix
def test_a_widened_worker_prefills_before_its_answers_have_ended() -> None:
    report = asyncio.run(measure(None, 1, 300))
    (widened,), (drained,) = report["seconds"]["widened"], report["seconds"]["drained"]
    assert 0.0 < widened < drained
