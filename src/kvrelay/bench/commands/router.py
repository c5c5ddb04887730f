"""``kvrelay bench router``: the router's speed, its growth, and policies over request traces."""

from __future__ import annotations

from typing import Any

import click

from kvrelay.bench.commands.options import FILE
from kvrelay.cli.options import json_option


@click.command("router")
@click.option("--num-workers", type=click.IntRange(1, 4096), default=64, show_default=True, help="Workers indexed.")
@click.option(
    "--blocks-per-worker", type=click.IntRange(1024), default=2048, show_default=True, help="Blocks that each holds."
)
@click.option("--repeats", type=click.IntRange(10), default=1000, show_default=True, help="Calls per figure.")
@click.option(
    "--growth/--no-growth", default=True, show_default=True, help="Measure 8 to 1,024 workers and more blocks."
)
@click.option(
    "--max-blocks",
    type=click.IntRange(1),
    default=1_000_000,
    show_default=True,
    help="Most blocks of the growth table.",
)
@click.option("--trace", "traces", type=FILE, multiple=True, help="Replay this Mooncake trace under every policy.")
@click.option("--trace-workers", type=click.IntRange(1), default=16, show_default=True, help="Simulated workers.")
@click.option(
    "--cache-blocks", type=click.IntRange(1), default=2500, show_default=True, help="Their caches, in 512-token blocks."
)
@click.option("--trace-limit", type=click.IntRange(1), help="Replay only so many requests.")
@click.option("--time-scale", type=float, default=1.0, show_default=True, help="2: requests arrive twice as fast.")
@click.option("--peer-python", type=FILE, help="An interpreter with ai-dynamo-runtime: measure its index too.")
@json_option
def bench_router(as_json: bool, **given: Any) -> None:
    """How fast the router hashes, looks up, decides and takes in events, and how well its policies place a trace.

    \b
    Example: kvrelay bench router --trace conversation.jsonl --max-blocks 10000000
    """
    from kvrelay.bench.parts.router import measure_router
    from kvrelay.bench.parts.router_text import router_text
    from kvrelay.bench.report.files import print_result

    benchmark = measure_router(given)
    print_result(benchmark, router_text(benchmark), as_json)
