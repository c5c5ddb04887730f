"""Request rate against latency and goodput for several servers, and the knee of each: the highest rate that meets the
objectives for the asked share of requests, found by doubling and bisection.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvrelay.bench.cases import Case, CaseTimes, running
from kvrelay.bench.errors import BenchError
from kvrelay.bench.progress import ProgressBar
from kvrelay.bench.report.metrics import LoadReport, ServeReport
from kvrelay.bench.report.plotting import new_figure, save_figure
from kvrelay.bench.report.records import INTERRUPTED
from kvrelay.bench.report.statistics import Distribution
from kvrelay.bench.serving import ServeOptions, run_serve
from kvrelay.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class KneeOptions:
    """Where to search: doubling from ``first_rate`` up to ``max_rate`` (req/s), then ``steps`` bisections.

    A rate is good where at least ``share`` of its requests meet the objectives.
    """

    first_rate: float = 1.0
    max_rate: float = 64.0
    steps: int = 3
    share: float = 0.95

    def __post_init__(self) -> None:
        if not 0 < self.first_rate <= self.max_rate < math.inf:
            raise InvalidInputError("the search needs 0 < first rate <= highest rate")
        if self.steps < 0 or not 0 < self.share <= 1:
            raise InvalidInputError("the search needs steps of 0 or more and a share above 0, up to 1")


@dataclass(frozen=True, slots=True)
class RatePoint:
    """One measured rate of one case."""

    rate: float
    good: bool
    report: ServeReport


@dataclass(frozen=True, slots=True)
class CaseSweep:
    """All points of a case by rising rate; ``knee`` None: not even the lowest rate was good, or none was searched."""

    name: str
    points: tuple[RatePoint, ...]
    knee: float | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SweepReport:
    """The whole sweep."""

    kind: str
    command: str
    cases: tuple[CaseSweep, ...]


def knee_search(options: KneeOptions) -> Generator[float, bool, float | None]:
    """Yields the rate to try next, is sent whether it was good, returns the highest good rate (None: there is none)."""
    good: float | None = None
    rate = options.first_rate
    while (yield rate):
        good = rate
        if rate >= options.max_rate:
            return good
        rate = min(2 * rate, options.max_rate)
    bad = rate
    for _ in range(options.steps):
        # Where not even the first rate was good, look below it.
        rate = bad / 2 if good is None else math.sqrt(good * bad)
        if (yield rate):
            good = rate
        else:
            bad = rate
    return good


async def sweep_case(
    measure: Callable[[float], Awaitable[ServeReport]], name: str, rates: Sequence[float], knee: KneeOptions | None
) -> CaseSweep:
    """Measure the given rates, then search for the knee where asked to; a failure keeps the points before it."""
    share = (knee or KneeOptions()).share
    points: dict[float, RatePoint] = {}

    async def point(rate: float) -> bool:
        if rate not in points:
            report = await measure(rate)
            goodput = report.total.goodput
            points[rate] = RatePoint(rate, goodput is not None and goodput.share >= share, report)
        return points[rate].good

    found = error = None
    try:
        for rate in rates:
            await point(rate)
        if knee is not None:
            found = await _search(point, knee)
    except BenchError as exc:
        error = exc.message
    return CaseSweep(name, tuple(points[rate] for rate in sorted(points)), found, error)


async def _search(point: Callable[[float], Awaitable[bool]], knee: KneeOptions) -> float | None:
    search = knee_search(knee)
    try:
        rate = next(search)
        while True:
            rate = search.send(await point(rate))
    except StopIteration as stop:
        knee_rate: float | None = stop.value
        return knee_rate


async def run_sweep(
    cases: Sequence[Case],
    options: ServeOptions,
    rates: Sequence[float],
    knee: KneeOptions | None,
    log_dir: Path,
    times: CaseTimes,
    bar: ProgressBar,
    done: Callable[[CaseSweep], None],
) -> tuple[CaseSweep, ...]:
    """Sweep case after case; a case that fails is noted and the others go on, unless it was interrupted.

    ``done`` is told of each, so that an early end keeps what was measured.
    """
    sweeps: list[CaseSweep] = []
    for case in cases:
        try:
            sweeps.append(await _sweep_server(case, options, rates, knee, log_dir, times, bar))
        except BenchError as exc:
            sweeps.append(CaseSweep(case.name, (), None, exc.message))
        done(sweeps[-1])
        if sweeps[-1].error == INTERRUPTED:
            break
    return tuple(sweeps)


async def _sweep_server(
    case: Case,
    options: ServeOptions,
    rates: Sequence[float],
    knee: KneeOptions | None,
    log_dir: Path,
    times: CaseTimes,
    bar: ProgressBar,
) -> CaseSweep:
    async with running(case, log_dir, times, options.target.api_key) as target:

        async def measure(rate: float) -> ServeReport:
            (spec,) = options.classes
            # Another seed at each rate: with the same prompts, later rates would find them in the prefix cache.
            seed = options.seed + int(rate * 1000)
            at_rate = replace(spec, rate=rate)
            run = await run_serve(replace(options, target=target, classes=(at_rate,), seed=seed), bar)
            if run.report.note is not None:
                raise BenchError(run.report.note)
            return run.report

        return await sweep_case(measure, case.name, rates, knee)


def sweep_markdown(sweeps: Sequence[CaseSweep]) -> str:
    """A table of all points, and the knees."""
    lines = [
        "| case | offered req/s | done req/s | output tok/s "
        "| TTFT P50 / P99 ms | ITL P50 / P99 ms | TPOT P50 ms | goodput |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for sweep in sweeps:
        for point in sweep.points:
            total = point.report.total
            cells = (
                sweep.name,
                f"{point.rate:.3g}",
                f"{total.requests_per_s:.2f}",
                f"{total.output_tokens_per_s:.0f}",
                _pair(total.ttft_s),
                _pair(total.itl_s),
                "-" if total.tpot_s is None else f"{total.tpot_s.median * 1e3:.1f}",
                _share(total),
            )
            lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    for sweep in sweeps:
        knee = "not reached at the lowest rate" if sweep.knee is None else f"{sweep.knee:.3g} req/s"
        if sweep.error:
            knee = f"unknown: {sweep.error}"
        lines.append(f"- knee of {sweep.name}: {knee}")
    return "\n".join(lines)


def plot_sweep(sweeps: Sequence[CaseSweep], path: Path) -> None:
    """Rate against TTFT, ITL and goodput, a line per case; dotted lines are the knees."""
    figure = new_figure(14, 4)
    panels = figure.subplots(1, 3)
    for sweep in sweeps:
        rates = [point.rate for point in sweep.points]
        totals = [point.report.total for point in sweep.points]
        series = (
            [_p99_ms(total.ttft_s) for total in totals],
            [_p99_ms(total.itl_s) for total in totals],
            [total.goodput.share if total.goodput else math.nan for total in totals],
        )
        for panel, values in zip(panels, series):
            (line,) = panel.plot(rates, values, "o-", label=sweep.name)
            if sweep.knee is not None:
                panel.axvline(sweep.knee, linestyle=":", color=line.get_color())
    for panel, label in zip(panels, ("TTFT P99 (ms)", "ITL P99 (ms)", "share meeting the objectives")):
        panel.set(xlabel="offered requests/s", ylabel=label)
        panel.legend()
    save_figure(figure, path)


def _pair(values: Distribution | None) -> str:
    return "-" if values is None else f"{values.median * 1e3:.1f} / {values.p99 * 1e3:.1f}"


def _p99_ms(values: Distribution | None) -> float:
    return math.nan if values is None else values.p99 * 1e3


def _share(load: LoadReport) -> str:
    return "-" if load.goodput is None else f"{load.goodput.share:.1%}"
