"""``kvrelay bench routing``: what a routing policy does to a running system."""

from __future__ import annotations

from typing import Any

import click

from kvrelay.bench.commands.options import serve_args_option
from kvrelay.cli.options import json_option, model_argument


@click.command("routing")
@model_argument
@click.option("--engine", default="mock", type=click.Choice(["mock", "torch"]), help="Engine; the defaults follow it.")
@click.option("--workers", type=click.IntRange(1, 64), help="Aggregated workers; default: 4 (torch: 2).")
@click.option("--policies", default="kv,round-robin", show_default=True, help="Policies, the first one is compared.")
@click.option("--pools", default="1.6,6", show_default=True, help="All KV pools over what all system prompts take.")
@click.option("--groups", type=click.IntRange(1), help="System prompts; default: 16 (torch: 8).")
@click.option("--per-group", type=click.IntRange(1), help="Prompts that share one; default: 64 (torch: 24).")
@click.option("--system", type=click.IntRange(1), help="Tokens of a system prompt; default: 2000 (torch: 1024).")
@click.option("--rate", type=click.FloatRange(0.01), help="Requests per second; default: 20 (torch: 8).")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1, 100), help="Turns; medians are shown.")
@serve_args_option
@json_option
def bench_routing(**given: Any) -> None:
    """Compare routing policies on a running cluster: time to first token, hit ratio, imbalance.

    Example: kvrelay bench routing --policies kv,round-robin,least-loaded --rounds 1
    """
    from kvrelay.bench.routing import measure_routing

    measure_routing(given)
