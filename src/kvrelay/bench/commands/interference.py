"""``kvrelay bench interference``: what separation buys, on this machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from kvrelay.bench.commands.options import FILE, body_options, command_line, make_body
from kvrelay.errors import InvalidInputError

INTERFERENCE_KIND = "kvrelay-bench-interference/1"
DEFAULT_MIX = "chat=64/128:closed=8,long=1024/8:rate=3"


@click.command("interference")
@click.argument("model_dir", required=False, metavar="[MODEL]")
@click.option("--mix", default=DEFAULT_MIX, show_default=True, help="Two classes: those who wait, those who disturb.")
@click.option("--rounds", type=int, default=2, show_default=True, help="How often every case has its turn.")
@click.option("--duration", type=float, default=20.0, show_default=True, help="Seconds of sending per turn.")
@click.option("--drain", type=float, default=20.0, show_default=True, help="Seconds that requests in flight then have.")
@click.option("--warm-up", type=int, default=8, show_default=True, help="Unmeasured requests of each class beforehand.")
@click.option("--slo", default="ttft=500,itl=25", show_default=True, help="Objectives for goodput, in ms.")
@click.option("--serve-args", default="", help="Further arguments of every `kvrelay serve`.")
@click.option("--url", "urls", multiple=True, metavar="NAME=URL", help="Another server, already running; repeatable.")
@click.option("--case", "cases", multiple=True, metavar="NAME=COMMAND", help="Another server to start; repeatable.")
@click.option("--only-given", is_flag=True, help="Leave out the four arrangements of kvrelay.")
@body_options
@click.option("--vocab-size", type=int, help="Random token ids stay below this.  [default: 512]")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--start-timeout", type=float, default=120.0, show_default=True, help="Seconds until a server is healthy."
)
@click.option("--output-dir", type=FILE, default=Path("bench-results/interference"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the Markdown table.")
def interference_command(**given: Any) -> None:
    """Chats in a closed loop, disturbed by long prompts: aggregated against separated, with the same load.

    Runs aggregated x1, aggregated x2, 1P1D always remote and 1P1D conditional in turns, and whatever is given beside
    them. Writes interference.json, interference.md and interference.png.

    \b
    Example: kvrelay bench interference --rounds 3 --duration 30 --url vllm=http://127.0.0.1:8001
    """
    from kvrelay.bench.cases import CaseTimes, check_names, parse_case
    from kvrelay.bench.client.driver import RunLimits
    from kvrelay.bench.client.target import Target
    from kvrelay.bench.errors import BenchError, MissingPackageError
    from kvrelay.bench.interference import (
        CaseRun,
        InterferenceReport,
        interference_markdown,
        plot_interference,
        run_interference,
        separation_cases,
        summarise,
    )
    from kvrelay.bench.load.mix import Dataset, parse_mix
    from kvrelay.bench.progress import progress_bar
    from kvrelay.bench.report.files import to_json, write_text
    from kvrelay.bench.report.slo import parse_slo
    from kvrelay.bench.serving import ServeOptions, run_on_loop

    if given["rounds"] < 1:
        raise InvalidInputError("there must be at least one round", param="rounds")
    model = shlex.quote(given["model_dir"]) if given["model_dir"] else None
    own = () if given["only_given"] else separation_cases(shlex.quote(sys.executable), model, given["serve_args"])
    cases = own + tuple(parse_case(text) for text in (*given["cases"], *given["urls"]))
    check_names(cases)
    classes = parse_mix(given["mix"], Dataset(vocab_size=given["vocab_size"]))
    if len(classes) != 2:
        raise InvalidInputError("the mix needs two classes: those who wait, then those who disturb", param="mix")
    options = ServeOptions(
        target=Target("127.0.0.1", 0, api_key=given["api_key"]),
        classes=classes,
        model=given["model"],
        body=make_body(given),
        limits=RunLimits(given["duration"], given["drain"]),
        slo=parse_slo(given["slo"]),
        warm_up=given["warm_up"],
        seed=given["seed"],
        retokenize=False,
        command=command_line(),
    )
    folder: Path = given["output_dir"]
    runs: list[CaseRun] = []

    def report() -> InterferenceReport:
        summaries = summarise([case.name for case in cases], runs, classes[0].name, classes[1].name)
        return InterferenceReport(INTERFERENCE_KIND, options.command, given["mix"], summaries, tuple(runs))

    def done(run: CaseRun) -> None:
        runs.append(run)
        click.echo(f"round {run.round}: {run.case}{': ' + run.error if run.error else ''}", err=True)
        write_text(folder / "interference.json", to_json(report()))
        write_text(folder / "interference.md", interference_markdown(report()))

    with progress_bar() as bar:
        times = CaseTimes(given["start_timeout"])
        run_on_loop(run_interference(cases, given["rounds"], options, folder / "logs", times, bar, done))
    click.echo(to_json(report()) if given["as_json"] else interference_markdown(report()))
    try:
        plot_interference(report(), folder / "interference.png")
    except MissingPackageError as exc:
        click.echo(f"no plot: {exc.message}", err=True)
    failed = [run for run in runs if run.report is None or not run.report.total.successful]
    if failed:
        raise BenchError(f"{len(failed)} of {len(runs)} turns failed: {failed[0].error or 'no request succeeded'}")
