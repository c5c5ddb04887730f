"""``kvrelay bench chaos``: a cluster under load while its parts are killed, stopped and moved about."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvrelay.cli.options import engine_option, json_option, model_argument
from kvrelay.cli.processes import run_async

if TYPE_CHECKING:
    from kvrelay.bench.chaos import ChaosReport


@click.command("chaos")
@model_argument
@click.option("--duration", "duration_s", default=300.0, type=click.FloatRange(10.0, 86400.0), help="Seconds of load.")
@click.option("--seed", default=0, type=click.IntRange(0), help="Of prompts, load and faults.")
@engine_option
@click.option("--prefill", "num_prefill", default=2, type=click.IntRange(2, 16), help="Prefill workers.")
@click.option("--decode", "num_decode", default=2, type=click.IntRange(2, 16), help="Decode workers.")
@click.option("--frontends", "num_frontends", default=2, type=click.IntRange(1, 16), help="Frontend processes.")
@click.option("--clients", "num_clients", default=8, type=click.IntRange(1, 256), help="Clients that ask all the time.")
@click.option(
    "--fault-interval",
    "fault_interval_s",
    default=3.0,
    type=click.FloatRange(0.2, 600.0),
    help="Mean seconds between faults.",
)
@click.option("--lease-ttl", "lease_ttl_s", default=2.0, type=click.FloatRange(0.5, 60.0), help="Lease time, seconds.")
@click.option(
    "--log", "log_path", type=click.Path(dir_okay=False, path_type=Path), help="Keep the cluster's log there."
)
@json_option
def bench_chaos(model: str | None, as_json: bool, **given: Any) -> None:
    """Kill, stop, drain and switch workers, kill frontends, kill and stop NATS, let clients leave, all at random, and
    compare every answer.

    Ends with 1 if any answer was wrong, any request failed or hung, or any block leaked.

    Example: kvrelay bench chaos --duration 60 --seed 7 --engine mock
    """
    from kvrelay.bench.chaos import ChaosOptions, run_chaos
    from kvrelay.launch.models import resolve_model

    options = ChaosOptions(resolve_model(model), **given)
    report = run_async(run_chaos(options, lambda text: click.echo(text, err=True)))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report)))
    else:
        _print(report)
    if not report.is_clean:
        sys.exit(1)


def _print(report: ChaosReport) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    title = f"chaos, {report.engine} engine, seed {report.seed}"
    # Without lines between its columns it fits a terminal of 80.
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("fault", no_wrap=True)
    figures = ("recovery\np50 s", "\nmax s", "recon-\nnected", "alone", "streams", "pause\np99 s", "\nmax s")
    for column in ("count", *figures):
        table.add_column(column, justify="right")
    for name, fault in report.faults.items():
        recovery, pause = fault.recovery, fault.pause
        table.add_row(
            name,
            str(fault.count),
            *((f"{recovery.p50_s:.2f}", f"{recovery.max_s:.2f}") if recovery else ("-", "-")),
            str(fault.num_reconnected),
            str(fault.num_alone),
            *((str(pause.count), f"{pause.p99_s:.2f}", f"{pause.max_s:.2f}") if pause else ("-", "-", "-")),
        )
    console.print(table)
    for item in dataclasses.fields(report):
        if item.name not in ("faults", "targets", "problems", "worst_pauses"):
            console.print(f"{item.name.replace('_', ' ')}: {_shown(getattr(report, item.name))}", highlight=False)
    console.print("worst pauses:", *report.worst_pauses, sep="\n  ", highlight=False, markup=False)
    for target in report.targets:
        value = "-" if target.value is None else f"{target.value:g}"
        verdict = {True: "met", False: "missed", None: "not measured"}[target.is_met]
        console.print(f"target {verdict}: {target.name} {value} (at most {target.limit:g})", highlight=False)
    for problem in report.problems:
        console.print(problem, style="red", highlight=False, markup=False)


def _shown(value: object) -> object:
    """A spread of seconds in one line; anything else as it is."""
    if not dataclasses.is_dataclass(value):
        return value
    return ", ".join(f"{item.name} {getattr(value, item.name):g}" for item in dataclasses.fields(value))
