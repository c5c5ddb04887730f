"""The figures of a serving run, calculated from its records. Pure; seconds and tokens everywhere.

Latencies are over successful requests. Throughput is over the run's window: it counts what arrived between the first
sending and the end of sending (a run without a time limit ends with its last answer), so that the drain does not lower
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvrelay.bench.report.records import (
    ClientLoad,
    Distribution,
    Goodput,
    Outcome,
    RequestRecord,
    RunResult,
    Slo,
    distribution,
    goodput,
)

REPORT_KIND = "kvrelay-bench-serve/1"


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """The load of a class. ``request_rate`` None: a closed loop, or everything at once."""

    name: str
    request_rate: float | None = None
    max_concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The figures of one class of requests, or of all together. ``gap`` is the time between arrivals, undivided."""

    name: str
    request_rate: float | None
    max_concurrency: int | None
    successful: int
    failed: int
    cut_off: int
    input_tokens: int
    output_tokens: int
    retokenized_tokens: int | None
    cached_tokens: int | None
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    concurrency: float
    e2e_s: Distribution | None
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    itl_s: Distribution | None
    gap_s: Distribution | None
    goodput: Goodput | None


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """An error and its number of occurrences."""

    message: str
    count: int


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The conditions of a run. ``started_at`` is UTC, ISO 8601."""

    backend: str
    url: str
    model: str
    endpoint: str
    command: str
    started_at: str


@dataclass(frozen=True, slots=True)
class ServeReport:
    """A whole run. ``complete`` is false if it ended early; ``note`` has the reason."""

    kind: str
    info: RunInfo
    duration_s: float
    complete: bool
    note: str | None
    token_sources: tuple[str, ...]
    client: ClientLoad
    slo: Slo | None
    total: LoadReport
    classes: tuple[LoadReport, ...]
    errors: tuple[ErrorCount, ...]


def figure(load: LoadReport | None, path: str) -> float | None:
    """A figure by name, ``requests_per_s`` or ``ttft_s.p99``; None if the load does not have it."""
    value: Any = load
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return None if value is None else float(value)


def serve_report(
    info: RunInfo,
    result: RunResult,
    offered: Sequence[OfferedLoad],
    slo: Slo | None = None,
    retokenized: int | None = None,
) -> ServeReport:
    """Summarise a run; ``retokenized`` is the answers' token count by the server's own tokenizer."""
    records = result.records
    only = offered[0] if len(offered) == 1 else OfferedLoad("all")
    classes = tuple(
        _load_report(load, [record for record in records if record.class_name == load.name], result, slo)
        for load in offered
    )
    total = _load_report(OfferedLoad("all", only.request_rate, only.max_concurrency), records, result, slo, retokenized)
    return ServeReport(
        kind=REPORT_KIND,
        info=info,
        duration_s=_duration_s(result),
        complete=result.note is None,
        note=result.note,
        token_sources=tuple(sorted({record.token_source.value for record in records if record.tokens})),
        client=result.client,
        slo=slo,
        total=total,
        classes=classes if len(offered) > 1 else (),
        errors=_errors(records),
    )


def _load_report(
    load: OfferedLoad,
    records: Sequence[RequestRecord],
    result: RunResult,
    slo: Slo | None,
    retokenized: int | None = None,
) -> LoadReport:
    good = [record for record in records if record.outcome is Outcome.OK]
    duration_s = _duration_s(result)
    served = _served(records, result.stop_ns)
    cached = [record.cached_tokens for record in good if record.cached_tokens is not None]
    return LoadReport(
        name=load.name,
        request_rate=load.request_rate,
        max_concurrency=load.max_concurrency,
        successful=len(good),
        failed=sum(record.outcome is Outcome.FAILED for record in records),
        cut_off=sum(record.outcome is Outcome.CUT_OFF for record in records),
        input_tokens=sum(record.prompt_tokens for record in good),
        output_tokens=sum(record.output_tokens for record in good),
        retokenized_tokens=retokenized,
        cached_tokens=sum(cached) if cached else None,
        requests_per_s=served.requests / duration_s,
        input_tokens_per_s=served.input_tokens / duration_s,
        output_tokens_per_s=served.output_tokens / duration_s,
        total_tokens_per_s=(served.input_tokens + served.output_tokens) / duration_s,
        concurrency=served.busy_s / duration_s,
        e2e_s=distribution([record.e2e_s for record in good]),
        ttft_s=distribution([ttft for record in good if (ttft := record.ttft_s) is not None]),
        tpot_s=distribution([tpot for record in good if (tpot := record.tpot_s) is not None]),
        itl_s=distribution(np.concatenate([np.empty(0), *(record.itl_s() for record in good)])),
        gap_s=distribution(np.concatenate([np.empty(0), *(record.gaps_s() for record in good)])),
        goodput=goodput(records, slo, duration_s) if slo else None,
    )


@dataclass(frozen=True, slots=True)
class _Served:
    requests: int
    input_tokens: int
    output_tokens: int
    busy_s: float


def _served(records: Sequence[RequestRecord], stop_ns: int) -> _Served:
    """The tokens received until ``stop_ns``, including those of partial answers."""
    requests = input_tokens = output_tokens = 0
    busy_ns = 0
    for record in records:
        if record.outcome is Outcome.FAILED:
            continue
        last_ns = record.stamps_ns[-1] if record.stamps_ns else record.end_ns
        busy_ns += max(0, min(last_ns, stop_ns) - record.sent_ns)
        if record.stamps_ns and record.stamps_ns[0] <= stop_ns:
            input_tokens += record.prompt_tokens
        if record.outcome is Outcome.OK and last_ns <= stop_ns:
            requests += 1
            output_tokens += record.output_tokens
        else:
            output_tokens += sum(count for stamp, count in zip(record.stamps_ns, record.tokens) if stamp <= stop_ns)
    return _Served(requests, input_tokens, output_tokens, busy_ns / 1e9)


def _duration_s(result: RunResult) -> float:
    return max(1, result.stop_ns - result.start_ns) / 1e9


def _errors(records: Sequence[RequestRecord]) -> tuple[ErrorCount, ...]:
    counts = Counter(record.error or "unknown" for record in records if record.outcome is Outcome.FAILED)
    return tuple(ErrorCount(message, count) for message, count in counts.most_common())
