"""Goodput by policy and rate: its cases, its judgement of records and its tables, which need no server."""

from __future__ import annotations

import pytest
from benchmarks.goodput import (
    GOODPUT_KIND,
    GoodputPoint,
    GoodputReport,
    Missed,
    at_rate,
    goodput_markdown,
    point_of,
    policy_cases,
    summarise_points,
)

from kvrelay.bench.load.mix import Dataset, parse_mix
from kvrelay.bench.report.records import ClientLoad, Outcome, RequestRecord, RunResult, Slo
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
    point = point_of("cost", 1, 2.0, RunResult(records, 0, 2 * 10**9, ClientLoad(0.1, 0.0)), SLO)
    assert (point.num_requests, point.num_met, point.num_failed, point.met_per_s) == (5, 1, 1, 0.5)
    assert point.share == pytest.approx(0.2)
    assert point.missed == (
        Missed("chat", "itl", 1), Missed("long", "failure", 1), Missed("long", "itl", 1), Missed("long", "ttft", 2),
    )  # fmt: skip
    failed = RunResult(records[4:5], 0, 10**9, ClientLoad(0.1, 0.0))
    assert point_of("cost", 1, 2.0, failed, SLO).error == "no request succeeded"
    assert GoodputPoint("cost", 1, 2.0).share == 0.0


def test_a_summary_has_the_median_share_its_spread_and_all_misses() -> None:
    shares = (0.5, 0.9, 0.8)
    points = [
        GoodputPoint("a", number, 1.0, 10, round(10 * share), 0, share, (Missed("chat", "itl", number),))
        for number, share in enumerate(shares, 1)
    ]
    points += [GoodputPoint("a", 4, 1.0, error="down"), GoodputPoint("b", 1, 2.0, 10, 4)]
    a, b, a2, b2 = summarise_points(["a", "b"], [1.0, 2.0], points)
    assert (a.case, a.rate, a.num_rounds, a.num_requests) == ("a", 1.0, 3, 30)
    assert (a.share, a.lowest_share, a.highest_share, a.met_per_s) == (0.8, 0.5, 0.9, 0.8)
    assert a.missed == (Missed("chat", "itl", 6),)
    assert (b.num_rounds, b.share, a2.share, b2.share) == (0, None, None, 0.4)
    slo, load = Slo(ttft_s=0.5, itl_s=0.025), "chat=1/1,long=1/1"
    text = goodput_markdown(GoodputReport(GOODPUT_KIND, "", load, slo, (a, b, a2, b2), tuple(points)))
    assert "objectives: ttft 500 ms, itl 25 ms" in text
    assert "| 1 | 80% (50% to 90%) | - | - | - |" in text
    assert "| 2 | - | 40% | - | - |" in text
    assert "| 1 | chat itl 6 of 30 | none of 0 |" in text
    assert "- a at 1/s, round 4: down" in text


def test_the_first_case_is_compared_with_the_best_and_the_worst_other() -> None:
    points = [GoodputPoint(name, 1, 1.0, 100, met) for name, met in (("a", 90), ("b", 100), ("c", 60))]
    summaries = summarise_points(["a", "b", "c"], [1.0], points)
    text = goodput_markdown(GoodputReport(GOODPUT_KIND, "", "x", SLO, summaries, tuple(points)))
    assert "| rate | a | b | c | a / best other | a / worst |" in text
    assert "| 1 | 90% | 100% | 60% | 0.90 | 1.50 |" in text


def test_policies_are_arrangements_and_others_are_refused() -> None:
    cases = {case.name: case.command for case in policy_cases("cost, threshold:512,aggregated", "py", "m", "--x 1")}
    base = "py -m kvrelay serve m --x 1 --port {port}"
    assert cases == {
        "cost": f"{base} --prefill 1 --decode 1 --disagg-policy cost",
        "threshold:512": f"{base} --prefill 1 --decode 1 --disagg-policy threshold --max-local-prefill-length 512",
        "aggregated": f"{base} --prefill 0 --decode 2",
    }
    assert policy_cases("", "py", None, "") == ()
    for wrong in ("best", "cost:5", "threshold:", "threshold:x", "aggregated:2"):
        with pytest.raises(InvalidInputError, match="--policies"):
            policy_cases(wrong, "py", None, "")


def test_the_second_class_gets_the_rate() -> None:
    chats, prompts = at_rate(parse_mix("chat=64/128:closed=8,long=1024/8:rate=3", Dataset()), 4.5)
    assert (chats.max_concurrency, prompts.rate, prompts.max_concurrency) == (8, 4.5, None)
