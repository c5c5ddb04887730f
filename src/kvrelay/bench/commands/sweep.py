"""``kvrelay bench sweep``: rate against latency and goodput, for several servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvrelay.bench.commands.options import (
    FILE,
    body_options,
    dataset_options,
)


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
    from kvrelay.bench.sweep import measure_sweep

    measure_sweep(given)
