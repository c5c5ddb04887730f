"""The serving report as text, and runs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvrelay.bench.report.metrics import Distribution, LoadReport, ServeReport, figure
from kvrelay.bench.report.table import number, table

_LABEL, _VALUE = 44, 16


def report_text(report: ServeReport, *, percentiles: bool = False) -> str:
    """The whole report; with ``percentiles`` P90 and P95 of everything as well, and P99 of the latency end to end."""
    lines = [_heading("Serving benchmark"), _line("Backend:", report.info.backend)]
    lines += _load_lines(report.total, report.duration_s, mixed=bool(report.classes))
    lines += _latency_lines(report.total, percentiles)
    for part in report.classes:
        lines += [_heading(f"Class {part.name}"), *_load_lines(part, report.duration_s)]
        lines += _latency_lines(part, percentiles)
    lines.append(_heading("Run"))
    lines.append(_line("Server:", f"{report.info.url} {report.info.model}"))
    lines.append(_line("Tokens counted by:", ", ".join(report.token_sources) or "-"))
    lines.append(_line("Client: share of a core:", f"{report.client.cpu_share:.0%}"))
    lines.append(_line("Client: latest wake-up (ms):", f"{report.client.max_lag_s * 1e3:.1f}"))
    if report.client.reconnects:
        lines.append(_line("Client: requests sent again:", str(report.client.reconnects)))
    lines += [_line(f"Error, {error.count} times:", error.message) for error in report.errors]
    if report.note:
        lines.append(_line("Not complete:", report.note))
    return "\n".join([*lines, "=" * (_LABEL + _VALUE)])


def _load_lines(load: LoadReport, duration_s: float, *, mixed: bool = False) -> list[str]:
    rate = "closed loop or all at once" if load.request_rate is None else f"{load.request_rate:g}"
    limit = "not limited" if load.max_concurrency is None else str(load.max_concurrency)
    if mixed:
        rate = limit = "mixed, see the classes"
    retokenized = "-" if load.retokenized_tokens is None else str(load.retokenized_tokens)
    lines = [
        _line("Request rate (req/s):", rate),
        _line("Max concurrency:", limit),
        _line("Successful requests:", str(load.successful)),
        _line("Duration (s):", f"{duration_s:.2f}"),
        _line("Total input tokens:", str(load.input_tokens)),
        _line("Total generated tokens:", str(load.output_tokens)),
        _line("Total generated tokens (retokenized):", retokenized),
        _line("Request throughput (req/s):", f"{load.requests_per_s:.2f}"),
        _line("Input token throughput (tok/s):", f"{load.input_tokens_per_s:.2f}"),
        _line("Output token throughput (tok/s):", f"{load.output_tokens_per_s:.2f}"),
        _line("Total token throughput (tok/s):", f"{load.total_tokens_per_s:.2f}"),
        _line("Concurrency:", f"{load.concurrency:.2f}"),
    ]
    if load.failed or load.cut_off:
        lines.append(_line("Failed / cut off requests:", f"{load.failed} / {load.cut_off}"))
    if load.cached_tokens is not None:
        lines.append(_line("Cached input tokens:", str(load.cached_tokens)))
    if load.goodput is not None:
        lines.append(_line("Goodput (share of requests):", f"{load.goodput.share:.1%}"))
        lines.append(_line("Goodput (req/s):", f"{load.goodput.requests_per_s:.2f}"))
    return lines


def _latency_lines(load: LoadReport, percentiles: bool) -> list[str]:
    sections = (
        ("End-to-end latency", "E2E latency", load.e2e_s),
        ("Time to first token", "TTFT", load.ttft_s),
        ("Time per output token (without the first)", "TPOT", load.tpot_s),
        ("Inter-token latency", "ITL", load.itl_s),
        ("Longest waits between arrivals", "gap", load.gap_s),
    )
    lines = []
    for title, name, values in sections:
        lines.append(_heading(title, "-"))
        lines += [_line(f"{label} {name} (ms):", text) for label, text in _shown(name, values, percentiles)]
    return lines


def _shown(name: str, values: Distribution | None, percentiles: bool) -> Iterator[tuple[str, str]]:
    fields = {"Mean": "mean", "Median": "median", "P90": "p90", "P95": "p95", "P99": "p99", "Max": "max"}
    wanted = {"E2E latency": ("Mean", "Median"), "gap": ("P99", "Max")}.get(name, ("Mean", "Median", "P99"))
    for label, field in fields.items():
        if label in wanted or (percentiles and label.startswith("P")):
            yield label, "-" if values is None else f"{getattr(values, field) * 1e3:.2f}"


def _heading(title: str, fill: str = "=") -> str:
    return f" {title} ".center(_LABEL + _VALUE, fill)


def _line(label: str, value: str) -> str:
    return f"{label:<{_LABEL}}{value:<{_VALUE}}".rstrip()


# -- runs side by side ------------------------------------------------------------------------------------------------


_ROWS = (
    ("successful requests", "successful", 1.0),
    ("failed requests", "failed", 1.0),
    ("requests/s", "requests_per_s", 1.0),
    ("output tok/s", "output_tokens_per_s", 1.0),
    ("total tok/s", "total_tokens_per_s", 1.0),
    *(
        (f"{name} {statistic} ms", f"{field}.{statistic}", 1e3)
        for name, field in (("E2E", "e2e_s"), ("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"))
        for statistic in (("mean", "median") if name == "E2E" else ("mean", "median", "p99"))
    ),
    ("gap max ms", "gap_s.max", 1e3),
    ("goodput share", "goodput.share", 1.0),
)


def comparison_text(names: Sequence[str], reports: Sequence[ServeReport]) -> str:
    """One table per class of requests: each run's figures, and their ratios to the first run's."""
    loads = [{part.name: part for part in (report.total, *report.classes)} for report in reports]
    columns = [names[0], *(column for name in names[1:] for column in (name, "ratio"))]
    texts = []
    for name in loads[0]:
        rows = []
        for label, path, scale in _ROWS:
            first, *others = (figure(load.get(name), path) for load in loads)
            cells = [number(first, ".2f", scale)]
            for value in others:
                ratio = value / first if value is not None and first else None
                cells += [number(value, ".2f", scale), "-" if ratio is None else f"{ratio:.2f}x"]
            rows.append([label, *cells])
        texts.append(table(["all requests" if name == "all" else f"class {name}", *columns], rows))
    return "\n\n".join(texts)
