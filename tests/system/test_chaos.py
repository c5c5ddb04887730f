"""The short form of ``python -m tests.chaos``: faults against real processes, every answer known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.answers import Verdict
from tests.chaos.plan import FaultKind, make_plan
from tests.system.serving import kvrelay

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(1300)]

SEED = 2
DURATION_S = 45
INTERVAL_S = 2.0
"""With this seed every kind of fault comes once."""
PAUSES = {"pause P99 after SIGKILL of a worker, s", "pause P99 after SIGKILL of a decode worker, s"}
"""Targets that a busy machine may miss."""


BAD = ("wrong", "missing", "repeated", "failed", "hung", "leaked_blocks", "skipped_faults")


def chaos(*arguments: str, duration_s: int, seed: int, timeout_s: float = 500) -> dict[str, Any]:
    """The report of a run in which nothing was wrong or lost, and in which every planned fault struck."""
    done = kvrelay(
        *("--json", *arguments),
        *("--duration", str(duration_s), "--seed", str(seed), "--fault-interval", str(INTERVAL_S)),
        module="tests.chaos",
        timeout_s=timeout_s,
    )
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}"
    report: dict[str, Any] = json.loads(done.stdout)
    assert {name: report[name] for name in BAD} == dict.fromkeys(BAD, 0)
    assert report["problems"] == []
    planned = [
        fault.name
        for fault in make_plan(
            duration_s,
            seed,
            interval_s=INTERVAL_S,
            with_ranks=report["num_ranks"] > 1,
            with_broker="--host-kv-cache" in arguments,
            with_planner=report["planner"] == "act",
        )
    ]
    assert {name: summary["count"] for name, summary in report["faults"].items()} == {
        name: planned.count(name) for name in planned
    }
    return report


def test_nothing_is_lost_in_a_minute_of_chaos():
    report = chaos("--engine", "mock", duration_s=DURATION_S, seed=SEED)
    assert {target["name"] for target in report["targets"] if target["is_met"] is False} <= PAUSES
    assert report["right"] > 50
    assert report["cancelled"] > 0
    assert report["remote_prefills"] > 20
    assert {name.split()[0] for name in report["faults"]} == {str(kind) for kind in FaultKind} - {
        FaultKind.KILL_RANK,
        FaultKind.KILL_BROKER,
        FaultKind.KILL_PLANNER,
    }


def test_nothing_is_lost_while_a_planner_acts_and_is_killed_too():
    """Roles that faults set by hand stay as long as they are held, which ``problems`` would tell."""
    report = chaos("--engine", "mock", "--planner", "act", duration_s=75, seed=SEED)
    assert report["planned_changes"] > 0
    assert {"kill_planner", "switch_role prefill", "widen decode", "kill decode"} <= report["faults"].keys()
    assert report["right"] > 50
    assert report["remote_prefills"] > 20


def test_nothing_is_lost_in_a_minute_of_chaos_with_prefill_first():
    report = chaos("--engine", "mock", "--order", "prefill-first", duration_s=60, seed=SEED)
    assert report["right"] > 50
    assert report["remote_prefills"] > 20


def test_nothing_is_lost_in_a_minute_of_chaos_with_decode_first():
    """All other rows run in order auto."""
    report = chaos("--engine", "mock", "--order", "decode-first", duration_s=60, seed=SEED)
    assert report["right"] > 50
    assert report["remote_prefills"] > 20


def test_nothing_is_lost_when_ranks_of_workers_are_killed():
    """With this seed one of each role is killed, and workers stop and change roles beside that."""
    report = chaos(
        *("--engine", "torch", "--tp", "2", "--questions", "12", "--clients", "4"),
        duration_s=20,
        seed=8859,
        timeout_s=1200,
    )
    assert {"kill_rank prefill", "kill_rank decode"} <= report["faults"].keys()
    assert report["right"] > 10
    assert report["remote_prefills"] > 0


def test_nothing_is_lost_when_p2p_has_room_for_a_few_blocks():
    """A block is 64 KiB. With this seed a worker of each role is killed, and prefills stop in mid-transfer."""
    report = chaos(
        *("--engine", "torch", "--questions", "40"),
        *("--transport", "p2p", "--kv-buffer-size", "65536", "--p2p-pool-bytes", "262144", "--p2p-room-wait-s", "0.02"),
        duration_s=20,
        seed=1482,
        timeout_s=1200,
    )
    assert {"kill prefill", "kill decode"} <= report["faults"].keys()
    assert report["right"] > 10
    assert report["spills"] > 0
    assert report["losses"] > 0
    assert report["recomputes"] > 0


def test_nothing_is_lost_with_kv_tiers_whose_broker_is_killed(tmp_path: Path):
    """The mock engine notices each wrong byte of KV that a tier gives back."""
    report = chaos(
        *("--engine", "mock", "--host-kv-cache", "4MiB", "--disk-kv-cache", f"{tmp_path},1MiB"),
        duration_s=45,
        seed=SEED,
    )
    assert "kill_broker" in report["faults"]
    assert report["right"] > 50
    assert report["kv_tier_hits"] > 0


def test_nothing_is_lost_of_agents_sessions_and_a_key_that_lies_harms_no_other_one():
    """Workers are killed, frozen, drained and change roles while tools run, and the broker of host memory is killed."""
    report = chaos(
        *("--engine", "mock", "--host-kv-cache", "4MiB", "--sessions", "24", "--clients", "4"), duration_s=60, seed=SEED
    )
    struck = ("kill", "freeze", "drain", "switch_role")
    assert {f"{kind} {role}" for kind in struck for role in ("prefill", "decode")} <= report["faults"].keys()
    for key, found in report["sessions"].items():
        verdicts = found.keys() & {verdict.value for verdict in Verdict}
        assert verdicts == {"right"}, (key, "all answers are right")
        assert found["returns"] > 50
    honest = report["sessions"]["honest"]
    assert honest["cached"] > honest["repeated_tokens"] / 4, (
        "sessions are found again, whatever another key says of its own"
    )
    assert report["kv_tier_hits"] > 0
