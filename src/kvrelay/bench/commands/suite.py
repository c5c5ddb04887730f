"""``kvrelay bench all``: every benchmark that exists, with results in one folder. ``make bench`` runs it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvrelay.bench.commands.options import FILE

if TYPE_CHECKING:
    from kvrelay.bench.suite import Step, StepResult

SUITE_KIND = "kvrelay-bench-all/1"
_SHORT = (("--rounds", "2"), ("--runs", "2"), ("--num-prompts", "64"), ("--scale", "0.25"))
_IN_PROCESS = ("engine", "frontend", "router", "transfer")


@click.command("all")
@click.argument("model_dir", required=False, metavar="[MODEL]")
@click.option("--short", is_flag=True, help="Small counts and short runs: under 15 minutes on two cores.")
@click.option("--only", default="", metavar="NAME,NAME,...", help="Run only these.")
@click.option("--output-dir", type=FILE, default=Path("bench-results"), show_default=True)
@click.option(
    "--start-timeout", type=float, default=120.0, show_default=True, help="Seconds until a server is healthy."
)
@click.pass_context
def all_command(
    context: click.Context, model_dir: str | None, short: bool, only: str, output_dir: Path, start_timeout: float
) -> None:
    """Run all benchmarks, each as a process of its own; write JSON, a Markdown summary and plots.

    \b
    Example: kvrelay bench all --short
    """
    from datetime import UTC, datetime

    from kvrelay.bench.cases import CaseTimes
    from kvrelay.bench.errors import BenchError
    from kvrelay.bench.report.files import describe_machine
    from kvrelay.bench.suite import SuiteReport, run_steps, write_suite
    from kvrelay.errors import InvalidInputError

    steps = _steps(context, model_dir, short, output_dir)
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    unknown = set(wanted) - {step.name for step in steps}
    if unknown:
        raise InvalidInputError(f"no benchmark {', '.join(sorted(unknown))}: {', '.join(s.name for s in steps)}")
    steps = [step for step in steps if not wanted or step.name in wanted]
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    finished: list[StepResult] = []

    def done(result: StepResult) -> None:
        finished.append(result)
        click.echo(f"{result.name}: {result.error or 'ok'} ({result.seconds:.0f} s)", err=True)
        write_suite(SuiteReport(SUITE_KIND, describe_machine(), started_at, tuple(finished)), output_dir)

    run_steps(steps, sys.executable, output_dir, CaseTimes(start_timeout), done)
    click.echo(f"results: {output_dir / 'summary.md'}")
    failed = [result.name for result in finished if result.error]
    if failed:
        raise BenchError(f"{len(failed)} of {len(finished)} benchmarks failed: {', '.join(failed)}")


def _steps(context: click.Context, model_dir: str | None, short: bool, folder: Path) -> list[Step]:
    from kvrelay.bench.suite import Step, write_sample_conversations

    steps = []
    group = context.parent.command if context.parent else None
    for name in _IN_PROCESS:
        command = group.get_command(context, name) if isinstance(group, click.Group) else None
        if command is not None:
            steps.append(Step(name, (name, *_known_arguments(command, model_dir, short), "--json")))
    sample = folder / "sample-conversations.txt"
    write_sample_conversations(sample, 50_000 if short else 1_000_000)
    plot = ("--plot", str(folder / "prefixes.png"))
    steps.append(Step("prefixes", ("prefixes", str(sample), "--cache-blocks", "1000,10000", *plot, "--json")))
    serve = f"{shlex.quote(sys.executable)} -m kvrelay serve {shlex.quote(model_dir) if model_dir else ''}"
    load = ("--input-len", "256", "--output-len", "64", "--max-concurrency", "16", "--slo", "ttft=500,tpot=25")
    count = ("--num-prompts", "64" if short else "512")
    files = ("--plot", str(folder / "serve.png"), "--json")
    arguments = ("serve", "--base-url", "{url}", *load, *count, *files)
    steps.append(Step("serve", arguments, f"{serve} --prefill 1 --decode 1 --port {{port}}"))
    turns = ("--rounds", "2", "--duration", "12") if short else ("--rounds", "3", "--duration", "30")
    model = (model_dir,) if model_dir else ()
    place = ("--output-dir", str(folder / "interference"), "--json")
    steps.append(Step("interference", ("interference", *model, *turns, *place), timeout_s=420.0 if short else 1200.0))
    return steps


def _known_arguments(command: click.Command, model_dir: str | None, short: bool) -> list[str]:
    """What a benchmark of another room understands of the model and of the short form: fewer rounds, a smaller load."""
    options = {name for parameter in command.params for name in parameter.opts}
    arguments = []
    if model_dir and any(isinstance(parameter, click.Argument) for parameter in command.params):
        arguments.append(model_dir)
    for option, value in _SHORT if short else ():
        if option in options:
            arguments += [option, value]
    return arguments
