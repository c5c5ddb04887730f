"""Goodput by policy and rate: its cases, its judgement of records and its tables, which need no server."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.goodput import at_rate, goodput, goodput_figures, goodput_markdown, policies, summarise_points
from click.testing import CliRunner, Result

from kvrelay.bench.load.datasets import Dataset
from kvrelay.bench.load.mix import parse_mix
from kvrelay.bench.report.metrics import ClientLoad, Outcome, RequestRecord, RunResult, Slo
from kvrelay.bench.report.table import Row
from kvrelay.errors import InvalidInputError

SLO = Slo(ttft_s=0.5, itl_s=0.025)


def record(name: str, ttft_s: float, gaps_s: tuple[float, ...] = (), outcome: Outcome = Outcome.OK) -> RequestRecord:
    at, stamps = ttft_s, [round(ttft_s * 1e9)]
    for gap in gaps_s:
        at += gap
        stamps.append(round(at * 1e9))
    return RequestRecord(name, outcome, 0, stamps[-1], tuple(stamps), (1,) * len(stamps))


def test_each_missed_objective_is_counted_by_class_and_requests_cut_off_are_not() -> None:
    records = (
        record("chat", 0.1, (0.01, 0.01)),
        record("chat", 0.1, (0.01, 0.1)),
        record("long", 0.6, (0.1,)),
        record("long", 0.6, (0.01,)),
        record("long", 0.1, outcome=Outcome.FAILED),
        record("long", 9.0, outcome=Outcome.CUT_OFF),
    )
    point = goodput_figures(RunResult(records, 0, 2 * 10**9, ClientLoad(0.1, 0.0)), SLO)
    figures = ("num_requests", "num_met", "num_failed", "met_per_s", "share", "error")
    assert [point[name] for name in figures] == [5, 1, 1, 0.5, 0.2, None]
    assert point["missed"] == {"chat itl": 1, "long failure": 1, "long itl": 1, "long ttft": 2}
    failed = RunResult(records[4:5], 0, 10**9, ClientLoad(0.1, 0.0))
    assert goodput_figures(failed, SLO)["error"] == "no request succeeded"


def point(case: str, number: int, rate: float, share: float, *missed: str) -> Row:
    shares = dict.fromkeys(("share", "lowest_share", "highest_share", "met_per_s"), share)
    labels = {"case": case, "round": number, "rate": rate, "error": None}
    return {**labels, **shares, "num_requests": 10, "num_met": round(10 * share), "missed": Counter(missed)}


def text_of(points: list[Row]) -> str:
    report = {"load": "chat=1/1,long=1/1", "slo": "ttft 500 ms", "points": points}
    return goodput_markdown({**report, "summaries": summarise_points(points)})


def test_a_summary_has_the_median_share_its_spread_and_all_misses() -> None:
    points = [point("a", number, 1.0, share, *["chat itl"] * number) for number, share in enumerate((0.5, 0.9, 0.8), 1)]
    points += [{"case": "a", "round": 4, "rate": 1.0, "error": "down"}, point("b", 1, 2.0, 0.4)]
    points += [{"case": "b", "round": 1, "rate": 1.0, "error": "gone"}]
    a, b2, b = summarise_points(points)
    assert (a["case"], a["rate"], a["rounds"], a["failed_rounds"], a["num_requests"]) == ("a", 1.0, 3, 1, 30)
    assert (a["share"], a["lowest_share"], a["highest_share"], a["met_per_s"]) == (0.8, 0.5, 0.9, 0.8)
    assert a["missed"] == {"chat itl": 6}
    assert (b["rounds"], b["share"], b2["share"]) == (0, None, 0.4)
    text = text_of(points)
    assert "objectives: ttft 500 ms" in text
    assert "| 1 | 80% (50% to 90%) | - | - | - |" in text
    assert "| 2 | - | 40% | - | - |" in text
    assert "| 1 | chat itl 6 of 30 | none of 0 |" in text
    assert "- a at 1/s, round 4: down" in text


def test_the_first_case_is_compared_with_the_best_and_the_worst_other() -> None:
    text = text_of([point(name, 1, 1.0, share) for name, share in (("a", 0.9), ("b", 1.0), ("c", 0.6))])
    assert "| rate | a | b | c | a / best other | a / worst |" in text
    assert "| 1 | 90% | 100% | 60% | 0.90 | 1.50 |" in text


def test_policies_are_arrangements_and_others_are_refused() -> None:
    assert policies("cost, threshold:512,aggregated,") == {
        "cost": "--prefill 1 --decode 1 --disagg-policy cost",
        "threshold:512": "--prefill 1 --decode 1 --disagg-policy threshold --max-local-prefill-length 512",
        "aggregated": "--prefill 0 --decode 2",
    }
    for wrong in ("best", "cost:5", "threshold:", "threshold:x", "aggregated:2"):
        with pytest.raises(InvalidInputError, match="--policies"):
            policies(wrong)


def test_the_second_class_gets_the_rate() -> None:
    chats, prompts = at_rate(parse_mix("chat=64/128:closed=8,long=1024/8:rate=3", Dataset()), 4.5)
    assert (chats.max_concurrency, prompts.rate, prompts.max_concurrency) == (8, 4.5, None)


def test_the_command_measures_each_server_at_each_rate(scripted: Callable[..., Any], tmp_path: Path) -> None:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(goodput, [*arguments, "--output-dir", str(tmp_path)])

    options = ("--mix", "chat=4/3:closed=1,long=8/2:rate=20", "--rounds", "1", "--duration", "0.2", "--only-given")
    common = (*options, "--rates", "10,20", "--warm-up", "0")
    with scripted() as server:
        done = run(*common, "--url", f"a={server.url}")
    assert done.exception is None
    report = json.loads((tmp_path / "goodput.json").read_text())
    assert report["kind"] == "kvrelay-bench-goodput/1"
    assert [(point["case"], point["rate"], point["error"]) for point in report["points"]] == [
        ("a", 10.0, None),
        ("a", 20.0, None),
    ]
    assert "| rate | a |" in done.stdout
    assert "2 of 2 turns failed" in str(run(*common, "--url", "b=http://127.0.0.1:9").exception)
    for wrong in (("--policies", "best"), ("--policies", "cost", "--rates", "0")):
        assert isinstance(run(*wrong).exception, InvalidInputError)
