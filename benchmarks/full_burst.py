"""A burst of prefills for a decode worker without room: long answers fill its pool, then many prompts come at once.

Each turn starts a cold server. Within a round every case gets the same requests. The cases differ in the holding area
of the decode worker: none, and the given one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import click
from msgspec.structs import replace

from benchmarks.loads import fixed_load, metrics_of, send
from benchmarks.options import all_cases, experiment_options
from kvrelay.bench.client.connection import Target
from kvrelay.bench.compare import FAILED, finish, summarise, take_turns
from kvrelay.bench.errors import BenchError
from kvrelay.bench.report.machine import describe_machine
from kvrelay.bench.report.metrics import Outcome, RunResult
from kvrelay.bench.report.table import Row, results_table
from kvrelay.core.histogram import LATENCY_BUCKETS_S, quantile_s

FULL_KIND = "kvrelay-bench-full-burst/1"
NUM_BLOCKS = 512
MOCK_TIMES = f"--num-blocks {NUM_BLOCKS} --kv-watermark 0 --decode-base-s 0.05 --decode-seq-s 0"
"""Slow steps: the answers that fill the pool take seconds."""
OCCUPANTS, OCCUPANT_TOKENS, OCCUPANT_OUTPUT = 4, 1952, 96
"""Of 128 blocks each, with their answers."""
FULL_S = 30.0
HELD = "kvrelay_worker_sending_seconds"
_COLUMNS = {
    "case": "case",
    "last first token": "first_token_max_s:.3f",
    "p50": "first_token_p50_s:.3f",
    "last token": "last_token_s:.3f",
    "P's blocks p90": "held_p90_s:.3f",
    "mean": "held_mean_s:.3f",
    "max at most": "held_max_s:.3f",
    "prefills": "num_prefills:.0f",
    "failed": "num_failed:.0f",
}


@click.command()
@experiment_options
@click.option("--num-prompts", default=64, type=click.IntRange(1, 1000), help="Prompts of the burst.")
@click.option("--prompt", default=400, type=click.IntRange(1), help="Tokens of each.")
@click.option("--output", default=4, type=click.IntRange(1), help="Answer tokens of each.")
@click.option("--order", default="prefill-first", type=click.Choice(["decode-first", "prefill-first"]), help="Order.")
@click.option("--transport", default="shm", help="Transport.")
@click.option("--holding", default=64 * 2**20, type=click.IntRange(1), help="Bytes of the holding area.")
@click.option("--monitoring-port", default=9470, type=click.IntRange(1024, 65534), help="The prefill worker's.")
def full_burst(as_json: bool, rounds: int, monitoring_port: int, **given: Any) -> None:
    """A burst for a full decode worker: first tokens, and how long the prefill worker's blocks are held.

    Example: python -m benchmarks full-burst --rounds 3
    """
    burst = fixed_load("burst", given["prompt"], given["output"], num_requests=given["num_prompts"])
    filling = fixed_load("filling", OCCUPANT_TOKENS, OCCUPANT_OUTPUT, num_requests=OCCUPANTS)

    async def measure(target: Target, row: Row) -> Row:
        prefill, decode = (replace(target, port=monitoring_port + number) for number in (0, 1))
        seed = 2 * row["round"]
        occupants = asyncio.create_task(send(target, filling, seed=seed, warm_up=0))
        await _until_full(decode)
        before = await _buckets(prefill)
        run = await send(target, burst, seed=seed + 1, warm_up=0)
        await occupants
        after = await _buckets(prefill)
        return full_figures(run.result, {bound: after[bound] - before[bound] for bound in after})

    common = (
        f"--prefill 1 --decode 1 --order {given['order']} --transport {given['transport']} --disagg-policy threshold "
        f"--max-local-prefill-length 64 --max-prefill-queue-size 1000 --metrics-port {monitoring_port}"
    )
    flags = {"no holding area": f"{common} --kv-buffer-size 0", "held": f"{common} --kv-buffer-size {given['holding']}"}
    cases = all_cases(given, MOCK_TIMES, flags)
    turns = take_turns(cases, rounds, measure, say=lambda row: f"last first token {row['first_token_max_s']:.3f} s")
    results = summarise(turns, {"held_max_s": max})
    title = (
        f"{given['num_prompts']} prompts of {given['prompt']} tokens at once for a decode worker whose pool of "
        f"{NUM_BLOCKS} blocks is full, {given['order']}, {given['transport']}; seconds, medians of {rounds} rounds. "
        "P's blocks: from the end of a prefill until its blocks are the pool's again; the maximum is a bucket's bound"
    )
    load = {name: given[name] for name in ("num_prompts", "prompt", "output", "order", "transport", "holding")}
    report = {"kind": FULL_KIND, "machine": describe_machine(), "load": load, "results": results, "turns": turns}
    finish(report, f"{title}\n\n{results_table(results, _COLUMNS)}", turns, as_json)


def full_figures(result: RunResult, held: Mapping[float, float]) -> Row:
    """``held``: cumulative counts by bound, and under -1 the sum of seconds, of the burst's prefills."""
    good = [record for record in result.records if record.stamps_ns]
    num_failed = sum(record.outcome is not Outcome.OK for record in result.records)
    if not good:
        return {"num_failed": num_failed, "error": FAILED}
    began_ns = min(record.sent_ns for record in good)
    firsts = sorted((record.stamps_ns[0] - began_ns) / 1e9 for record in good)
    bounds = sorted(bound for bound in held if bound >= 0)
    counts = [held[bound] - (held[bounds[at - 1]] if at else 0) for at, bound in enumerate(bounds)]
    num_prefills = int(held[bounds[-1]])
    largest = max((bound for bound, count in zip(bounds, counts, strict=True) if count), default=0.0)
    return {
        "first_token_p50_s": firsts[len(firsts) // 2],
        "first_token_max_s": firsts[-1],
        "last_token_s": (max(record.stamps_ns[-1] for record in good) - began_ns) / 1e9,
        "held_p90_s": quantile_s(LATENCY_BUCKETS_S, [int(count) for count in counts], 0.9),
        "held_mean_s": held[-1] / num_prefills if num_prefills else None,
        "held_max_s": largest,
        "num_prefills": num_prefills,
        "num_failed": num_failed,
    }


async def _until_full(decode: Target) -> None:
    """Raises BenchError."""
    until_s = time.monotonic() + FULL_S
    while time.monotonic() < until_s:
        samples = await metrics_of(decode)
        used = samples.get(("kvrelay_worker_kv_blocks_in_use", ""), 0.0)
        is_decoding = samples.get(("kvrelay_worker_generation_tokens_total", ""), 0.0) >= OCCUPANTS
        if is_decoding and used >= OCCUPANTS * OCCUPANT_TOKENS / 16:
            return
        await asyncio.sleep(0.02)
    raise BenchError(f"the decode worker's pool was not full after {FULL_S:g} s")


async def _buckets(worker: Target) -> dict[float, float]:
    samples = await metrics_of(worker)
    found = {float(bound): value for (name, bound), value in samples.items() if name == f"{HELD}_bucket"}
    return {**found, -1.0: samples[f"{HELD}_sum", ""]}
