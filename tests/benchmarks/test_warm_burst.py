"""``benchmarks warm-burst``: its load and figures, which need no server."""

from __future__ import annotations

import itertools

from benchmarks.warm_burst import QUESTION_TOKENS, loads, warm_figures

from kvrelay.bench.load.mix import build_class
from kvrelay.bench.report.metrics import ClientLoad, Outcome, RequestRecord, RunResult


def record(sent_s: float, *stamps_s: float, outcome: Outcome = Outcome.OK) -> RequestRecord:
    stamps = tuple(round(stamp_s * 1e9) for stamp_s in stamps_s)
    return RequestRecord("stream", outcome, round(sent_s * 1e9), 10**10, stamps, (1,) * len(stamps))


def test_the_streams_are_the_prompts_that_were_computed_before() -> None:
    *_, warm, burst = loads(16, 400, 200)
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


def test_figures() -> None:
    records = (record(1.0, 1.5, 3.0), record(1.1, 2.0, 2.5), record(1.0, outcome=Outcome.FAILED))
    turn = warm_figures(RunResult(records, 0, 10, ClientLoad(0.1, 0.0)))
    assert turn == {"first_token_max_s": 1.0, "last_token_s": 2.0, "num_failed": 1}
    assert warm_figures(RunResult(records[2:], 0, 10, ClientLoad(0.1, 0.0)))["error"] is not None
