"""``benchmarks hot-prefix``: its load and figures, which need no server."""

from __future__ import annotations

import itertools

from benchmarks.hot_prefix import hot_figures, loads

from kvrelay.bench.load.mix import build_class
from kvrelay.bench.report.metrics import ClientLoad, Outcome, RequestRecord, RunResult


def record(sent_s: float, *stamps_s: float, outcome: Outcome = Outcome.OK) -> RequestRecord:
    stamps = tuple(round(stamp_s * 1e9) for stamp_s in stamps_s)
    return RequestRecord("hot", outcome, round(sent_s * 1e9), 10**10, stamps, (1,) * len(stamps))


def test_the_requests_have_the_prefix_that_was_computed_before() -> None:
    *_, warm, burst = loads(8, 200, 32)
    (computed,), requests = (
        list(itertools.islice(build_class(spec, 3).requests, count)) for spec, count in ((warm, 1), (burst, 8))
    )
    assert {tuple(request.prompt[:200]) for request in (computed, *requests)} == {tuple(computed.prompt[:200])}
    assert len({tuple(request.prompt) for request in requests}) == 8
    assert {request.prompt_len for request in requests} == {232}


def test_figures() -> None:
    records = (record(1.0, 1.5, 3.0), record(1.0, 2.0, 2.5), record(1.0, outcome=Outcome.FAILED))
    turn = hot_figures(RunResult(records, 0, 10, ClientLoad(0.1, 0.0)))
    assert turn == {"first_token_mean_s": 0.75, "first_token_max_s": 1.0, "num_failed": 1}
    assert hot_figures(RunResult(records[2:], 0, 10, ClientLoad(0.1, 0.0)))["error"] is not None
