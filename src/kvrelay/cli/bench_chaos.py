"""``kvrelay bench chaos``: a cluster under load while its parts are killed, stopped and moved about."""

from __future__ import annotations

import dataclasses
import json
import sys

import click
from rich.console import Console
from rich.table import Table

from kvrelay.cli.processes import run_async


@click.command("chaos")
@click.argument("model", required=False)
@click.option("--duration", "duration_s", default=300.0, type=click.FloatRange(10.0, 86400.0), help="Seconds of load.")
@click.option("--seed", default=0, type=click.IntRange(0), help="Of prompts, load and faults.")
@click.option("--engine", default="torch", type=click.Choice(["torch", "mock"]), help="Engine of the workers.")
@click.option("--prefill", "num_prefill", default=2, type=click.IntRange(2, 16), help="Prefill workers.")
@click.option("--decode", "num_decode", default=2, type=click.IntRange(2, 16), help="Decode workers.")
@click.option("--clients", "num_clients", default=8, type=click.IntRange(1, 256), help="Clients that ask all the time.")
@click.option("--fault-interval", default=3.0, type=click.FloatRange(0.2, 600.0), help="Mean seconds between faults.")
@click.option("--lease-ttl", "lease_ttl_s", default=2.0, type=click.FloatRange(0.5, 60.0), help="Lease time, seconds.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def bench_chaos(
    model: str | None,
    duration_s: float,
    seed: int,
    engine: str,
    num_prefill: int,
    num_decode: int,
    num_clients: int,
    fault_interval: float,
    lease_ttl_s: float,
    as_json: bool,
) -> None:
    """Kill, stop, drain and switch workers, restart NATS, let clients leave, all at random, and compare every answer.

    Ends with 1 if any answer was wrong, any request failed or hung, or any block leaked.

    Example: kvrelay bench chaos --duration 60 --seed 7 --engine mock
    """
    from kvrelay.launch.chaos import ChaosOptions, ChaosReport, run_chaos
    from kvrelay.launch.models import resolve_model

    options = ChaosOptions(
        model_path=resolve_model(model),
        engine=engine,
        duration_s=duration_s,
        seed=seed,
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_clients=num_clients,
        lease_ttl_s=lease_ttl_s,
        fault_interval_s=fault_interval,
    )
    reports: list[ChaosReport] = []

    async def run() -> None:
        reports.append(await run_chaos(options, lambda text: click.echo(text, err=True)))

    run_async(run())
    (report,) = reports
    figures = dataclasses.asdict(report)
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _print(figures)
    if not report.is_clean:
        sys.exit(1)


def _print(report: dict[str, object]) -> None:
    console = Console()
    table = Table(title=f"chaos, {report['engine']} engine, seed {report['seed']}", title_justify="left")
    for column in ("fault", "count", "recovery p50 s", "recovery max s", "streams", "pause p99 s", "pause max s"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    faults = report.pop("faults")
    assert isinstance(faults, dict)
    for name, summary in faults.items():
        recovery, pause = summary["recovery"] or {}, summary["pause"] or {}
        cells = (
            recovery.get("p50_s"),
            recovery.get("max_s"),
            pause.get("count"),
            pause.get("p99_s"),
            pause.get("max_s"),
        )
        table.add_row(name, str(summary["count"]), *("-" if cell is None else f"{cell:g}" for cell in cells))
    console.print(table)
    problems = report.pop("problems")
    assert isinstance(problems, tuple)
    for name, value in report.items():
        console.print(f"{name.replace('_', ' ')}: {value}", highlight=False)
    for problem in problems:
        console.print(f"[red]{problem}[/red]", highlight=False)
