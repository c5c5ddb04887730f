"""The effect of routing policies on a running system under prompts that share prefixes.

Each turn starts its own cold cluster, sends one load and asks the frontend for the work of each worker. The policies
take turns with the same load, so that a disturbance of the machine affects all of them.

The bound is one infinite cache that all workers share and that is filled at once: the best that the load allows.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from kvrelay.bench.cases import Case, CaseTimes, running
from kvrelay.bench.given import numbers
from kvrelay.bench.load.mix import ClassSpec, Dataset, DatasetKind, build_class
from kvrelay.bench.load.request import Length
from kvrelay.bench.own_cluster import figures, measure_load, medians, random_load, serve_command
from kvrelay.bench.prefixes.blocks import hit_ratios
from kvrelay.bench.report.files import print_result
from kvrelay.bench.report.table import milliseconds, table
from kvrelay.cli.processes import run_async
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.launch.frontend_calls import routing_state
from kvrelay.router import RuntimeSettings

BLOCK_SIZE = 16
MOCK_PREFILL_TOKENS_PER_S = 10_000
"""The speed of an A100 with a model of 8 billion parameters; ``--serve-args`` can override it."""
_FIGURES = {
    "ttft_mean_s": "ttft_s.mean",
    "ttft_p50_s": "ttft_s.median",
    "ttft_p99_s": "ttft_s.p99",
    "e2e_mean_s": "e2e_s.mean",
    "requests_per_s": "requests_per_s",
    "failed": "failed",
}
_COLUMNS = ("pool", "policy", "TTFT", "p50", "p99", "ratio", "hits", "imbal.", "work", "failed")


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
        dataset = Dataset(
            DatasetKind.SHARED_PREFIX,
            prompt=Length("fixed", self.question),
            output=Length("fixed", self.output),
            groups=self.groups,
            per_group=self.per_group,
            system=Length("fixed", self.system),
        )
        return ClassSpec("shared", dataset, rate=self.rate)


DEFAULTS = {
    "mock": (4, RoutingLoad(groups=16, per_group=64, system=2000, question=64, output=16, rate=20.0)),
    "torch": (2, RoutingLoad(groups=8, per_group=24, system=1024, question=32, output=8, rate=8.0)),
}
"""Workers and load for each engine."""


def measure_routing(given: dict[str, Any]) -> None:
    """``kvrelay bench routing``: all turns, and medians over the rounds."""
    engine, rounds = given["engine"], given["rounds"]
    default_workers, default_load = DEFAULTS[engine]
    sizes = {name: given[name] for name in ("groups", "per_group", "system", "rate") if given[name] is not None}
    load = RoutingLoad(**{**asdict(default_load), **sizes})
    names, pools = _policies(given["policies"]), _pools(given["pools"])
    workers = given["workers"] or default_workers
    turns = []
    for seed, pool, name in _schedule(rounds, pools, names):
        flags = f"{_serve_flags(engine, workers, load.pool_blocks(pool, workers))} --router {name}"
        command = serve_command(given["model"], flags, given["serve_args"])
        turn = run_async(_turn(name, command, load, seed))
        turns.append({"policy": name, "pool": pool, "round": seed, **turn})
        click.echo(f"round {seed + 1}, pool {pool:g}, {name}: TTFT {turn['ttft_mean_s'] * 1e3:.1f} ms", err=True)
    results = _summarise(turns, names, pools)
    report = {"engine": engine, "workers": workers, "rounds": rounds, "load": asdict(load), "results": results}
    print_result({**report, "turns": turns}, _text(report), given["as_json"])


def _serve_flags(engine: str, num_workers: int, num_blocks: int) -> str:
    flags = f"--engine {engine} --prefill 0 --decode {num_workers} --block-size {BLOCK_SIZE} --num-blocks {num_blocks}"
    return f"{flags} --prefill-token-s {1 / MOCK_PREFILL_TOKENS_PER_S}" if engine == "mock" else flags


def _schedule(rounds: int, pools: list[float], names: list[str]) -> Iterator[tuple[int, float, str]]:
    """Round, pool and policy of each turn; every other round is reversed, so that no policy is always first."""
    for number in range(rounds):
        for pool in pools:
            for name in names[:: -1 if number % 2 else 1]:
                yield number, pool, name


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


async def _turn(name: str, command: str, load: RoutingLoad, seed: int) -> dict[str, float]:
    """One cold cluster under the load, after a few requests that warm up connections and code, not prefixes.

    Ratios are 0 to 1; an imbalance is the highest of all workers over their mean: ``imbalance`` of all tokens handled,
    ``work_imbalance`` of those computed or generated.
    """
    with tempfile.TemporaryDirectory() as folder:
        async with running(Case(name, command=command), Path(folder), CaseTimes()) as target:
            await measure_load(target, random_load("warm", 8, 2, 16, 64), warm_up=0)
            before = _tallies(await routing_state(target.url))
            total = await measure_load(target, load.spec, warm_up=0, seed=seed, backend=name)
            after = _tallies(await routing_state(target.url))
    work, handled = ([after[worker][at] - before[worker][at] for worker in before] for at in (0, 1))
    return {
        **figures(total, _FIGURES),
        "hit_ratio": (total.cached_tokens or 0) / total.input_tokens,
        "infinite_hit_ratio": _infinite_hit_ratio(load.spec, seed),
        "imbalance": max(handled) / statistics.mean(handled),
        "work_imbalance": max(work) / statistics.mean(work),
    }


def _tallies(state: dict[str, Any]) -> dict[str, tuple[int, int]]:
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


def _summarise(turns: list[dict[str, Any]], names: list[str], pools: list[float]) -> list[dict[str, Any]]:
    """Medians over the rounds of each pool and policy, and the mean TTFT over the first policy's."""
    labels = ("policy", "pool", "round")
    results = []
    for pool in pools:
        rows: list[dict[str, Any]] = []
        for name in names:
            own = [turn for turn in turns if turn["pool"] == pool and turn["policy"] == name]
            found = [{key: value for key, value in turn.items() if key not in labels} for turn in own]
            rows.append({"pool": pool, "policy": name, **medians(found)})
        results += [{**row, "ttft_over_first": row["ttft_mean_s"] / rows[0]["ttft_mean_s"]} for row in rows]
    return results


def _text(report: dict[str, Any]) -> str:
    load = report["load"]
    title = (
        f"{report['workers']} {report['engine']} workers, {load['groups']} x {load['per_group']} prompts of "
        f"{load['system']} + {load['question']} tokens, {load['output']} generated, {load['rate']:g} requests/s; ms, "
        f"medians of {report['rounds']}; one infinite cache hits {report['results'][0]['infinite_hit_ratio']:.3f}"
    )
    rows = []
    for row in report["results"]:
        times = milliseconds(row["ttft_mean_s"], row["ttft_p50_s"], row["ttft_p99_s"])
        ratios = (f"{row['ttft_over_first']:.2f}x", f"{row['hit_ratio']:.3f}")
        imbalances = (f"{row['imbalance']:.2f}", f"{row['work_imbalance']:.2f}")
        rows.append((f"{row['pool']:g}", row["policy"], *times, *ratios, *imbalances, f"{row['failed']:.0f}"))
    return f"{title}\n\n{table(_COLUMNS, rows, left=2)}"
