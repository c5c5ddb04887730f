"""What a long prompt does to those who are being answered: the same mixed load on several arrangements of a server.

Cases run interleaved (A B C D A B C D), each started and stopped for its turn, so that a drift of the machine meets
all of them alike. In a round every case gets the same requests; every round has its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvrelay.bench.cases import Case, CaseTimes, running
from kvrelay.bench.errors import BenchError
from kvrelay.bench.progress import ProgressBar
from kvrelay.bench.report.metrics import LoadReport, ServeReport
from kvrelay.bench.report.plotting import new_figure, save_figure
from kvrelay.bench.report.records import INTERRUPTED
from kvrelay.bench.report.statistics import Distribution
from kvrelay.bench.serving import ServeOptions, run_serve

_COLUMNS = (
    "chat ITL P50",
    "chat ITL P99",
    "longest chat wait",
    "chat TTFT P50",
    "chat TTFT P99",
    "long TTFT P50",
    "long TTFT P99",
)


@dataclass(frozen=True, slots=True)
class CaseRun:
    """One turn of one case. ``report`` None: it failed, and ``error`` says why."""

    case: str
    round: int
    report: ServeReport | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class CaseSummary:
    """A case over its rounds: the median of each figure (seconds), ``longest_wait_s`` the worst of all rounds."""

    case: str
    rounds: int
    failed_rounds: int
    failed_requests: int
    chat_itl_p50_s: float | None
    chat_itl_p99_s: float | None
    longest_wait_s: float | None
    chat_ttft_p50_s: float | None
    chat_ttft_p99_s: float | None
    long_ttft_p50_s: float | None
    long_ttft_p99_s: float | None
    chat_tokens_per_s: float | None
    output_tokens_per_s: float | None
    goodput_share: float | None
    goodput_requests_per_s: float | None


@dataclass(frozen=True, slots=True)
class InterferenceReport:
    """The whole comparison; ``summaries`` in the order of the cases."""

    kind: str
    command: str
    load: str
    summaries: tuple[CaseSummary, ...]
    runs: tuple[CaseRun, ...]


def separation_cases(python: str, model: str | None, serve_args: str) -> tuple[Case, ...]:
    """The mission's four arrangements, as commands of this system. The caller quotes ``python`` and ``model``."""
    base = " ".join(part for part in (f"{python} -m kvrelay serve", model, serve_args, "--port {port}") if part)
    return (
        Case("aggregated x1", command=f"{base} --prefill 0 --decode 1"),
        Case("aggregated x2", command=f"{base} --prefill 0 --decode 2 --router round-robin"),
        Case("1P1D always remote", command=f"{base} --prefill 1 --decode 1 --max-local-prefill-length 0"),
        Case("1P1D conditional", command=f"{base} --prefill 1 --decode 1"),
    )


async def run_interference(
    cases: Sequence[Case],
    rounds: int,
    options: ServeOptions,
    log_dir: Path,
    times: CaseTimes,
    bar: ProgressBar,
    done: Callable[[CaseRun], None],
) -> tuple[CaseRun, ...]:
    """Run all turns; a case that fails is noted and the others go on. ``done`` is told of each turn."""
    runs = []
    for number in range(rounds):
        for case in cases:
            try:
                async with running(case, log_dir, times, options.target.api_key) as target:
                    turn = replace(options, target=target, backend=case.name, seed=options.seed + number)
                    run = CaseRun(case.name, number + 1, (await run_serve(turn, bar)).report)
            except BenchError as exc:
                run = CaseRun(case.name, number + 1, None, exc.message)
            runs.append(run)
            done(run)
            if run.report is not None and run.report.note == INTERRUPTED:
                raise BenchError("interrupted; what was measured was kept")
    return tuple(runs)


def summarise(cases: Sequence[str], runs: Sequence[CaseRun], chat: str, long: str) -> tuple[CaseSummary, ...]:
    """Put the rounds of each case together; ``chat`` and ``long`` name the two classes of requests."""
    return tuple(_summarise_case(case, [run for run in runs if run.case == case], chat, long) for case in cases)


def _summarise_case(case: str, runs: Sequence[CaseRun], chat: str, long: str) -> CaseSummary:
    reports = [run.report for run in runs if run.report is not None]
    chats = [part for report in reports for part in report.classes if part.name == chat]
    longs = [part for report in reports for part in report.classes if part.name == long]
    totals = [report.total for report in reports]
    waits = [load.gap_s.max for load in chats if load.gap_s]
    return CaseSummary(
        case=case,
        rounds=len(reports),
        failed_rounds=len(runs) - len(reports),
        failed_requests=sum(load.failed for load in totals),
        chat_itl_p50_s=_median(chats, lambda load: _of(load.itl_s, "median")),
        chat_itl_p99_s=_median(chats, lambda load: _of(load.itl_s, "p99")),
        longest_wait_s=max(waits) if waits else None,
        chat_ttft_p50_s=_median(chats, lambda load: _of(load.ttft_s, "median")),
        chat_ttft_p99_s=_median(chats, lambda load: _of(load.ttft_s, "p99")),
        long_ttft_p50_s=_median(longs, lambda load: _of(load.ttft_s, "median")),
        long_ttft_p99_s=_median(longs, lambda load: _of(load.ttft_s, "p99")),
        chat_tokens_per_s=_median(chats, lambda load: load.output_tokens_per_s),
        output_tokens_per_s=_median(totals, lambda load: load.output_tokens_per_s),
        goodput_share=_median(totals, lambda load: load.goodput.share if load.goodput else None),
        goodput_requests_per_s=_median(totals, lambda load: load.goodput.requests_per_s if load.goodput else None),
    )


def _median(loads: Sequence[LoadReport], figure: Callable[[LoadReport], float | None]) -> float | None:
    values = [value for load in loads if (value := figure(load)) is not None]
    return statistics.median(values) if values else None


def _of(values: Distribution | None, statistic: str) -> float | None:
    return None if values is None else float(getattr(values, statistic))


def interference_markdown(report: InterferenceReport) -> str:
    """The table that belongs into a performance page."""
    lines = [
        f"Load: `{report.load}`; times in ms, medians of the rounds, the longest wait is the worst of all.",
        "",
        "| case | " + " | ".join(_COLUMNS) + " | chat tok/s | all tok/s | goodput | failed |",
        "|---" * (len(_COLUMNS) + 5) + "|",
    ]
    for summary in report.summaries:
        cells = [f"{value * 1e3:.1f}" if value is not None else "-" for value in _times(summary)]
        cells.append(_number(summary.chat_tokens_per_s))
        cells.append(_number(summary.output_tokens_per_s))
        cells.append("-" if summary.goodput_share is None else f"{summary.goodput_share:.0%}")
        cells.append(f"{summary.failed_requests}" + (f", {summary.failed_rounds} rounds" * bool(summary.failed_rounds)))
        lines.append(f"| {summary.case} | " + " | ".join(cells) + " |")
    lines += ["", *(f"- {run.case}, round {run.round}: {run.error}" for run in report.runs if run.error)]
    return "\n".join(lines)


def _times(summary: CaseSummary) -> tuple[float | None, ...]:
    return (
        summary.chat_itl_p50_s,
        summary.chat_itl_p99_s,
        summary.longest_wait_s,
        summary.chat_ttft_p50_s,
        summary.chat_ttft_p99_s,
        summary.long_ttft_p50_s,
        summary.long_ttft_p99_s,
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def plot_interference(report: InterferenceReport, path: Path) -> None:
    """Bars per case: chat ITL (median and P99), first tokens, tokens per second."""
    figure = new_figure(15, 4.5)
    itl, ttft, tokens = figure.subplots(1, 3)
    names = [summary.case for summary in report.summaries]
    places = range(len(names))
    _bars(itl, report.summaries, (("P50", "chat_itl_p50_s"), ("P99", "chat_itl_p99_s"), ("max", "longest_wait_s")))
    _bars(ttft, report.summaries, (("chat P50", "chat_ttft_p50_s"), ("long P50", "long_ttft_p50_s")))
    tokens.bar(places, [summary.chat_tokens_per_s or 0 for summary in report.summaries])
    for panel, label in ((itl, "chat ITL (ms)"), (ttft, "time to first token (ms)"), (tokens, "chat tokens/s")):
        panel.set_ylabel(label)
        panel.set_xticks(places, names, rotation=20, ha="right")
    for panel in (itl, ttft):
        heights = [bar.get_height() for bar in panel.patches if bar.get_height() > 0]
        if heights:
            panel.set_yscale("log")
            panel.set_ylim(bottom=min(heights) / 2)
        panel.legend()
    save_figure(figure, path)


def _bars(panel: Any, summaries: Sequence[CaseSummary], series: Sequence[tuple[str, str]]) -> None:
    width = 0.8 / len(series)
    for at, (label, field) in enumerate(series):
        heights = [(getattr(summary, field) or 0) * 1e3 for summary in summaries]
        places = [place + (at - (len(series) - 1) / 2) * width for place in range(len(summaries))]
        panel.bar(places, heights, width, label=label)
