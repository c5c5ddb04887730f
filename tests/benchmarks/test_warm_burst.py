"""``kvrelay bench burst --warm``: its load, cases and figures, which need no server."""

from __future__ import annotations

import itertools

import pytest
from benchmarks.warm_burst import (
    QUESTION_TOKENS,
    WARM_KIND,
    WarmLoad,
    WarmReport,
    WarmTurn,
    summarise_warm,
    warm_cases,
    warm_text,
    warm_turn_of,
)

from kvrelay.bench.load.mix import build_class
from kvrelay.bench.report.records import ClientLoad, Outcome, RequestRecord, RunResult

LOAD = WarmLoad(warm_streams=16, warm_output=400, warm_prefix=200)


def record(sent_s: float, *stamps_s: float, outcome: Outcome = Outcome.OK) -> RequestRecord:
    stamps = tuple(round(stamp_s * 1e9) for stamp_s in stamps_s)
    return RequestRecord("stream", outcome, round(sent_s * 1e9), 10**10, stamps, (1,) * len(stamps))


def test_the_streams_are_the_prompts_that_were_computed_before() -> None:
    *_, warm, burst = LOAD.classes()
    computed, streams = (
        list(itertools.islice(build_class(spec, 3).requests, 20)) for spec in (warm, burst)
    )  # fmt: skip
    assert len(streams) == 16
    assert [request.prompt for request in computed] == [request.prompt for request in streams]
    assert len({request.prompt for request in streams}) == 16
    assert len({request.prompt[:200] for request in streams}) == 1
    assert {request.prompt_len for request in streams} == {200 + QUESTION_TOKENS}
    assert {request.output_len for request in computed} == {1}
    assert {request.output_len for request in streams} == {400}


def test_figures_and_medians() -> None:
    records = (record(1.0, 1.5, 3.0), record(1.1, 2.0, 2.5), record(1.0, outcome=Outcome.FAILED))
    turn = warm_turn_of("kv", 1, RunResult(records, 0, 10, ClientLoad(0.1, 0.0)))
    assert (turn.first_token_max_s, turn.last_token_s, turn.num_failed) == pytest.approx((1.0, 2.0, 1))
    assert warm_turn_of("kv", 1, RunResult(records[2:], 0, 10, ClientLoad(0.1, 0.0))).error is not None
    turns = [WarmTurn("kv", n, float(n), 2.0 * n, 1) for n in (1, 2, 9)] + [WarmTurn("kv", 4, error="down")]
    summary = summarise_warm(turns)
    assert summary == WarmTurn("kv", 3, 2.0, 4.0, 3, "down")
    text = warm_text(WarmReport(WARM_KIND, "machine", LOAD, (summary,), tuple(turns)))
    assert "16 streams of 400 tokens" in text
    assert "4.000" in text


def test_cases_are_two_workers_under_each_policy() -> None:
    cases = warm_cases("mock", None, "--num-blocks 64")
    assert [case.name for case in cases] == ["kv", "kv-weights"]
    for case in cases:
        assert f"--router {case.name}" in (case.command or "")
        assert "--prefill 0 --decode 2" in (case.command or "")
