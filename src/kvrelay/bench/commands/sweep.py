"""``kvrelay bench sweep``: rate against latency and goodput, for several servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvrelay.bench.commands.options import (
    FILE,
    body_options,
    command_line,
    dataset_options,
    make_body,
    make_dataset,
    numbers,
)

SWEEP_KIND = "kvrelay-bench-sweep/1"


@click.command("sweep")
@click.option("--case", "cases", multiple=True, required=True, metavar="NAME=URL|COMMAND", help="A server; repeatable.")
@body_options
@dataset_options
@click.option("--rates", default="", metavar="R,R,...", help="Rates (req/s) to measure in any case.")
@click.option("--no-knee", is_flag=True, help="Measure only --rates, do not search.")
@click.option("--first-rate", type=float, default=1.0, show_default=True, help="Where the search begins.")
@click.option("--max-rate", type=float, default=64.0, show_default=True, help="Where the search ends.")
@click.option("--steps", type=int, default=3, show_default=True, help="Bisections after the doubling.")
@click.option("--share", type=float, default=0.95, show_default=True, help="Share of requests that must meet --slo.")
@click.option("--slo", default="ttft=500,tpot=50", show_default=True, help="Objectives, in ms.")
@click.option("--duration", type=float, default=20.0, show_default=True, help="Seconds of sending per rate.")
@click.option("--drain", type=float, default=20.0, show_default=True, help="Seconds that requests in flight then have.")
@click.option("--warm-up", type=int, default=4, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--start-timeout", type=float, default=120.0, show_default=True, help="Seconds until a server is healthy."
)
@click.option("--output-dir", type=FILE, default=Path("bench-results/sweep"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the Markdown table.")
def sweep_command(**given: Any) -> None:
    """Request rate against TTFT, ITL and goodput, with the knee found by bisection.

    A case is a URL, or a command in which {port} stands for the port; the command is started and stopped by the tool.
    Writes sweep.json, sweep.md and sweep.png.

    \b
    Example: kvrelay bench sweep --case one='kvrelay serve --prefill 0 --decode 1 --port {port}' \\
               --case peer=http://127.0.0.1:8001 --slo ttft=300,tpot=30 --duration 15
    """
    from kvrelay.bench.cases import CaseTimes, check_names, parse_case
    from kvrelay.bench.client.driver import RunLimits
    from kvrelay.bench.client.target import Target
    from kvrelay.bench.errors import BenchError, MissingPackageError
    from kvrelay.bench.load.arrivals import check_rate
    from kvrelay.bench.load.mix import ClassSpec
    from kvrelay.bench.progress import progress_bar
    from kvrelay.bench.report.files import to_json, write_text
    from kvrelay.bench.report.slo import parse_slo
    from kvrelay.bench.serving import ServeOptions, run_on_loop
    from kvrelay.bench.sweep import CaseSweep, KneeOptions, SweepReport, plot_sweep, run_sweep, sweep_markdown

    cases = tuple(parse_case(text) for text in given["cases"])
    check_names(cases)
    rates = numbers(given["rates"], "--rates") if given["rates"] else ()
    for rate in rates:
        check_rate(rate, "--rates")
    options = ServeOptions(
        target=Target("127.0.0.1", 0, api_key=given["api_key"]),
        classes=(ClassSpec("requests", make_dataset(given), rate=1.0),),
        model=given["model"],
        body=make_body(given),
        limits=RunLimits(given["duration"], given["drain"]),
        slo=parse_slo(given["slo"]),
        warm_up=given["warm_up"],
        seed=given["seed"],
        retokenize=False,
        tokenizer=given["tokenizer"],
        command=command_line(),
    )
    searched = KneeOptions(given["first_rate"], given["max_rate"], given["steps"], given["share"])
    knee = None if given["no_knee"] else searched
    folder: Path = given["output_dir"]
    finished: list[CaseSweep] = []

    def done(sweep: CaseSweep) -> None:
        finished.append(sweep)
        write_text(folder / "sweep.json", to_json(SweepReport(SWEEP_KIND, options.command, tuple(finished))))
        write_text(folder / "sweep.md", sweep_markdown(finished))

    with progress_bar() as bar:
        times = CaseTimes(given["start_timeout"])
        run_on_loop(run_sweep(cases, options, rates, knee, folder / "logs", times, bar, done))
    report = SweepReport(SWEEP_KIND, options.command, tuple(finished))
    click.echo(to_json(report) if given["as_json"] else sweep_markdown(finished))
    try:
        plot_sweep(finished, folder / "sweep.png")
    except MissingPackageError as exc:
        click.echo(f"no plot: {exc.message}", err=True)
    failed = [sweep for sweep in finished if sweep.error]
    if failed:
        raise BenchError(f"case {failed[0].name}: {failed[0].error}; what was measured was kept")
