"""``kvrelay advise``: which cluster for this load, and whether to split at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvrelay.cli.options import json_option
from kvrelay.errors import ConfigError
from kvrelay.simulate.shipped import costs_help

if TYPE_CHECKING:
    from kvrelay.simulate.costs import Costs

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("advise")
@click.option(
    "--trace", type=_FILE, help="Load: a trace (Mooncake, Qwen-Bailian, Azure, BurstGPT) or recording; default: none."
)
@click.option("--load", help="Generated load, e.g. agents:sessions=50; default: none. See docs/simulator.md.")
@click.option("--limit", type=click.IntRange(1), default=500, help="Requests of the trace that are simulated.")
@click.option("--time-scale", type=click.FloatRange(0.0, min_open=True), default=1.0, help="2: twice as fast.")
@click.option(
    "--costs",
    "costs_files",
    multiple=True,
    required=True,
    metavar="[TP=]NAME",
    help=f"Costs, once for each TP to try: {costs_help()}.",
)
@click.option("--slots", type=click.IntRange(1, 240), required=True, help="Number of GPUs (or other slots).")
@click.option("--slo-ttft-ms", type=click.FloatRange(1.0), required=True, help="Objective for the first token, in ms.")
@click.option("--slo-itl-ms", type=click.FloatRange(1.0), required=True, help="Objective between tokens, in ms.")
@click.option("--gpu-hour-price", type=click.FloatRange(0.0, min_open=True), help="Of one slot; default: none.")
@click.option("--model", help="Model that the costs must be of; default: any.")
@click.option("--num-blocks", type=click.IntRange(0), default=0, help="KV blocks of a worker; 0: what the costs say.")
@click.option("--processes", type=click.IntRange(0), default=0, help="Simulations at once; 0: one for each core.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of load and draws.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Report to write; default: none.")
@json_option
def advise_command(
    trace: Path | None,
    load: str | None,
    limit: int,
    time_scale: float,
    costs_files: tuple[str, ...],
    model: str | None,
    seed: int,
    html: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Search the best cluster of SLOTS for a load by simulation: split or not, sizes, chunks, policy.

    Example: kvrelay advise --trace load.jsonl --costs h100-llama-3.1-8b --slots 8 --slo-ttft-ms 500 --slo-itl-ms 25
    """
    from kvrelay.bench.progress import progress_bar
    from kvrelay.placement.base import Objectives
    from kvrelay.simulate.advice_shown import text_of, write_page
    from kvrelay.simulate.advise import advise
    from kvrelay.simulate.loads import load_of
    from kvrelay.simulate.pool import num_processes_for

    costs_by_tp = read_costs_by_tp(costs_files, model)
    arrivals = load_of(trace, load, limit=limit, time_scale=time_scale, seed=seed)
    with progress_bar() as bar:
        bar.stage("simulations", 1.0)
        advice = advise(
            arrivals,
            costs_by_tp,
            given["slots"],
            Objectives(given["slo_ttft_ms"] / 1e3, given["slo_itl_ms"] / 1e3),
            slot_hour_price=given["gpu_hour_price"],
            num_blocks=given["num_blocks"],
            seed=seed,
            load_of_seed=None if load is None else lambda number: load_of(None, load, limit=limit, seed=number),
            num_processes=num_processes_for(given["processes"]),
            on_progress=lambda share, candidate: bar.update(share, str(candidate)),
        )
    if html is not None:
        costs = next(iter(costs_by_tp.values()))
        write_page(
            html,
            advice,
            f"Load: {load or trace}. {given['slots']} slots, TTFT {given['slo_ttft_ms']:g} ms, "
            f"ITL {given['slo_itl_ms']:g} ms. "
            f"Costs: {costs.model or 'unnamed model'} on {costs.machine or 'unnamed machine'}. "
            "All figures are simulated.",
        )
    click.echo(msgspec.json.encode(advice).decode() if as_json else text_of(advice))


def read_costs_by_tp(given: tuple[str, ...], model: str | None) -> dict[int, Costs]:
    """By ranks of a worker, from ``NAME`` (1 rank) and ``TP=NAME``: shipped costs or files. Raises ConfigError."""
    from kvrelay.simulate.costs import costs_of

    found: dict[int, Costs] = {}
    for text in given:
        size, is_named, name = text.partition("=")
        tp = int(size) if is_named and size.isdigit() else 1
        costs = costs_of(name if is_named and size.isdigit() else text)
        if tp < 1 or tp in found:
            raise ConfigError(f"--costs {text}: give one file for each TP, with TP of at least 1", param="costs")
        found[tp] = costs
    models = {costs.model for costs in found.values()} | ({model} if model else set())
    if len(models) > 1:
        names = ", ".join(repr(name) for name in sorted(models))
        raise ConfigError(
            f"--costs are of other models than asked ({names}); measure with: kvrelay simulate calibrate", param="costs"
        )
    return found
