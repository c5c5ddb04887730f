"""Request rate against latency and goodput for several servers, and the knee of each: the highest rate that meets the
objectives for the required share of requests, found by doubling and bisection.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from kvrelay.bench.cases import Case, CaseTimes, check_names, parse_case, running
from kvrelay.bench.errors import BenchError
from kvrelay.bench.given import ANY_TARGET, dataset, numbers, run_options
from kvrelay.bench.load.mix import ClassSpec
from kvrelay.bench.load.request import check_rate
from kvrelay.bench.progress import ProgressBar, progress_bar
from kvrelay.bench.report.files import print_result, write_result
from kvrelay.bench.report.metrics import INTERRUPTED, ServeReport, figure
from kvrelay.bench.report.plots import new_figure, plot_beside, save_figure
from kvrelay.bench.report.table import milliseconds, number, table
from kvrelay.bench.serving import RunOptions, run_serve
from kvrelay.cli.processes import run_async
from kvrelay.errors import InvalidInputError

SWEEP_KIND = "kvrelay-bench-sweep/1"
_COLUMNS = (
    *("case", "offered req/s", "done req/s", "output tok/s"),
    *("TTFT P50 / P99 ms", "ITL P50 / P99 ms", "TPOT P50 ms", "goodput"),
)


class KneeOptions(msgspec.Struct, frozen=True):
    """The search: doubling from ``first_rate`` up to ``max_rate`` (req/s), then ``steps`` bisections.

    A rate is good if at least ``share`` of its requests meet the objectives.
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


class RatePoint(msgspec.Struct, frozen=True):
    """One measured rate of one case."""

    rate: float
    good: bool
    report: ServeReport


class CaseSweep(msgspec.Struct, frozen=True):
    """All points of a case by rising rate. ``knee`` None: the lowest rate was not good, or no search was requested."""

    name: str
    points: tuple[RatePoint, ...]
    knee: float | None
    error: str | None = None


class SweepReport(msgspec.Struct, frozen=True):
    """The whole sweep."""

    kind: str
    command: str
    cases: tuple[CaseSweep, ...]


async def knee_of(options: KneeOptions, is_good: Callable[[float], Awaitable[bool]]) -> float | None:
    """The highest good rate of those that it tries; None: no good rate."""
    good: float | None = None
    rate = options.first_rate
    while await is_good(rate):
        good = rate
        if rate >= options.max_rate:
            return good
        rate = min(2 * rate, options.max_rate)
    bad = rate
    for _ in range(options.steps):
        # If the first rate was not good, search below it.
        rate = bad / 2 if good is None else math.sqrt(good * bad)
        if await is_good(rate):
            good = rate
        else:
            bad = rate
    return good


async def sweep_case(
    measure: Callable[[float], Awaitable[ServeReport]], name: str, rates: Sequence[float], knee: KneeOptions | None
) -> CaseSweep:
    """Measure the given rates, then search for the knee if requested; a failure keeps the earlier points."""
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
            found = await knee_of(knee, point)
    except BenchError as exc:
        error = exc.message
    return CaseSweep(name, tuple(points[rate] for rate in sorted(points)), found, error)


def measure_sweep(given: dict[str, Any]) -> None:
    """``kvrelay bench sweep``: measure case after case, write, print. Raises BenchError when a case has failed."""
    cases = tuple(parse_case(text) for text in given["cases"])
    check_names(cases)
    rates = numbers(given["rates"], "--rates")
    for rate in rates:
        check_rate(rate, "--rates")
    options = run_options(given, ANY_TARGET, (ClassSpec("requests", dataset(given), rate=1.0),), retokenize=False)
    searched = KneeOptions(given["first_rate"], given["max_rate"], given["steps"], given["share"])
    knee = None if given["no_knee"] else searched
    folder: Path = given["output_dir"]
    sweeps: list[CaseSweep] = []
    with progress_bar() as bar:
        for case in cases:
            turn = _sweep_server(case, options, rates, knee, folder / "logs", CaseTimes(given["start_timeout"]), bar)
            sweeps.append(run_async(turn))
            # An early end keeps the results so far.
            report = SweepReport(SWEEP_KIND, options.command, tuple(sweeps))
            write_result(folder, "sweep", report, sweep_markdown(sweeps))
            if sweeps[-1].error == INTERRUPTED:
                break
    print_result(report, sweep_markdown(sweeps), given["as_json"])
    plot_beside(plot_sweep, sweeps, folder / "sweep.png")
    for sweep in sweeps:
        if sweep.error:
            raise BenchError(f"case {sweep.name}: {sweep.error}; the results so far were kept")


async def _sweep_server(
    case: Case,
    options: RunOptions,
    rates: Sequence[float],
    knee: KneeOptions | None,
    log_dir: Path,
    times: CaseTimes,
    bar: ProgressBar,
) -> CaseSweep:
    """A case that fails is noted, so that the others continue."""
    try:
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
    except BenchError as exc:
        return CaseSweep(case.name, (), None, exc.message)


def sweep_markdown(sweeps: Sequence[CaseSweep]) -> str:
    """A table of all points, and the knees."""
    rows = []
    for sweep in sweeps:
        for point in sweep.points:
            total = point.report.total
            rates = (f"{point.rate:.3g}", f"{total.requests_per_s:.2f}", f"{total.output_tokens_per_s:.0f}")
            latencies = (
                " / ".join(milliseconds(figure(total, f"{name}.median"), figure(total, f"{name}.p99")))
                for name in ("ttft_s", "itl_s")
            )
            (tpot,) = milliseconds(figure(total, "tpot_s.median"))
            rows.append((sweep.name, *rates, *latencies, tpot, number(figure(total, "goodput.share"), ".1%")))
    lines = [table(_COLUMNS, rows, markdown=True), ""]
    for sweep in sweeps:
        knee = "not reached at the lowest rate" if sweep.knee is None else f"{sweep.knee:.3g} req/s"
        lines.append(f"- knee of {sweep.name}: {f'unknown: {sweep.error}' if sweep.error else knee}")
    return "\n".join(lines)


def plot_sweep(sweeps: Sequence[CaseSweep], path: Path) -> None:
    """Plot TTFT, ITL and goodput over the rate, one line per case; dotted lines are the knees."""
    picture = new_figure(14, 4)
    axes = (
        ("TTFT P99 (ms)", "ttft_s.p99", 1e3),
        ("ITL P99 (ms)", "itl_s.p99", 1e3),
        ("share meeting the objectives", "goodput.share", 1.0),
    )
    for panel, (label, path_of, scale) in zip(picture.subplots(1, 3), axes):
        for sweep in sweeps:
            found = [figure(point.report.total, path_of) for point in sweep.points]
            values = [math.nan if value is None else value * scale for value in found]
            (line,) = panel.plot([point.rate for point in sweep.points], values, "o-", label=sweep.name)
            if sweep.knee is not None:
                panel.axvline(sweep.knee, linestyle=":", color=line.get_color())
        panel.set(xlabel="offered requests/s", ylabel=label)
        panel.legend()
    save_figure(picture, path)
