"""A warm burst: streams start at once whose common prefix one of two workers holds.

All of them on that worker save the prefill of the prefix and slow each other down; the other worker is idle. Each turn
starts a cold server, lets both workers decode, has one prompt after the other computed, and then sends the streams.
"""

from __future__ import annotations

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

WARM_KIND = "kvrelay-bench-warm-burst/1"
POLICIES = ("kv", "kv-weights", "round-robin")
MOCK_TIMES = "--decode-base-s 0.002 --decode-seq-s 0.001"
"""A worker whose step grows with its streams, as on a CPU or a full GPU."""
QUESTION_TOKENS = 32
_COLUMNS = {
    "case": "case",
    "last first token": "first_token_max_s:.3f",
    "last token": "last_token_s:.3f",
    "failed": "num_failed:.0f",
}


@click.command()
@experiment_options
@click.option("--streams", default=16, type=click.IntRange(1, 1000), help="Streams at once.")
@click.option("--output", default=400, type=click.IntRange(1), help="Tokens of each.")
@click.option("--prefix", default=2000, type=click.IntRange(1), help="Tokens that they share.")
def warm_burst(as_json: bool, rounds: int, streams: int, output: int, prefix: int, **given: Any) -> None:
    """A burst of streams to two workers, one of which holds their prefix; the time to the last token.

    Example: python -m benchmarks warm-burst --rounds 1
    """

    async def measure(target: Target, row: Row) -> Row:
        # The same seed for all loads, so that the streams have the prompts that were computed before.
        for load in loads(streams, output, prefix):
            run = await send(target, load, seed=row["round"], warm_up=0)
        return warm_figures(run.result)

    flags = {policy: f"--prefill 0 --decode 2 --router {policy}" for policy in POLICIES}
    cases = all_cases(given, MOCK_TIMES, flags)
    turns = take_turns(cases, rounds, measure, say=lambda row: f"last token after {row['last_token_s']:.3f} s")
    results = summarise(turns)
    title = (
        f"{streams} streams of {output} tokens at once, with one prefix of {prefix} tokens that one of two workers "
        f"holds; seconds, medians of {rounds} rounds"
    )
    load = {"streams": streams, "output": output, "prefix": prefix}
    report = {"kind": WARM_KIND, "machine": describe_machine(), "load": load, "results": results, "turns": turns}
    finish(report, f"{title}\n\n{results_table(results, _COLUMNS)}", turns, as_json)


def loads(streams: int, output: int, prefix: int) -> list[ClassSpec]:
    """Chats from which the workers learn their steps, in batches of several sizes; the prompts one by one; the
    streams, of the same prompts."""
    learn = [fixed_load("learn", 30, 64, max_concurrency=size, num_requests=4 * size) for size in (2, 16)]
    shared: Row = {"prefix": (1, streams, prefix), "num_requests": streams}
    warm = fixed_load("stream", QUESTION_TOKENS, 1, max_concurrency=1, **shared)
    return [*learn, warm, fixed_load("stream", QUESTION_TOKENS, output, **shared)]


def warm_figures(result: RunResult) -> Row:
    """Seconds from the burst to the last first token and to the last token."""
    num_failed = sum(record.outcome is not Outcome.OK for record in result.records)
    good = [record for record in result.records if record.stamps_ns]
    if not good:
        return {"num_failed": num_failed, "error": FAILED}
    began_ns = min(record.sent_ns for record in good)
    return {
        "first_token_max_s": (max(record.stamps_ns[0] for record in good) - began_ns) / 1e9,
        "last_token_s": (max(record.stamps_ns[-1] for record in good) - began_ns) / 1e9,
        "num_failed": num_failed,
    }
