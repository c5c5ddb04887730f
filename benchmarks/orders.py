"""The orders of prefill and decode beside ``auto``, on loads whose prompts share prefixes: mean first tokens.

``conversations``: each turn repeats the ones before it and is sent a while after their answer. ``prefixes``: questions
after system prompts that many of them share, as a Poisson process. Each turn starts a cold cluster of mock workers.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics

import click
import numpy as np

from benchmarks.agents import BLOCK_SIZE, served
from benchmarks.loads import print_rows
from benchmarks.options import rounds_option, serve_args_option
from kvrelay.bench.cases import turns_of
from kvrelay.bench.compare import serve_case, summarise
from kvrelay.bench.load.request import random_arrivals
from kvrelay.bench.report.table import Row
from kvrelay.cli.options import json_option
from kvrelay.core.handoff import OrderPolicy
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.loads import generated_arrivals

CONVERSATIONS = "agents:sessions=24,calls=8,prompt=1500,answer=40,cached=0.8,pause=2,rate=4"
LOADS = ("conversations", "prefixes")
_COLUMNS = {
    "load": "load",
    "order": "order",
    "first token: mean, ms": "ttft_ms:.1f",
    "lowest": "ttft_low_ms:.1f",
    "highest": "ttft_high_ms:.1f",
    "P90": "ttft_p90_ms:.1f",
    "tokens computed": "num_computed:,.0f",
}


@click.command()
@rounds_option
@click.option("--prefill", default=2, type=click.IntRange(1, 16), help="Prefill workers.")
@click.option("--decode", default=2, type=click.IntRange(1, 16), help="Decode workers.")
@click.option("--load", "names", multiple=True, type=click.Choice(LOADS), help="Default: each.")
@serve_args_option
@json_option
def orders(rounds: int, prefill: int, decode: int, names: tuple[str, ...], serve_args: str, as_json: bool) -> None:
    """The orders beside auto, on prompts that share prefixes.

    Example: python -m benchmarks orders --rounds 3 --load conversations
    """
    arguments = f"--engine mock --prefill {prefill} --decode {decode} --block-size {BLOCK_SIZE} {serve_args}"
    cases = tuple(serve_case(order, None, arguments, f"--order {order}") for order in OrderPolicy)
    turns: list[Row] = []
    chosen = names or LOADS
    for name in chosen:
        for number, case in turns_of(cases, rounds):
            at = f"turn {len(turns) + 1} of {len(chosen) * rounds * len(cases)}"
            click.echo(f"{at}: {name}, {case.name}, round {number}", err=True)
            got = asyncio.run(served(case, load_of(name, number)))
            firsts = [1e3 * turn.first_s for turn in got]
            turns.append(
                {
                    "load": name,
                    "order": case.name,
                    "round": number,
                    "ttft_ms": statistics.mean(firsts),
                    "ttft_p90_ms": float(np.percentile(firsts, 90)),
                    "num_computed": sum(turn.num_computed for turn in got),
                }
            )
    rows = summarised(turns)
    print_rows(rows, _COLUMNS, as_json, left=2, turns=turns)


def load_of(name: str, seed: int) -> list[Arrival]:
    """One of LOADS. The prefixes are 16 of 2,048 tokens; 200 questions of 128 tokens come at 8/s."""
    if name == "conversations":
        return generated_arrivals(CONVERSATIONS, seed)
    rng = np.random.default_rng(seed)
    return [
        Arrival(
            time_s=time_s,
            prompt_tokens=2048 + 128,
            answer_tokens=40,
            hash_ids=tuple(range(start := 4 * int(rng.integers(16)), start + 4)),
        )
        for time_s in itertools.islice(random_arrivals(rng, 8.0, 1.0), 200)
    ]


def summarised(turns: list[Row]) -> list[Row]:
    """One row for each load and order: medians of the rounds, and the lowest and highest mean first token."""
    ends = [{**turn, "ttft_low_ms": turn["ttft_ms"], "ttft_high_ms": turn["ttft_ms"], "error": None} for turn in turns]
    return summarise(ends, {"ttft_low_ms": min, "ttft_high_ms": max}, ("load", "order"))
