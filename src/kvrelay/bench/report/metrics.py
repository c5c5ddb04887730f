"""The records of a serving run's requests, its objectives, and the figures calculated from them. Pure; seconds and
tokens everywhere.

An *arrival* is the data of one read: pieces read together reached the user together, so they count as one with all
their tokens. Timestamps are nanoseconds of the client's monotonic clock.

Latencies are over successful requests. Throughput is over the run's window: it counts what arrived between the first
sending and the end of sending (a run without a time limit ends with its last answer), so that the drain does not lower
it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvrelay.errors import InvalidInputError

REPORT_KIND = "kvrelay-bench-serve/1"


class OfferedLoad(msgspec.Struct, frozen=True):
    """The load of a class. ``request_rate`` None: a closed loop, or everything at once."""

    name: str
    request_rate: float | None = None
    max_concurrency: int | None = None


class LoadReport(msgspec.Struct, frozen=True):
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


class ErrorCount(msgspec.Struct, frozen=True):
    """An error and its number of occurrences."""

    message: str
    count: int


class RunInfo(msgspec.Struct, frozen=True):
    """The conditions of a run. ``started_at`` is UTC, ISO 8601."""

    backend: str
    url: str
    model: str
    endpoint: str
    command: str
    started_at: str


class ServeReport(msgspec.Struct, frozen=True):
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


FIGURES = {
    **{name: name for name in ("requests_per_s", "output_tokens_per_s", "failed")},
    **{
        f"{of}_{p}_s": f"{of}_s.{path}"
        for of in ("ttft", "tpot", "itl", "gap", "e2e")
        for p, path in (("mean", "mean"), ("p50", "median"), ("p90", "p90"), ("p95", "p95"), ("p99", "p99"))
    },
    "goodput": "goodput.share",
    "good_per_s": "goodput.requests_per_s",
}
"""The names that rows of experiments have, and the figures that they are."""


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
    own = {load.name: [record for record in records if record.class_name == load.name] for load in offered}
    classes = tuple(_load_report(load, own[load.name], result, slo) for load in offered)
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


class _Served(msgspec.Struct, frozen=True):
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


INTERRUPTED = "interrupted"


class Outcome(StrEnum):
    """How a request ended. ``CUT_OFF`` means that the run ended first: neither a success nor a failure."""

    OK = "ok"
    FAILED = "failed"
    CUT_OFF = "cut_off"


class TokenSource(StrEnum):
    """Where the token counts per arrival come from: the ids themselves, running usage counts, or an estimate that
    spreads the answer's token count over its pieces of text by their length."""

    TOKEN_IDS = "token_ids"
    USAGE = "usage"
    ESTIMATED = "estimated"


class RequestRecord(msgspec.Struct, frozen=True):
    """One request. ``stamps_ns`` and ``tokens`` have one entry per arrival.

    ``due_ns``: when the load wanted it sent; ``written_ns``: when the client had a connection and wrote it; 0: unknown.
    ``output_tokens`` comes from the server's usage, or else is the sum of ``tokens``; ``prompt_tokens`` comes from the
    usage, or else from the data set.
    """

    class_name: str
    outcome: Outcome
    sent_ns: int
    end_ns: int
    stamps_ns: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    token_source: TokenSource = TokenSource.TOKEN_IDS
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    text: str = ""
    error: str | None = None
    due_ns: int = 0
    written_ns: int = 0

    @property
    def client_delay_s(self) -> float:
        """Seconds by which the client itself sent it too late: its load and the server may share the cores. The loop's
        timers are right to a millisecond, so a request may also be written before it is due."""
        return max(0, self.written_ns - self.due_ns) / 1e9 if self.due_ns and self.written_ns else 0.0

    @property
    def written_ttft_s(self) -> float | None:
        """Seconds from writing to the first arrival: without the client's own delay."""
        return (self.stamps_ns[0] - (self.written_ns or self.sent_ns)) / 1e9 if self.stamps_ns else None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first arrival."""
        return (self.stamps_ns[0] - self.sent_ns) / 1e9 if self.stamps_ns else None

    @property
    def e2e_s(self) -> float:
        """Seconds from sending to the last arrival."""
        return ((self.stamps_ns[-1] if self.stamps_ns else self.end_ns) - self.sent_ns) / 1e9

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first arrival; None if nothing came after it."""
        later = sum(self.tokens[1:])
        return (self.stamps_ns[-1] - self.stamps_ns[0]) / 1e9 / later if later else None

    def gaps_s(self) -> npt.NDArray[np.float64]:
        """Seconds between arrivals, one per arrival after the first: the waits of a reader."""
        stamps = np.asarray(self.stamps_ns, np.int64)
        return (stamps[1:] - stamps[:-1]).astype(np.float64) / 1e9

    def itl_s(self) -> npt.NDArray[np.float64]:
        """Inter-token latencies, one per token after the first arrival: a gap that brought k tokens is k times gap
        / k.

        So they add up to the whole time, independent of how the server batches its tokens.
        """
        counts = np.asarray(self.tokens[1:], np.int64)
        shares = self.gaps_s() / np.maximum(counts, 1)
        return np.repeat(shares, counts)


class ClientLoad(msgspec.Struct, frozen=True):
    """Whether the client was the bottleneck: its share of one core, and the largest delay of its event loop.

    ``reconnects`` counts requests sent a second time, because the server had closed their connection without an answer.
    """

    cpu_share: float
    max_lag_s: float
    reconnects: int = 0


class RunResult(msgspec.Struct, frozen=True):
    """All records, and the run's start and end. Requests were sent from ``start_ns`` to ``stop_ns``; a run without a
    time limit stops with its last answer. ``note`` has the reason if a run ended early."""

    records: tuple[RequestRecord, ...]
    start_ns: int
    stop_ns: int
    client: ClientLoad
    note: str | None = None


def spread_tokens(text_lengths: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Split ``total`` tokens over pieces of text in proportion to their lengths, at least one for each."""
    pieces = len(text_lengths)
    if total <= pieces:
        return (1,) * pieces
    weights = np.asarray(text_lengths, np.float64)
    ends = np.cumsum(weights) / max(weights.sum(), 1.0) * (total - pieces)
    whole = np.floor(ends + 1e-9).astype(np.int64)
    whole[-1] = total - pieces
    return tuple((np.diff(whole, prepend=0) + 1).tolist())


class Distribution(msgspec.Struct, frozen=True):
    """Count, mean, percentiles (linear between neighbours) and maximum, in the unit of the values."""

    count: int
    mean: float
    median: float
    p90: float
    p95: float
    p99: float
    max: float


def distribution(values: npt.ArrayLike) -> Distribution | None:
    """Summarise; None if there are no values."""
    data = np.asarray(values, dtype=np.float64)
    if not data.size:
        return None
    median, p90, p95, p99 = np.percentile(data, [50, 90, 95, 99]).tolist()
    return Distribution(int(data.size), float(data.mean()), median, p90, p95, p99, float(data.max()))


_UNITS = {"ms": 1e-3, "s": 1.0}


class Slo(msgspec.Struct, frozen=True):
    """Limits in seconds; None means no limit.

    ``itl_s`` bounds the 99th percentile of the request's waits between arrivals: a mean would hide the stalls that a
    reader sees, and ``tpot_s`` bounds the mean already.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    @property
    def limits_s(self) -> dict[str, float]:
        """The limits that there are, by name: ttft, tpot, itl, e2e."""
        limits = {"ttft": self.ttft_s, "tpot": self.tpot_s, "itl": self.itl_s, "e2e": self.e2e_s}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def missed_by(self, record: RequestRecord) -> tuple[str, ...]:
        """The names of the limits that the request exceeded, or ``failure``. A figure that a request does not have
        meets its limit."""
        if record.outcome is not Outcome.OK:
            return ("failure",)
        gaps = record.gaps_s()
        itl_s = float(np.percentile(gaps, 99)) if gaps.size else None
        figures = {"ttft": record.ttft_s, "tpot": record.tpot_s, "itl": itl_s, "e2e": record.e2e_s}
        return tuple(name for name, limit in self.limits_s.items() if (figures[name] or 0.0) > limit)

    def met_by(self, record: RequestRecord) -> bool:
        """Whether the request succeeded within every limit."""
        return not self.missed_by(record)


class Goodput(msgspec.Struct, frozen=True):
    """``share`` of all requests that ended (0 to 1), and good requests per second."""

    share: float
    requests_per_s: float


def goodput(records: Sequence[RequestRecord], slo: Slo, duration_s: float) -> Goodput:
    """Count requests that meet the objectives; failed ones do not, cut-off ones do not count."""
    ended = [record for record in records if record.outcome is not Outcome.CUT_OFF]
    good = sum(slo.met_by(record) for record in ended)
    return Goodput(good / len(ended) if ended else 0.0, good / duration_s)


def parse_slo(text: str) -> Slo:
    """Read ``ttft=200,tpot=20ms,itl=0.1s``: milliseconds unless a unit is given. Raises InvalidInputError."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ("ttft", "tpot", "itl", "e2e") or name in limits:
            raise InvalidInputError(f"--slo: {part!r} is not ttft=, tpot=, itl= or e2e=, each once", param="slo")
        unit = "ms" if value.endswith("ms") else "s" if value.endswith("s") else ""
        try:
            limits[name] = float(value.removesuffix(unit)) * _UNITS[unit or "ms"]
        except ValueError as exc:
            raise InvalidInputError(f"--slo: {value!r} is not a time", param="slo") from exc
        if not (limits[name] > 0 and math.isfinite(limits[name])):
            raise InvalidInputError(f"--slo: {part!r} must be above zero", param="slo")
    return Slo(limits.get("ttft"), limits.get("tpot"), limits.get("itl"), limits.get("e2e"))
