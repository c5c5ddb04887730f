"""A hot prefix: requests come at once that share it, one of four workers has it, and reading it is on or off.

Without reading, the requests wait for the one worker, or others compute the prefix again. Each turn starts a cold
server, lets all workers measure their steps, has one prompt computed, and then sends the requests.
"""

from __future__ import annotations

import statistics
from typing import Any

import click

from benchmarks.loads import fixed_load, send
from benchmarks.options import all_cases, experiment_options
from kvrelay.bench.client.connection import Target
from kvrelay.bench.compare import FAILED, finish, summarise, take_turns
from kvrelay.bench.load.mix import ClassSpec
from kvrelay.bench.report.machine import describe_machine
from kvrelay.bench.report.metrics import Outcome, RunResult
from kvrelay.bench.report.table import Row, results_table

HOT_KIND = "kvrelay-bench-hot-prefix/1"
MOCK_TIMES = "--prefill-token-s 0.0002"
"""A prompt of 4,096 tokens takes 0.8 s."""
CASES = {"off": "--no-fetch-prefixes", "on": "--fetch-prefixes"}
_COLUMNS = {
    "reading": "case",
    "mean first token": "first_token_mean_s:.3f",
    "last": "first_token_max_s:.3f",
    "failed": "num_failed:.0f",
}


@click.command()
@experiment_options
@click.option("--requests", default=24, type=click.IntRange(1, 1000), help="Requests at once.")
@click.option("--prefix", default=4096, type=click.IntRange(1), help="Tokens that they share.")
@click.option("--own", default=512, type=click.IntRange(1), help="Tokens of their own.")
def hot_prefix(as_json: bool, rounds: int, requests: int, prefix: int, own: int, **given: Any) -> None:
    """Requests at once whose prefix one of four workers has, with reading it from there and without.

    Example: python -m benchmarks hot-prefix --rounds 5
    """

    async def measure(target: Target, row: Row) -> Row:
        # The same seed for all loads, so that the requests have the prefix that was computed before.
        for load in loads(requests, prefix, own):
            run = await send(target, load, seed=row["round"], warm_up=0)
        return hot_figures(run.result)

    flags = {name: f"--prefill 0 --decode 4 {flag}" for name, flag in CASES.items()}
    cases = all_cases(given, MOCK_TIMES, flags)
    turns = take_turns(cases, rounds, measure, say=lambda row: f"first token after {row['first_token_mean_s']:.3f} s")
    results = summarise(turns)
    title = (
        f"{requests} requests at once with a prefix of {prefix} tokens that one of four workers has, and {own} of "
        f"their own; seconds, medians of {rounds} rounds"
    )
    load = {"requests": requests, "prefix": prefix, "own": own}
    report = {"kind": HOT_KIND, "machine": describe_machine(), "load": load, "results": results, "turns": turns}
    finish(report, f"{title}\n\n{results_table(results, _COLUMNS)}", turns, as_json)


def loads(requests: int, prefix: int, own: int) -> list[ClassSpec]:
    """Prompts from which all workers learn their steps; one prompt with the prefix; all of them."""
    learn = [fixed_load("learn", length, 24, max_concurrency=8, num_requests=48) for length in (30, 200)]
    shared: Row = {"prefix": (1, requests, prefix)}
    warm = fixed_load("hot", own, 1, max_concurrency=1, num_requests=1, **shared)
    return [*learn, warm, fixed_load("hot", own, 8, num_requests=requests, **shared)]


def hot_figures(result: RunResult) -> Row:
    """Seconds to the first token, of the requests that were answered."""
    num_failed = sum(record.outcome is not Outcome.OK for record in result.records)
    waits_s = [(record.stamps_ns[0] - record.sent_ns) / 1e9 for record in result.records if record.stamps_ns]
    if not waits_s:
        return {"num_failed": num_failed, "error": FAILED}
    return {"first_token_mean_s": statistics.mean(waits_s), "first_token_max_s": max(waits_s), "num_failed": num_failed}
