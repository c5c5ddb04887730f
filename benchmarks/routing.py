"""The effect of routing policies on a running system under prompts that share prefixes.

Each turn starts its own cold cluster, sends one load and asks the frontend for the work of each worker.

The bound is one infinite cache that all workers share and that is filled at once: the best that the load allows.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any

import click

from benchmarks.loads import figures, fixed_load, measure_load
from benchmarks.options import MOCK, all_cases, experiment_options
from kvrelay.bench.client.connection import Target
from kvrelay.bench.compare import finish, summarise, take_turns
from kvrelay.bench.given import numbers
from kvrelay.bench.load.mix import ClassSpec, build_class
from kvrelay.bench.prefixes.blocks import hit_ratios
from kvrelay.bench.report.table import Row, results_table
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.launch.frontend_calls import routing_state
from kvrelay.router import RuntimeSettings

BLOCK_SIZE = 16
MOCK_TIMES = "--prefill-token-s 0.0001"
"""The speed of an A100 with a model of 8 billion parameters; ``--serve-args`` can override it."""
_FIGURES = ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "e2e_mean_s", "requests_per_s", "failed")
_COLUMNS = {
    "pool": "pool:g",
    "policy": "policy",
    "TTFT": "ttft_mean_s:ms",
    "p50": "ttft_p50_s:ms",
    "p99": "ttft_p99_s:ms",
    "ratio": "ttft_over_first:.2f",
    "hits": "hit_ratio:.3f",
    "imbal.": "imbalance:.2f",
    "work": "work_imbalance:.2f",
    "failed": "failed:.0f",
}


@dataclass(frozen=True, slots=True)
class RoutingLoad:
    """Shared-prefix load in tokens, arrivals by Poisson. ``rate``: requests per second."""

    groups: int
    per_group: int
    system: int
    question: int
    output: int
    rate: float

    def pool_blocks(self, pool: float, num_workers: int) -> int:
        """Blocks of one worker's pool, when all pools together hold all system prompts ``pool`` times; each holds one
        request at the least."""
        one_request = math.ceil((self.system + self.question + self.output) / BLOCK_SIZE) + 1
        return max(one_request, math.ceil(pool * self.groups * self.system / BLOCK_SIZE / num_workers))

    @property
    def spec(self) -> ClassSpec:
        prefix = (self.groups, self.per_group, self.system)
        return fixed_load("shared", self.question, self.output, prefix=prefix, rate=self.rate)


DEFAULTS = {
    MOCK: (4, RoutingLoad(groups=16, per_group=64, system=2000, question=64, output=16, rate=20.0)),
    "torch": (2, RoutingLoad(groups=8, per_group=24, system=1024, question=32, output=8, rate=8.0)),
}
"""Workers and load for each engine."""


@click.command()
@experiment_options
@click.option("--workers", type=click.IntRange(1, 64), help="Aggregated workers; default: 4 (torch: 2).")
@click.option("--policies", default="kv,round-robin", help="Policies, the first one is compared.")
@click.option("--pools", default="1.6,6", help="All KV pools over what all system prompts take.")
@click.option("--groups", type=click.IntRange(1), help="System prompts; default: 16 (torch: 8).")
@click.option("--per-group", type=click.IntRange(1), help="Prompts that share one; default: 64 (torch: 24).")
@click.option("--system", type=click.IntRange(1), help="Tokens of a system prompt; default: 2000 (torch: 1024).")
@click.option("--rate", type=click.FloatRange(0.01), help="Requests per second; default: 20 (torch: 8).")
def routing(as_json: bool, rounds: int, engine: str, workers: int | None, **given: Any) -> None:
    """Routing policies on a running cluster: time to first token, hit ratio, imbalance.

    Example: python -m benchmarks routing --policies kv,round-robin,least-loaded --rounds 1
    """
    num_workers, load = DEFAULTS[engine]
    num_workers = workers or num_workers
    load = replace(load, **{name: given[name] for name in ("groups", "per_group", "system", "rate") if given[name]})
    flags, labels = {}, {}
    for pool in _pools(given["pools"]):
        for policy in _policies(given["policies"]):
            name = f"{policy}, pool {pool:g}"
            labels[name] = {"policy": policy, "pool": pool}
            size = f"--block-size {BLOCK_SIZE} --num-blocks {load.pool_blocks(pool, num_workers)}"
            flags[name] = f"--prefill 0 --decode {num_workers} {size} --router {policy}"

    async def measure(target: Target, row: Row) -> Row:
        return await _figures(target, load.spec, row["round"])

    cases = all_cases({**given, "engine": engine}, MOCK_TIMES, flags)
    turns = take_turns(cases, rounds, measure, say=lambda row: f"TTFT {row['ttft_mean_s'] * 1e3:.1f} ms")
    results = results_of(turns, labels)
    title = (
        f"{num_workers} {engine} workers, {load.groups} x {load.per_group} prompts of {load.system} + {load.question} "
        f"tokens, {load.output} generated, {load.rate:g} requests/s; ms, medians of {rounds}; one infinite cache hits "
        f"{results[0].get('infinite_hit_ratio') or 0:.3f}"
    )
    report = {"engine": engine, "workers": num_workers, "rounds": rounds, "load": asdict(load), "results": results}
    finish({**report, "turns": turns}, f"{title}\n\n{results_table(results, _COLUMNS, left=2)}", turns, as_json)


def _policies(text: str) -> list[str]:
    """Raises ConfigError for an unknown policy."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        RuntimeSettings().put("router", name)
    return names


def _pools(text: str) -> list[float]:
    """Raises InvalidInputError, UsageError."""
    pools = list(numbers(text, "--pools"))
    if not pools or not all(0 < pool < math.inf for pool in pools):
        raise click.UsageError("--pools must be above zero")
    return pools


async def _figures(target: Target, load: ClassSpec, seed: int) -> Row:
    """After a few requests that warm up connections and code, not prefixes.

    Ratios are 0 to 1; an imbalance is the highest of all workers over their mean: ``imbalance`` of all tokens handled,
    ``work_imbalance`` of those computed or generated.
    """
    await measure_load(target, fixed_load("warm", 8, 2, max_concurrency=16, num_requests=64), warm_up=0)
    before = _tallies(await routing_state(target.url))
    total = await measure_load(target, load, warm_up=0, seed=seed)
    after = _tallies(await routing_state(target.url))
    work, handled = ([after[worker][at] - before[worker][at] for worker in before] for at in (0, 1))
    return {
        **figures(total, _FIGURES),
        "hit_ratio": (total.cached_tokens or 0) / total.input_tokens,
        "infinite_hit_ratio": _infinite_hit_ratio(load, seed),
        "imbalance": max(handled) / statistics.mean(handled),
        "work_imbalance": max(work) / statistics.mean(work),
    }


def _tallies(state: Row) -> dict[str, tuple[int, int]]:
    """Tokens computed or generated, and all tokens, by worker, as the frontend counted them."""
    (model,) = state["models"]
    tallies = {}
    for worker in (entry["state"] for entry in model["workers"]):
        work = worker["computed_tokens"] + worker["generated_tokens"]
        tallies[worker["worker_id"]] = (work, work + worker["cached_tokens"])
    return tallies


def _infinite_hit_ratio(spec: ClassSpec, seed: int) -> float:
    """Share of the load's prompt tokens whose blocks have come up before, in order of arrival. As in the engine, the
    last token of a prompt is always computed."""
    prompts = [request.prompt for request in build_class(spec, seed).requests if isinstance(request.prompt, tuple)]
    blocks = [compute_sequence_hashes(prompt[:-1], BLOCK_SIZE) for prompt in prompts]
    hits = hit_ratios(blocks, ())[0].hit_ratio * sum(map(len, blocks))
    return hits * BLOCK_SIZE / sum(map(len, prompts))


def results_of(turns: list[Row], labels: dict[str, Row]) -> list[Row]:
    """Medians of each case, under its labels, and the mean TTFT over that of the first policy with the same pool."""
    rows = summarise(turns, {"failed": sum})
    rows = [{"policy": row["case"], "pool": 0.0, **labels.get(row["case"], {}), **row} for row in rows]
    firsts = {row["pool"]: row.get("ttft_mean_s") for row in reversed(rows)}
    for row in rows:
        first, own = firsts[row["pool"]], row.get("ttft_mean_s")
        row["ttft_over_first"] = own / first if own and first else None
    return rows
