"""The effect of long prompts on running answers: the same mixed load on several arrangements of a server.

Cases run interleaved (A B C D A B C D), each started and stopped for its turn, so that a drift of the machine affects
all of them alike. Within a round every case gets the same requests; every round has its own requests.
"""

from __future__ import annotations

import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from kvrelay.bench.cases import Case, CaseTimes, check_names, parse_case, require_success, running
from kvrelay.bench.errors import BenchError
from kvrelay.bench.given import ANY_TARGET, run_options
from kvrelay.bench.load.mix import Dataset, parse_mix
from kvrelay.bench.progress import ProgressBar, progress_bar
from kvrelay.bench.report.files import print_result, write_result
from kvrelay.bench.report.metrics import ServeReport, figure
from kvrelay.bench.report.plots import new_figure, plot_beside, save_figure
from kvrelay.bench.report.records import INTERRUPTED
from kvrelay.bench.report.table import milliseconds, number, table
from kvrelay.bench.serving import RunOptions, run_serve
from kvrelay.cli.processes import run_async
from kvrelay.errors import InvalidInputError

INTERFERENCE_KIND = "kvrelay-bench-interference/1"

_TIMES = {
    "chat ITL P50": "chat_itl_p50_s",
    "chat ITL P99": "chat_itl_p99_s",
    "longest chat wait": "longest_wait_s",
    "chat TTFT P50": "chat_ttft_p50_s",
    "chat TTFT P99": "chat_ttft_p99_s",
    "long TTFT P50": "long_ttft_p50_s",
    "long TTFT P99": "long_ttft_p99_s",
}
"""Columns of the table, and their figures in a summary."""
_FIGURES = {
    "chat_itl_p50_s": ("chat", "itl_s.median"),
    "chat_itl_p99_s": ("chat", "itl_s.p99"),
    "chat_ttft_p50_s": ("chat", "ttft_s.median"),
    "chat_ttft_p99_s": ("chat", "ttft_s.p99"),
    "long_ttft_p50_s": ("long", "ttft_s.median"),
    "long_ttft_p99_s": ("long", "ttft_s.p99"),
    "chat_tokens_per_s": ("chat", "output_tokens_per_s"),
    "output_tokens_per_s": ("all", "output_tokens_per_s"),
    "goodput_share": ("all", "goodput.share"),
    "goodput_requests_per_s": ("all", "goodput.requests_per_s"),
}
"""Figures of a summary: medians of this figure of these requests."""


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
    longest_wait_s: float | None
    chat_itl_p50_s: float | None
    chat_itl_p99_s: float | None
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


def measure_interference(given: dict[str, Any]) -> None:
    """``kvrelay bench interference``: run, write, print. Raises BenchError when a turn has failed."""
    if given["rounds"] < 1:
        raise InvalidInputError("there must be at least one round", param="rounds")
    model = shlex.quote(given["model_dir"]) if given["model_dir"] else None
    own = () if given["only_given"] else separation_cases(shlex.quote(sys.executable), model, given["serve_args"])
    cases = own + tuple(parse_case(text) for text in (*given["cases"], *given["urls"]))
    check_names(cases)
    classes = parse_mix(given["mix"], Dataset(vocab_size=given["vocab_size"]))
    if len(classes) != 2:
        raise InvalidInputError("the mix needs two classes: the chats, then the long prompts", param="mix")
    options = run_options(given, ANY_TARGET, classes, retokenize=False)
    folder: Path = given["output_dir"]
    runs: list[CaseRun] = []

    def report() -> InterferenceReport:
        summaries = summarise([case.name for case in cases], runs, classes[0].name, classes[1].name)
        return InterferenceReport(INTERFERENCE_KIND, options.command, given["mix"], summaries, tuple(runs))

    def done(run: CaseRun) -> None:
        runs.append(run)
        click.echo(f"round {run.round}: {run.case}{': ' + run.error if run.error else ''}", err=True)
        write_result(folder, "interference", report(), interference_markdown(report()))

    with progress_bar() as bar:
        times = CaseTimes(given["start_timeout"])
        run_async(_run_turns(cases, given["rounds"], options, folder / "logs", times, bar, done))
    print_result(report(), interference_markdown(report()), given["as_json"])
    plot_beside(plot_interference, report(), folder / "interference.png")
    require_success([_failure(run) for run in runs])


def _failure(run: CaseRun) -> str | None:
    if run.report is not None and run.report.total.successful:
        return None
    return run.error or "no request succeeded"


def separation_cases(python: str, model: str | None, serve_args: str) -> tuple[Case, ...]:
    """The arrangements that show the effect of separation, and of its two orders. The caller quotes ``python`` and
    ``model``."""
    base = " ".join(part for part in (f"{python} -m kvrelay serve", model, serve_args, "--port {port}") if part)
    return (
        Case("aggregated x1", command=f"{base} --prefill 0 --decode 1"),
        Case("aggregated x2", command=f"{base} --prefill 0 --decode 2 --router round-robin"),
        Case("1P1D always remote", command=f"{base} --prefill 1 --decode 1 --disagg-policy always"),
        Case("1P1D conditional", command=f"{base} --prefill 1 --decode 1"),
        Case("1P1D prefill-first", command=f"{base} --prefill 1 --decode 1 --order prefill-first"),
    )


async def _run_turns(
    cases: Sequence[Case],
    rounds: int,
    options: RunOptions,
    log_dir: Path,
    times: CaseTimes,
    bar: ProgressBar,
    done: Callable[[CaseRun], None],
) -> None:
    """Run all turns; a case that fails is noted and the others continue. ``done`` is called after each turn."""
    for turn_number in range(rounds):
        for case in cases:
            try:
                async with running(case, log_dir, times, options.target.api_key) as target:
                    turn = replace(options, target=target, backend=case.name, seed=options.seed + turn_number)
                    run = CaseRun(case.name, turn_number + 1, (await run_serve(turn, bar)).report)
            except BenchError as exc:
                run = CaseRun(case.name, turn_number + 1, None, exc.message)
            done(run)
            if run.report is not None and run.report.note == INTERRUPTED:
                raise BenchError("interrupted; the results so far were kept")


def summarise(cases: Sequence[str], runs: Sequence[CaseRun], chat: str, long: str) -> tuple[CaseSummary, ...]:
    """Put the rounds of each case together; ``chat`` and ``long`` name the two classes of requests."""
    names = {"chat": chat, "long": long}
    return tuple(_summarise_case(case, [run for run in runs if run.case == case], names) for case in cases)


def _summarise_case(case: str, runs: Sequence[CaseRun], names: dict[str, str]) -> CaseSummary:
    reports = [run.report for run in runs if run.report is not None]

    def values(part: str, path: str) -> list[float]:
        loads = [load for report in reports for load in (report.total, *report.classes)]
        found = [figure(load, path) for load in loads if load.name == names.get(part, part)]
        return [value for value in found if value is not None]

    return CaseSummary(
        case,
        len(reports),
        len(runs) - len(reports),
        sum(report.total.failed for report in reports),
        max(values("chat", "gap_s.max"), default=None),
        **{name: statistics.median(found) if (found := values(*what)) else None for name, what in _FIGURES.items()},
    )


def interference_markdown(report: InterferenceReport) -> str:
    """The table for a performance page."""
    rows = []
    for summary in report.summaries:
        failed = f"{summary.failed_requests}" + (f", {summary.failed_rounds} rounds" * bool(summary.failed_rounds))
        rates = (number(summary.chat_tokens_per_s, ".0f"), number(summary.output_tokens_per_s, ".0f"))
        times = milliseconds(*(getattr(summary, name) for name in _TIMES.values()))
        rows.append([summary.case, *times, *rates, number(summary.goodput_share, ".0%"), failed])
    columns = ("case", *_TIMES, "chat tok/s", "all tok/s", "goodput", "failed")
    lines = [f"Load: `{report.load}`; times in ms, medians of the rounds, the longest wait is the worst of all.", ""]
    lines += [table(columns, rows, markdown=True), ""]
    return "\n".join([*lines, *(f"- {run.case}, round {run.round}: {run.error}" for run in report.runs if run.error)])


def plot_interference(report: InterferenceReport, path: Path) -> None:
    """Bars per case: chat ITL (median and P99), first tokens, tokens per second."""
    picture = new_figure(15, 4.5)
    panels = itl, ttft, tokens = picture.subplots(1, 3)
    names = [summary.case for summary in report.summaries]
    _bars(itl, report.summaries, (("P50", "chat_itl_p50_s"), ("P99", "chat_itl_p99_s"), ("max", "longest_wait_s")))
    _bars(ttft, report.summaries, (("chat P50", "chat_ttft_p50_s"), ("long P50", "long_ttft_p50_s")))
    tokens.bar(range(len(names)), [summary.chat_tokens_per_s or 0 for summary in report.summaries])
    for panel, label in zip(panels, ("chat ITL (ms)", "time to first token (ms)", "chat tokens/s")):
        panel.set_ylabel(label)
        panel.set_xticks(range(len(names)), names, rotation=20, ha="right")
    for panel in (itl, ttft):
        heights = [bar.get_height() for bar in panel.patches if bar.get_height() > 0]
        if heights:
            panel.set_yscale("log")
            panel.set_ylim(bottom=min(heights) / 2)
        panel.legend()
    save_figure(picture, path)


def _bars(panel: Any, summaries: Sequence[CaseSummary], series: Sequence[tuple[str, str]]) -> None:
    width = 0.8 / len(series)
    for at, (label, field) in enumerate(series):
        heights = [(getattr(summary, field) or 0) * 1e3 for summary in summaries]
        places = [place + (at - (len(series) - 1) / 2) * width for place in range(len(summaries))]
        panel.bar(places, heights, width, label=label)
