"""Routing policies on a running cluster: a short run, and the figures that need no server."""

from __future__ import annotations

import json

import pytest
from benchmarks.__main__ import NAME, benchmarks
from benchmarks.routing import RoutingLoad, results_of
from tests.system.serving import kvrelay

from kvrelay.cli.main import run

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


@pytest.mark.matrix
def test_a_short_run_reports_every_policy() -> None:
    sizes = ("--groups", "2", "--per-group", "6", "--system", "64", "--rate", "40", "--workers", "2")
    done = kvrelay("routing", "--rounds", "1", "--pools", "4", "--json", *sizes, module="benchmarks", timeout_s=500)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [(row["policy"], row["pool"], row["failed"]) for row in report["results"]] == [
        ("kv", 4.0, 0.0),
        ("round-robin", 4.0, 0.0),
    ]
    kv, round_robin = report["results"]
    # 12 prompts of 128 tokens; ten of them find the 64 tokens that the first two brought.
    assert kv["infinite_hit_ratio"] == pytest.approx(10 * 64 / (12 * 128))
    assert 0 <= kv["hit_ratio"] <= kv["infinite_hit_ratio"]
    assert kv["ttft_over_first"] == 1.0
    assert round_robin["imbalance"] == 1.0
    assert 0 < round_robin["ttft_p50_s"] <= round_robin["ttft_p99_s"]


@pytest.mark.parametrize(
    "flags", [("--policies", "kv,kw"), ("--pools", "a"), ("--pools", "0"), ("--engine", "none"), ("--rate", "0")]
)
def test_bad_usage_is_refused_at_once(flags: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["routing", *flags], benchmarks, NAME) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_pool_holds_its_share_and_one_request_at_the_least() -> None:
    load = RoutingLoad(groups=16, per_group=64, system=2000, question=64, output=16, rate=1.0)
    assert load.pool_blocks(2, num_workers=4) == 16 * 125 / 2
    assert load.pool_blocks(0.001, num_workers=4) == 131


def test_a_summary_takes_medians_and_adds_failures() -> None:
    labels = {name: {"policy": name, "pool": 1.0} for name in ("kv", "random")}
    turns = [
        {"case": name, "round": number, "error": None, "ttft_mean_s": ttft, "failed": 1.0}
        for name, values in (("kv", (1.0, 2.0, 9.0)), ("random", (5.0, 6.0, 4.0)))
        for number, ttft in enumerate(values)
    ]
    kv, other = results_of(turns, labels)
    assert (kv["policy"], kv["ttft_mean_s"], kv["failed"], kv["ttft_over_first"]) == ("kv", 2.0, 3.0, 1.0)
    assert (other["ttft_mean_s"], other["ttft_over_first"]) == (5.0, 2.5)


def test_a_policy_whose_turns_failed_has_no_figures() -> None:
    labels = {"kv, pool 1": {"policy": "kv", "pool": 1.0}}
    (row,) = results_of([{"case": "kv, pool 1", "round": 1, "error": "down"}], labels)
    assert (row["policy"], row["failed_rounds"], row["ttft_over_first"]) == ("kv", 1, None)
