"""``kvrelay bench serve``: load against one server, and the report."""

from __future__ import annotations

from typing import Any

import click

from kvrelay.bench.commands.options import FILE, body_options, dataset_options


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
    from kvrelay.bench.client.target import parse_target
    from kvrelay.bench.given import classes, serve_options
    from kvrelay.bench.progress import progress_bar
    from kvrelay.bench.report.files import print_result, read_serve_report, to_json, write_text
    from kvrelay.bench.report.plots import plot_run
    from kvrelay.bench.report.text import comparison_text, report_text
    from kvrelay.bench.serving import require_success, run_on_loop, run_serve

    others = [read_serve_report(path) for path in given["compare"]]
    target = parse_target(given["base_url"], given["api_key"])
    retokenize = not given["no_retokenize"]
    options = serve_options(given, target, classes(given), backend=given["backend"], retokenize=retokenize)
    with progress_bar() as bar:
        run = run_on_loop(run_serve(options, bar))
    # Results are written before anything is judged, so that an early end keeps what was measured.
    print_result(run.report, report_text(run.report, percentiles=given["percentiles"]), given["as_json"])
    if given["output"] is not None:
        write_text(given["output"], to_json(run.report))
    if given["plot"] is not None:
        plot_run(f"{run.report.info.backend}: {run.report.info.url}", run.result, given["plot"])
    if others and not given["as_json"]:
        names = ["this run", *(path.stem for path in given["compare"])]
        click.echo(comparison_text(names, [run.report, *others]))
    require_success(run.report)
