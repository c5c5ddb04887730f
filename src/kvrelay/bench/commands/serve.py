"""``kvrelay bench serve``: load against one server, and the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvrelay.bench.commands.options import (
    FILE,
    body_options,
    command_line,
    dataset_options,
    make_body,
    make_dataset,
    stdout_console,
)

if TYPE_CHECKING:
    from kvrelay.bench.load.mix import ClassSpec, Dataset
    from kvrelay.bench.serving import ServeRun

_DEFAULT_PROMPTS = 100


@click.command("serve")
@click.option("--base-url", required=True, metavar="URL", help="The server, e.g. http://127.0.0.1:8000")
@body_options
@dataset_options
@click.option("--backend", default="openai", show_default=True, help="A name for the report.")
@click.option("--num-prompts", type=int, help="Number of requests.  [default: 100, or the whole file]")
@click.option("--request-rate", type=float, help="Requests per second, Poisson; inf sends all at once.")
@click.option(
    "--burstiness", type=float, default=1.0, show_default=True, help="Shape of the gaps: below 1 is burstier."
)
@click.option("--max-concurrency", type=int, help="At most so many in flight; without a rate, a closed loop of them.")
@click.option("--time-scale", type=float, default=1.0, show_default=True, help="Replay a trace so many times as fast.")
@click.option("--mix", metavar="CLASSES", help="Classes side by side: chat=64/128:closed=8,long=1024/8:rate=3")
@click.option("--duration", type=float, help="Seconds after which no new request is sent.")
@click.option("--drain", type=float, default=60.0, show_default=True, help="Seconds that requests in flight then have.")
@click.option("--warm-up", type=int, default=4, show_default=True, help="Unmeasured requests of each class beforehand.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--slo", metavar="LIMITS", help="Goodput limits in ms: ttft=200,tpot=20,itl=50")
@click.option("--percentiles", is_flag=True, help="Print P90, P95 and P99 of everything.")
@click.option("--no-retokenize", is_flag=True, help="Do not count the answers' tokens again.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the report.")
@click.option("--output", type=FILE, help="Write the JSON report to a file.")
@click.option(
    "--compare", multiple=True, type=FILE, metavar="FILE", help="Reports to show beside this one; repeatable."
)
@click.option("--plot", type=FILE, help="Draw latencies, a timeline and throughput.")
def serve_command(**given: Any) -> None:
    """Send load to an OpenAI-compatible server and report latencies, throughput and goodput.

    \b
    Example: kvrelay bench serve --base-url http://127.0.0.1:8000 --request-rate 5 --num-prompts 200 \\
               --input-len 512 --output-len uniform~16~128 --slo ttft=300,tpot=30 --output run.json
    """
    _serve(**given)


def _serve(
    *,
    base_url: str,
    model: str | None,
    api_key: str | None,
    backend: str,
    duration: float | None,
    drain: float,
    warm_up: int,
    seed: int,
    slo: str | None,
    percentiles: bool,
    no_retokenize: bool,
    as_json: bool,
    output: Path | None,
    compare: tuple[Path, ...],
    plot: Path | None,
    **load: Any,
) -> None:
    from kvrelay.bench.client.driver import RunLimits
    from kvrelay.bench.client.target import parse_target
    from kvrelay.bench.progress import progress_bar
    from kvrelay.bench.report.files import read_serve_report
    from kvrelay.bench.report.slo import parse_slo
    from kvrelay.bench.serving import ServeOptions, require_success, run_on_loop, run_serve

    others = [read_serve_report(path) for path in compare]
    dataset = make_dataset(load)
    options = ServeOptions(
        target=parse_target(base_url, api_key),
        classes=_classes(dataset, duration, load),
        model=model,
        body=make_body(load),
        backend=backend,
        limits=RunLimits(duration, drain),
        slo=parse_slo(slo) if slo else None,
        warm_up=warm_up,
        seed=seed,
        retokenize=not no_retokenize,
        tokenizer=load["tokenizer"],
        command=command_line(),
    )
    with progress_bar() as bar:
        run = run_on_loop(run_serve(options, bar))
    _show(run, percentiles=percentiles, as_json=as_json, output=output, plot=plot)
    if others and not as_json:
        from kvrelay.bench.report.text import print_comparison

        names = ["this run", *(path.stem for path in compare)]
        print_comparison(names, [run.report, *others], stdout_console())
    require_success(run.report)


def _show(run: ServeRun, *, percentiles: bool, as_json: bool, output: Path | None, plot: Path | None) -> None:
    """Results are written before anything is judged, so that an early end keeps what was measured."""
    from kvrelay.bench.report.files import to_json, write_text
    from kvrelay.bench.report.plots import plot_run
    from kvrelay.bench.report.text import report_text

    click.echo(to_json(run.report) if as_json else report_text(run.report, percentiles=percentiles))
    if output is not None:
        write_text(output, to_json(run.report))
    if plot is not None:
        plot_run(f"{run.report.info.backend}: {run.report.info.url}", run.result, plot)


def _classes(dataset: Dataset, duration: float | None, load: dict[str, Any]) -> tuple[ClassSpec, ...]:
    from kvrelay.bench.load.mix import ClassSpec, DatasetKind, parse_mix

    if load["mix"]:
        return parse_mix(load["mix"], dataset)
    num_prompts = load["num_prompts"]
    if num_prompts is None and duration is None and dataset.kind is DatasetKind.RANDOM:
        num_prompts = _DEFAULT_PROMPTS
    spec = ClassSpec(
        "requests",
        dataset,
        rate=load["request_rate"],
        burstiness=load["burstiness"],
        max_concurrency=load["max_concurrency"],
        num_requests=num_prompts,
        time_scale=load["time_scale"],
    )
    return (spec,)
