"""Figures from made-up stamps: here every number is known exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.bench.errors import BenchError
from kvrelay.bench.report.metrics import (
    ClientLoad,
    OfferedLoad,
    Outcome,
    RequestRecord,
    RunInfo,
    RunResult,
    Slo,
    distribution,
    parse_slo,
    serve_report,
    spread_tokens,
)
from kvrelay.bench.report.text import report_text
from kvrelay.bench.serving import require_success
from kvrelay.errors import InvalidInputError

MS = 1_000_000
INFO = RunInfo("scripted", "http://x", "m", "/v1/completions", "cmd", "2026-01-01T00:00:00+00:00")


def record(
    stamps_ms: tuple[float, ...],
    tokens: tuple[int, ...] | None = None,
    *,
    sent_ms: float = 0,
    outcome: Outcome = Outcome.OK,
    name: str = "requests",
) -> RequestRecord:
    counts = tokens or (1,) * len(stamps_ms)
    return RequestRecord(
        class_name=name,
        outcome=outcome,
        sent_ns=int(sent_ms * MS),
        end_ns=int((stamps_ms[-1] if stamps_ms else sent_ms) * MS),
        stamps_ns=tuple(int(stamp * MS) for stamp in stamps_ms),
        tokens=counts,
        prompt_tokens=10,
        output_tokens=sum(counts),
        error="boom" if outcome is Outcome.FAILED else None,
    )


def result(*records: RequestRecord, stop_ms: float) -> RunResult:
    return RunResult(records, 0, int(stop_ms * MS), ClientLoad(0.1, 0.001))


def test_latencies_of_one_request() -> None:
    one = record((50, 60, 70, 100), sent_ms=10)
    assert one.ttft_s == pytest.approx(0.040)
    assert one.e2e_s == pytest.approx(0.090)
    assert one.tpot_s == pytest.approx(0.050 / 3)
    assert one.itl_s().tolist() == pytest.approx([0.01, 0.01, 0.03])


def test_a_piece_with_several_tokens_counts_them_all() -> None:
    one = record((10, 50, 60), (1, 4, 1))
    assert one.itl_s().tolist() == pytest.approx([0.01] * 5)
    assert one.gaps_s().tolist() == pytest.approx([0.04, 0.01])
    assert one.tpot_s == pytest.approx(0.05 / 5)


@given(st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 5)), min_size=2, max_size=20))
def test_itl_adds_up_to_the_time_after_the_first_token(arrivals: list[tuple[int, int]]) -> None:
    stamps = tuple(np.cumsum([gap for gap, _ in arrivals]).tolist())
    one = RequestRecord("c", Outcome.OK, 0, stamps[-1], stamps, tuple(count for _, count in arrivals))
    assert one.itl_s().sum() == pytest.approx((stamps[-1] - stamps[0]) / 1e9)
    assert one.tpot_s == pytest.approx(one.itl_s().mean())


def test_requests_without_tokens_have_no_latencies() -> None:
    none, single = record(()), record((5,))
    assert (none.ttft_s, none.tpot_s, single.tpot_s) == (None, None, None)
    assert single.itl_s().size == none.gaps_s().size == 0


def test_report_of_a_whole_run() -> None:
    records = (record((100, 200, 300)), record((200, 400, 1000), sent_ms=100), record((), outcome=Outcome.FAILED))
    report = serve_report(INFO, result(*records, stop_ms=1000), [OfferedLoad("requests", 2.0, 8)], retokenized=6)
    total = report.total
    assert (total.successful, total.failed, total.cut_off) == (2, 1, 0)
    assert (total.input_tokens, total.output_tokens, total.retokenized_tokens) == (20, 6, 6)
    assert (total.requests_per_s, total.input_tokens_per_s, total.output_tokens_per_s) == (2, 20, 6)
    assert total.total_tokens_per_s == 26
    assert total.concurrency == pytest.approx(0.3 + 0.9)
    assert total.ttft_s is not None
    assert total.ttft_s.mean == pytest.approx(0.1)
    assert (total.request_rate, total.max_concurrency) == (2.0, 8)
    assert [(error.message, error.count) for error in report.errors] == [("boom", 1)]
    assert report.classes == ()


def test_throughput_is_that_of_the_window() -> None:
    records = (record((100, 200)), record((900, 1100)), record((950,), outcome=Outcome.CUT_OFF))
    total = serve_report(INFO, result(*records, stop_ms=1000), [OfferedLoad("requests")]).total
    assert total.requests_per_s == pytest.approx(1)
    assert total.output_tokens_per_s == pytest.approx(2 + 1 + 1)
    assert total.output_tokens == 4


@pytest.mark.parametrize(
    ("records", "why"),
    [([], "nothing was sent"), ([record((950,), outcome=Outcome.CUT_OFF)], "no answer ended in time")],
)
def test_without_an_answer_it_is_said_whether_any_was_sent(records: list[RequestRecord], why: str) -> None:
    with pytest.raises(BenchError, match=f"no request succeeded: {why}"):
        require_success(serve_report(INFO, result(*records, stop_ms=1000), [OfferedLoad("requests")]))


def test_classes_are_reported_apart() -> None:
    records = (record((10, 20), name="chat"), record((500,), name="long"))
    report = serve_report(INFO, result(*records, stop_ms=1000), [OfferedLoad("chat"), OfferedLoad("long", 3.0)])
    chat, long = report.classes
    assert chat.ttft_s is not None
    assert long.ttft_s is not None
    assert (chat.ttft_s.median, long.ttft_s.median) == pytest.approx((0.01, 0.5))
    assert long.request_rate == 3.0
    assert report.total.successful == 2


def test_goodput_needs_every_objective() -> None:
    slo = Slo(ttft_s=0.1, tpot_s=0.02, itl_s=0.05)
    assert slo.met_by(record((100, 120, 140)))
    assert not slo.met_by(record((101, 120, 140)))
    assert not slo.met_by(record((100, 125, 150)))
    stalled = record((10, 11, 12, 13, 14, 100), (1, 1, 1, 1, 1, 10))
    assert not slo.met_by(stalled)
    assert Slo(ttft_s=0.1, tpot_s=0.02).met_by(stalled)
    assert not slo.met_by(record((100,), outcome=Outcome.FAILED))
    records = (record((50,)), record((200,)), record((), outcome=Outcome.FAILED), record((), outcome=Outcome.CUT_OFF))
    goodput = serve_report(INFO, result(*records, stop_ms=500), [OfferedLoad("requests")], slo).total.goodput
    assert goodput is not None
    assert (goodput.share, goodput.requests_per_s) == pytest.approx((1 / 3, 2))


def test_slo_text() -> None:
    assert parse_slo("ttft=200,tpot=20ms,itl=0.1s") == Slo(0.2, 0.02, 0.1)
    for wrong in ("", "ttft", "ttft=x", "ttft=0", "ttft=-1", "ttft=nan", "other=1", "ttft=1,ttft=2", "ttft=1ns"):
        with pytest.raises(InvalidInputError):
            parse_slo(wrong)


def test_report_lines_stand_in_the_prescribed_order() -> None:
    records = (record((100, 110, 120)), record((), outcome=Outcome.FAILED))
    text = report_text(serve_report(INFO, result(*records, stop_ms=1000), [OfferedLoad("requests")], retokenized=3))
    wanted = (
        "Backend:", "Request rate", "Max concurrency:", "Successful requests:", "Duration (s):", "Total input tokens:",
        "Total generated tokens:", "Total generated tokens (retokenized):", "Request throughput",
        "Input token throughput",
        "Output token throughput", "Total token throughput", "Concurrency:", "Mean E2E latency", "Median E2E latency",
        "Mean TTFT", "Median TTFT", "P99 TTFT", "Mean TPOT", "Median TPOT", "P99 TPOT", "Mean ITL",
        "Median ITL", "P99 ITL",
    )  # fmt: skip
    places = [text.index(label) for label in wanted]
    assert places == sorted(places)
    assert "boom" in text
    assert "P90" not in text


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(0, 200))
def test_spread_tokens(lengths: list[int], total: int) -> None:
    spread = spread_tokens(tuple(lengths), total)
    assert len(spread) == len(lengths)
    assert min(spread) >= 1
    assert sum(spread) == max(total, len(lengths))


def test_distribution() -> None:
    found = distribution(range(1, 102))
    assert found is not None
    assert (found.count, found.mean, found.median, found.p90, found.p99, found.max) == (101, 51, 51, 91, 100, 101)
    assert distribution([]) is None
