"""``kvrelay bench serve``, ``compare``, ``sweep`` and ``interference``: servers under load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvrelay.bench.commands.options import COUNT, FILE, GRACE, ORDERS, SCALE, body_options, dataset_options
from kvrelay.cli.options import all_of
from kvrelay.cli.processes import run_async


@click.command("serve")
@click.option("--base-url", required=True, metavar="URL", help="The server, e.g. http://127.0.0.1:8000")
@body_options
@dataset_options
@click.option(
    "--order",
    type=click.Choice(ORDERS),
    help="Order of prefill and decode, as the header x-kvrelay-order; default: the server's.",
)
@click.option("--backend", default="openai", help="A name for the report.")
@click.option("--num-prompts", type=COUNT, help="Number of requests.  [default: 100, or the whole file]")
@click.option("--request-rate", type=float, help="Requests per second, Poisson; default and inf: all at once.")
@click.option("--burstiness", type=SCALE, default=1.0, help="Shape of the gaps: below 1 is burstier.")
@click.option(
    "--max-concurrency",
    type=COUNT,
    help="At most so many in flight; without a rate, a closed loop of them; default: no limit.",
)
@click.option("--time-scale", type=SCALE, default=1.0, help="Replay a trace so many times as fast.")
@click.option(
    "--mix", metavar="CLASSES", help="Classes side by side: chat=64/128:closed=8,long=1024/8:rate=3; default: none."
)
@click.option("--duration", type=float, help="Seconds after which no new request is sent; default: none.")
@click.option("--drain", type=GRACE, default=60.0, help="Seconds that requests in flight then have.")
@click.option("--timeout", type=SCALE, default=3600.0, help="Seconds after which a request has failed.")
@click.option("--warm-up", type=COUNT, default=4, help="Unmeasured requests of each class at first.")
@click.option("--seed", type=int, default=0)
@click.option("--slo", metavar="LIMITS", help="Goodput limits in ms: ttft=200,tpot=20,itl=50; default: none.")
@click.option("--percentiles", is_flag=True, help="Print P90, P95 and P99 of everything.")
@click.option("--no-retokenize", is_flag=True, help="Do not count the answers' tokens again.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the report.")
@click.option("--output", type=FILE, help="Write the JSON report to a file; default: none.")
@click.option(
    "--compare",
    multiple=True,
    type=FILE,
    metavar="FILE",
    help="Reports to show beside this one; repeatable; default: none.",
)
@click.option("--plot", type=FILE, help="Draw latencies, a timeline and throughput; default: none.")
def serve_command(**given: Any) -> None:
    """Send load to an OpenAI-compatible server and report latencies, throughput and goodput.

    \b
    Example: kvrelay bench serve --base-url http://127.0.0.1:8000 --request-rate 5 --num-prompts 200 \\
               --input-len 512 --output-len uniform~16~128 --slo ttft=300,tpot=30 --output run.json
    """
    from kvrelay.bench.client.connection import parse_target
    from kvrelay.bench.given import classes, run_options
    from kvrelay.bench.progress import progress_bar
    from kvrelay.bench.report.files import print_result, read_serve_report, to_json, write_text
    from kvrelay.bench.report.plots import plot_run
    from kvrelay.bench.report.text import comparison_text, report_text
    from kvrelay.bench.serving import require_success, run_serve

    others = [read_serve_report(path) for path in given["compare"]]
    target = parse_target(given["base_url"], given["api_key"], given["order"])
    retokenize = not given["no_retokenize"]
    options = run_options(given, target, classes(given), backend=given["backend"], retokenize=retokenize)
    with progress_bar() as bar:
        run = run_async(run_serve(options, bar))
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


@click.command("compare")
@click.argument("files", nargs=-1, required=True, type=FILE)
def compare_command(files: tuple[Path, ...]) -> None:
    """Show reports of ``bench serve`` side by side, with ratios to the first.

    \b
    Example: kvrelay bench compare before.json after.json
    """
    from kvrelay.bench.report.files import read_serve_report
    from kvrelay.bench.report.text import comparison_text

    click.echo(comparison_text([path.stem for path in files], [read_serve_report(path) for path in files]))


@click.command("sweep")
@click.option("--case", "cases", multiple=True, required=True, metavar="NAME=URL|COMMAND", help="A server; repeatable.")
@body_options
@dataset_options
@click.option("--rates", default="", metavar="R,R,...", help="Rates (req/s) to measure in any case.")
@click.option("--no-knee", is_flag=True, help="Measure only --rates, do not search.")
@click.option("--first-rate", type=float, default=1.0, help="Where the search begins.")
@click.option("--max-rate", type=float, default=64.0, help="Where the search ends.")
@click.option("--steps", type=int, default=3, help="Bisections after the doubling.")
@click.option("--share", type=float, default=0.95, help="Share of requests that must meet --slo.")
@click.option("--slo", default="ttft=500,tpot=50", help="Objectives, in ms.")
@click.option("--duration", type=float, default=20.0, help="Seconds of sending per rate.")
@click.option("--drain", type=GRACE, default=20.0, help="Seconds that requests in flight then have.")
@click.option("--warm-up", type=COUNT, default=4)
@click.option("--seed", type=int, default=0)
@click.option("--start-timeout", type=float, default=120.0, help="Seconds until a server is healthy.")
@click.option("--output-dir", type=FILE, default=Path("bench-results/sweep"))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the Markdown table.")
def sweep_command(**given: Any) -> None:
    """Request rate against TTFT, ITL and goodput, with the knee found by bisection.

    A case is a URL, or a command in which {port} stands for the port; the command is started and stopped by the tool.
    Writes sweep.json, sweep.md and sweep.png.

    \b
    Example: kvrelay bench sweep --case one='kvrelay serve --prefill 0 --decode 1 --port {port}' \\
               --case peer=http://127.0.0.1:8001 --slo ttft=300,tpot=30 --duration 15
    """
    from kvrelay.bench.sweep import measure_sweep

    measure_sweep(given)


DEFAULT_MIX = "chat=64/128:closed=8,long=1024/8:rate=3"


interference_options = all_of(
    click.argument("model_dir", required=False, metavar="[MODEL]"),
    click.option("--mix", default=DEFAULT_MIX, help="Two classes: those who wait, those who disturb."),
    click.option("--rounds", type=int, default=2, help="How often every case has its turn."),
    click.option("--duration", type=float, default=20.0, help="Seconds of sending per turn."),
    click.option("--drain", type=GRACE, default=20.0, help="Seconds that requests in flight then have."),
    click.option("--warm-up", type=COUNT, default=8, help="Unmeasured requests of each class beforehand."),
    click.option("--slo", default="ttft=500,itl=25", help="Objectives for goodput, in ms."),
    click.option("--serve-args", default="", help="Further arguments of every `kvrelay serve`."),
    click.option(
        "--url", "urls", multiple=True, metavar="NAME=URL", help="Another server, already running; default: none."
    ),
    click.option(
        "--case", "cases", multiple=True, metavar="NAME=COMMAND", help="Another server to start; default: none."
    ),
    click.option("--only-given", is_flag=True, help="Leave out kvrelay's own arrangements."),
    body_options,
    click.option("--vocab-size", type=COUNT, help="Random token ids stay below this.  [default: 512]"),
    click.option("--seed", type=int, default=0),
    click.option("--start-timeout", type=float, default=120.0, help="Seconds until a server is healthy."),
    click.option("--output-dir", type=FILE, default=Path("bench-results/interference")),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the Markdown table."),
)
"""Of an experiment with chats and long prompts on several arrangements; ``benchmarks.goodput`` has them, too."""


@click.command("interference")
@interference_options
def interference_command(**given: Any) -> None:
    """Chats in a closed loop, disturbed by long prompts: aggregated against separated, with the same load.

    Runs aggregated x1, aggregated x2, 1P1D always remote, 1P1D conditional (decode-first) and 1P1D prefill-first in
    turns, and whatever is given beside them. Writes interference.json, interference.md and interference.png.

    \b
    Example: kvrelay bench interference --rounds 3 --duration 30 --url vllm=http://127.0.0.1:8001
    """
    from kvrelay.bench.interference import measure_interference

    measure_interference(given)
