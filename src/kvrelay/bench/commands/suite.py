"""``kvrelay bench all``: every benchmark that exists, with results in one folder. ``make bench`` runs it."""

from __future__ import annotations

from pathlib import Path

import click

from kvrelay.bench.commands.options import FILE


@click.command("all")
@click.argument("model_dir", required=False, metavar="[MODEL]")
@click.option("--short", is_flag=True, help="Small counts and short runs: under 15 minutes on two cores.")
@click.option("--only", default="", metavar="NAME,NAME,...", help="Run only these.")
@click.option("--output-dir", type=FILE, default=Path("bench-results"), show_default=True)
@click.option(
    "--start-timeout", type=float, default=120.0, show_default=True, help="Seconds until a server is healthy."
)
def all_command(model_dir: str | None, short: bool, only: str, output_dir: Path, start_timeout: float) -> None:
    """Run all benchmarks, each as a process of its own; write JSON, a Markdown summary and plots.

    \b
    Example: kvrelay bench all --short
    """
    from benchmarks.suite import run_all

    run_all(model_dir, short, only, output_dir, start_timeout)
