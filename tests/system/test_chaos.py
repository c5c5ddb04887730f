"""The short form of ``kvrelay bench chaos``: a minute of faults against real processes, every answer known."""

from __future__ import annotations

import json

import pytest
from tests.system.serving import kvrelay

from kvrelay.bench.chaos.plan import FaultKind, make_plan

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(600)]

SEED = 14
DURATION_S = 45
INTERVAL_S = 2.0
"""With this seed every kind of fault comes once."""
PAUSES = {"pause P99 after SIGKILL of a worker, s", "pause P99 after SIGKILL of a decode worker, s"}
"""Targets that a busy machine may miss."""


def test_nothing_is_lost_in_a_minute_of_chaos():
    done = kvrelay(
        "bench",
        "chaos",
        "--engine",
        "mock",
        "--duration",
        str(DURATION_S),
        "--seed",
        str(SEED),
        "--fault-interval",
        str(INTERVAL_S),
        "--json",
        timeout_s=500,
    )
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}"
    report = json.loads(done.stdout)
    bad = ("wrong", "missing", "repeated", "failed", "hung", "leaked_blocks", "skipped_faults")
    assert {name: report[name] for name in bad} == dict.fromkeys(bad, 0)
    assert report["problems"] == []
    assert {target["name"] for target in report["targets"] if target["is_met"] is False} <= PAUSES
    assert report["right"] > 50
    assert report["cancelled"] > 0
    assert report["remote_prefills"] > 20
    planned = [fault.name for fault in make_plan(DURATION_S, SEED, interval_s=INTERVAL_S)]
    assert {name: summary["count"] for name, summary in report["faults"].items()} == {
        name: planned.count(name) for name in planned
    }
    assert {name.split()[0] for name in planned} == {str(kind) for kind in FaultKind}


def test_nothing_is_lost_in_a_minute_of_chaos_with_prefill_first():
    done = kvrelay(
        *("bench", "chaos", "--engine", "mock", "--order", "prefill-first", "--json"),
        *("--duration", "60", "--seed", str(SEED), "--fault-interval", str(INTERVAL_S)),
        timeout_s=500,
    )
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}"
    report = json.loads(done.stdout)
    bad = ("wrong", "missing", "repeated", "failed", "hung", "leaked_blocks", "skipped_faults")
    assert {name: report[name] for name in bad} == dict.fromkeys(bad, 0)
    assert report["problems"] == []
    assert report["right"] > 50
    assert report["remote_prefills"] > 20
