"""Goodput over the rate of long prompts, per policy of placing prefills: which share of the requests meets every
objective, and which objective the others miss.

Each case is started once a round and measured at all rates in turn, so that a round is short and every rate but the
first finds a warm server. Every other round goes backwards through the cases (``cases.turns_of``). At one rate of one
round every case gets the same requests.
"""

from __future__ import annotations

import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from kvrelay.bench.cases import Case, CaseTimes, check_names, parse_case, require_success, running, turns_of
from kvrelay.bench.errors import BenchError
from kvrelay.bench.given import ANY_TARGET, numbers, run_options
from kvrelay.bench.load.mix import ClassSpec, Dataset, parse_mix
from kvrelay.bench.load.request import check_rate
from kvrelay.bench.progress import ProgressBar, progress_bar
from kvrelay.bench.report.files import print_result, write_result
from kvrelay.bench.report.plots import new_figure, plot_beside, save_figure
from kvrelay.bench.report.records import INTERRUPTED, Outcome, RequestRecord, RunResult, Slo
from kvrelay.bench.report.table import number, table
from kvrelay.bench.serving import RunOptions, run_serve
from kvrelay.cli.processes import run_async
from kvrelay.errors import InvalidInputError

GOODPUT_KIND = "kvrelay-bench-goodput/1"
DEFAULT_POLICIES = "cost,threshold,always,aggregated"
DEFAULT_RATES = "0.5,1,2,3,4.5,6"


@dataclass(frozen=True, slots=True)
class Missed:
    """``count`` requests of a class missed this objective. One request may miss several."""

    class_name: str
    objective: str
    count: int


@dataclass(frozen=True, slots=True)
class GoodputPoint:
    """One case at one rate (long prompts per second) in one round. ``num_requests``: those that ended."""

    case: str
    round: int
    rate: float
    num_requests: int = 0
    num_met: int = 0
    num_failed: int = 0
    met_per_s: float = 0.0
    missed: tuple[Missed, ...] = ()
    error: str | None = None

    @property
    def share(self) -> float:
        """Of the requests that ended, 0 to 1."""
        return self.num_met / self.num_requests if self.num_requests else 0.0


@dataclass(frozen=True, slots=True)
class GoodputSummary:
    """One case at one rate over its rounds: medians, and the lowest and the highest share. Misses are sums."""

    case: str
    rate: float
    num_rounds: int
    num_requests: int
    share: float | None
    lowest_share: float | None
    highest_share: float | None
    met_per_s: float | None
    missed: tuple[Missed, ...]


@dataclass(frozen=True, slots=True)
class GoodputReport:
    """The whole comparison; ``summaries`` by rate, then in the order of the cases."""

    kind: str
    command: str
    load: str
    slo: Slo
    summaries: tuple[GoodputSummary, ...]
    points: tuple[GoodputPoint, ...]


def policy_cases(policies: str, python: str, model: str | None, serve_args: str) -> tuple[Case, ...]:
    """The cases of ``--policies``: ``cost``, ``threshold``, ``threshold:TOKENS``, ``always`` or ``aggregated`` (two
    workers that do both). The caller quotes ``python`` and ``model``. Raises InvalidInputError."""
    base = " ".join(part for part in (f"{python} -m kvrelay serve", model, serve_args, "--port {port}") if part)
    cases = []
    for name in filter(None, (part.strip() for part in policies.split(","))):
        kind, separator, tokens = name.partition(":")
        if name == "aggregated":
            cases.append(Case(name, command=f"{base} --prefill 0 --decode 2"))
            continue
        if kind not in ("cost", "threshold", "always") or (
            separator and not (kind == "threshold" and tokens.isdigit())
        ):
            raise InvalidInputError(
                f"--policies: {name!r} is not cost, threshold, threshold:TOKENS, always or aggregated", param="policies"
            )
        length = f" --max-local-prefill-length {tokens}" if separator else ""
        cases.append(Case(name, command=f"{base} --prefill 1 --decode 1 --disagg-policy {kind}{length}"))
    return tuple(cases)


def measure_goodput(given: dict[str, Any]) -> None:
    """``kvrelay bench interference --policies ... --rates ...``: run, write, print. Raises BenchError when a turn has
    failed."""
    if given["rounds"] < 1:
        raise InvalidInputError("there must be at least one round", param="rounds")
    model = shlex.quote(given["model_dir"]) if given["model_dir"] else None
    policies = "" if given["only_given"] else given["policies"] or DEFAULT_POLICIES
    own = policy_cases(policies, shlex.quote(sys.executable), model, given["serve_args"])
    cases = own + tuple(parse_case(text) for text in (*given["cases"], *given["urls"]))
    check_names(cases)
    rates = numbers(given["rates"] or DEFAULT_RATES, "--rates")
    for rate in rates:
        check_rate(rate, "--rates")
    classes = parse_mix(given["mix"], Dataset(vocab_size=given["vocab_size"]))
    if len(classes) != 2:
        raise InvalidInputError("the mix needs two classes: the chats, then the long prompts", param="mix")
    options = run_options(given, ANY_TARGET, classes, retokenize=False)
    if options.slo is None:
        raise InvalidInputError("goodput needs objectives", param="slo")
    slo, folder = options.slo, given["output_dir"]
    points: list[GoodputPoint] = []

    def report() -> GoodputReport:
        summaries = summarise_points([case.name for case in cases], rates, points)
        return GoodputReport(GOODPUT_KIND, options.command, given["mix"], slo, summaries, tuple(points))

    def done(point: GoodputPoint) -> None:
        points.append(point)
        result = point.error or f"{point.share:.0%} of {point.num_requests}"
        click.echo(f"round {point.round}: {point.case} at {point.rate:g}/s: {result}", err=True)
        write_result(folder, "goodput", report(), goodput_markdown(report()))

    with progress_bar() as bar:
        times = CaseTimes(given["start_timeout"])
        for round_number, case in turns_of(cases, given["rounds"]):
            run_async(_run_turn(case, round_number, rates, options, folder / "logs", times, bar, done))
    print_result(report(), goodput_markdown(report()), given["as_json"])
    plot_beside(plot_goodput, report(), folder / "goodput.png")
    require_success([point.error for point in points])


async def _run_turn(
    case: Case,
    round_number: int,
    rates: Sequence[float],
    options: RunOptions,
    log_dir: Path,
    times: CaseTimes,
    bar: ProgressBar,
    done: Callable[[GoodputPoint], None],
) -> None:
    """All rates of one case. A case that fails is noted, and the others continue."""
    left = list(rates)
    try:
        async with running(case, log_dir, times, options.target.api_key) as target:
            while left:
                turn = replace(
                    options,
                    target=target,
                    backend=case.name,
                    classes=at_rate(options.classes, left[0]),
                    seed=options.seed + 10_000 * round_number + round(left[0] * 100),
                )
                run = await run_serve(turn, bar)
                done(point_of(case.name, round_number, left.pop(0), run.result, options.slo or Slo()))
                if run.report.note == INTERRUPTED:
                    raise KeyboardInterrupt
    except BenchError as exc:
        for rate in left:
            done(GoodputPoint(case.name, round_number, rate, error=exc.message))
    except KeyboardInterrupt as exc:
        raise BenchError("interrupted; the results so far were kept") from exc


def at_rate(classes: Sequence[ClassSpec], rate: float) -> tuple[ClassSpec, ...]:
    """The same load with the second class at ``rate`` requests per second."""
    chats, prompts = classes
    return (chats, replace(prompts, rate=rate, max_concurrency=None))


def point_of(case: str, round_number: int, rate: float, result: RunResult, slo: Slo) -> GoodputPoint:
    """Judge the records of one run. Requests that the end of the run cut off do not count."""
    ended = [record for record in result.records if record.outcome is not Outcome.CUT_OFF]
    num_met = sum(slo.met_by(record) for record in ended)
    seconds = max(1, result.stop_ns - result.start_ns) / 1e9
    num_failed = sum(record.outcome is Outcome.FAILED for record in ended)
    error = None if len(ended) > num_failed else "no request succeeded"
    return GoodputPoint(
        case, round_number, rate, len(ended), num_met, num_failed, num_met / seconds, _missed(ended, slo), error
    )


def _missed(ended: Sequence[RequestRecord], slo: Slo) -> tuple[Missed, ...]:
    counts = Counter((record.class_name, name) for record in ended for name in slo.missed_by(record))
    return tuple(Missed(*what, count) for what, count in sorted(counts.items()))


def summarise_points(
    cases: Sequence[str], rates: Sequence[float], points: Sequence[GoodputPoint]
) -> tuple[GoodputSummary, ...]:
    """Put the rounds of each case at each rate together; rounds that failed do not count."""
    found = []
    for rate in rates:
        for case in cases:
            own = [point for point in points if (point.case, point.rate, point.error) == (case, rate, None)]
            shares = [point.share for point in own]
            counts: Counter[tuple[str, str]] = Counter()
            for missed in (missed for point in own for missed in point.missed):
                counts[missed.class_name, missed.objective] += missed.count
            summary = GoodputSummary(
                case,
                rate,
                len(own),
                sum(point.num_requests for point in own),
                statistics.median(shares) if shares else None,
                min(shares, default=None),
                max(shares, default=None),
                statistics.median(point.met_per_s for point in own) if own else None,
                tuple(Missed(*what, count) for what, count in sorted(counts.items())),
            )
            found.append(summary)
    return tuple(found)


def goodput_markdown(report: GoodputReport) -> str:
    """Three tables of rate and case: shares, requests per second, and misses."""
    cases = list(dict.fromkeys(summary.case for summary in report.summaries))
    rates = list(dict.fromkeys(summary.rate for summary in report.summaries))
    of = {(summary.rate, summary.case): summary for summary in report.summaries}

    def rows(cell: Callable[[GoodputSummary], str]) -> list[list[str]]:
        return [[f"{rate:g}", *(cell(of[rate, case]) for case in cases)] for rate in rates]

    first = cases[0]
    shares = [[*row, *_comparison([of[rate, case] for case in cases])] for rate, row in zip(rates, rows(_share_cell))]
    ratios = [f"{first} / best other", f"{first} / worst"] if len(cases) > 1 else []
    lines = [
        f"Load: `{report.load}`, the second class at the rate of the row (1/s); objectives: {_objectives(report.slo)}.",
        "Share of the requests that meet all objectives: median of the rounds (lowest to highest).",
        "",
        table(["rate", *cases, *ratios], shares, markdown=True),
        "",
        "Requests per second that meet all objectives, median of the rounds:",
        "",
        table(["rate", *cases], rows(lambda summary: number(summary.met_per_s)), markdown=True),
        "",
        "Missed objectives, all rounds together (a request may miss several):",
        "",
        table(["rate", *cases], rows(_missed_cell), markdown=True),
        "",
    ]
    errors = [
        f"- {point.case} at {point.rate:g}/s, round {point.round}: {point.error}"
        for point in report.points
        if point.error
    ]
    return "\n".join([*lines, *errors])


def _objectives(slo: Slo) -> str:
    return ", ".join(f"{name} {limit_s * 1e3:g} ms" for name, limit_s in slo.limits_s.items())


def _share_cell(summary: GoodputSummary) -> str:
    spread = f" ({number(summary.lowest_share, '.0%')} to {number(summary.highest_share, '.0%')})"
    return number(summary.share, ".0%") + (spread if summary.num_rounds > 1 else "")


def _missed_cell(summary: GoodputSummary) -> str:
    misses = ", ".join(f"{missed.class_name} {missed.objective} {missed.count}" for missed in summary.missed)
    return f"{misses or 'none'} of {summary.num_requests}"


def _comparison(summaries: Sequence[GoodputSummary]) -> list[str]:
    """The first case's share over the best and over the worst of the others."""
    first, others = summaries[0].share, [summary.share for summary in summaries[1:] if summary.share is not None]
    if len(summaries) < 2:
        return []
    if first is None or not others:
        return ["-", "-"]
    return [f"{first / other:.2f}" if other else "-" for other in (max(others), min(others))]


def plot_goodput(report: GoodputReport, path: Path) -> None:
    """Share and requests per second over the rate, one line a case."""
    picture = new_figure(11, 4.5)
    shares, per_s = picture.subplots(1, 2)
    for case in dict.fromkeys(summary.case for summary in report.summaries):
        own = [summary for summary in report.summaries if summary.case == case and summary.share is not None]
        rates = [summary.rate for summary in own]
        shares.plot(rates, [summary.share for summary in own], marker="o", label=case)
        per_s.plot(rates, [summary.met_per_s for summary in own], marker="o", label=case)
    for panel, label in ((shares, "share meeting the objectives"), (per_s, "requests/s meeting the objectives")):
        panel.set_xlabel("long prompts per second")
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
        panel.legend()
    save_figure(picture, path)
