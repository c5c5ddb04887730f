"""What scripts over several servers share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from benchmarks.loads import cpu_seconds

from kvrelay.bench.client.connection import parse_target
from kvrelay.cli.processes import run_async

Scripted = Callable[..., Any]


@pytest.mark.parametrize(
    ("metrics", "seconds"),
    [
        (b"process_start_time_seconds 7\nprocess_cpu_seconds_total 1.25\n", 1.25),
        (b"# HELP process_cpu_seconds_total 3\nother 1\n", None),
        (b"process_cpu_seconds_total what\n", None),
        (b"", None),
    ],
)
def test_cpu_time_as_the_metrics_tell(scripted: Scripted, metrics: bytes, seconds: float | None) -> None:
    with scripted(metrics=metrics) as server:
        found = run_async(cpu_seconds(parse_target(server.url)))
    assert math.isnan(found) if seconds is None else found == seconds
