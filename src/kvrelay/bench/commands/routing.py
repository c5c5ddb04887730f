"""``kvrelay bench routing``: what a routing policy does to a running system under prompts that share prefixes.

Each turn starts a cluster of its own, cold, sends one load and asks the frontend which worker did how much. The
policies take turns with the same load, so that a disturbance of the machine meets all of them.

The bound is one infinite cache that all workers share and that is filled at once: what the load itself allows.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from kvrelay.bench.commands.own_cluster import medians, serve_args_option, serve_command
from kvrelay.cli.options import json_option, model_argument

BLOCK_SIZE = 16
MOCK_PREFILL_TOKENS_PER_S = 10_000
"""What an A100 does with a model of 8 billion parameters; ``--serve-args`` may say something else."""


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


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """One policy under one load. Ratios are 0 to 1; an imbalance is the highest of all workers over their mean:
    ``imbalance`` of all tokens handled, ``work_imbalance`` of those computed or generated."""

    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    e2e_mean_s: float
    hit_ratio: float
    infinite_hit_ratio: float
    imbalance: float
    work_imbalance: float
    requests_per_s: float
    failed: float


DEFAULTS = {
    "mock": (4, RoutingLoad(groups=16, per_group=64, system=2000, question=64, output=16, rate=20.0)),
    "torch": (2, RoutingLoad(groups=8, per_group=24, system=1024, question=32, output=8, rate=8.0)),
}


@click.command("routing")
@model_argument
@click.option("--engine", default="mock", type=click.Choice(list(DEFAULTS)), help="Engine; the defaults follow it.")
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
def bench_routing(
    model: str | None,
    engine: str,
    workers: int | None,
    policies: str,
    pools: str,
    rounds: int,
    serve_args: str,
    as_json: bool,
    **sizes: float | None,
) -> None:
    """Compare routing policies on a running cluster: time to first token, hit ratio, imbalance.

    Example: kvrelay bench routing --policies kv,round-robin,least-loaded --rounds 1
    """
    from kvrelay.bench.serving import run_on_loop

    default_workers, default_load = DEFAULTS[engine]
    load = RoutingLoad(**{**asdict(default_load), **{name: size for name, size in sizes.items() if size is not None}})
    names, factors = _policies(policies), _pools(pools)
    count = workers or default_workers
    pool_flags = {pool: _serve_flags(engine, count, load.pool_blocks(pool, count)) for pool in factors}
    turns = []
    for seed, pool, name in _schedule(rounds, factors, names):
        command = serve_command(model, f"{pool_flags[pool]} --router {name}", serve_args)
        figures = run_on_loop(_turn(name, command, load, seed))
        turns.append({"policy": name, "pool": pool, "round": seed, **asdict(figures)})
        mean_ms = figures.ttft_mean_s * 1e3
        click.echo(f"round {seed + 1}, pool {pool:g}, {name}: TTFT {mean_ms:.1f} ms", err=True)
    report = {
        "engine": engine,
        "workers": count,
        "rounds": rounds,
        "load": asdict(load),
        "results": _summarise(turns, names, factors),
        "turns": turns,
    }
    if as_json:
        click.echo(json.dumps(report))
    else:
        _print(report)


def _serve_flags(engine: str, num_workers: int, num_blocks: int) -> str:
    flags = f"--engine {engine} --prefill 0 --decode {num_workers} --block-size {BLOCK_SIZE} --num-blocks {num_blocks}"
    return f"{flags} --prefill-token-s {1 / MOCK_PREFILL_TOKENS_PER_S}" if engine == "mock" else flags


def _schedule(rounds: int, pools: list[float], names: list[str]) -> Iterator[tuple[int, float, str]]:
    """Round, pool and policy of each turn; every other round goes backwards, so that nobody is always first."""
    for number in range(rounds):
        for pool in pools:
            for name in names[:: -1 if number % 2 else 1]:
                yield number, pool, name


def _policies(text: str) -> list[str]:
    """Raises ConfigError for a name that no policy has."""
    from kvrelay.router import RuntimeSettings

    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        RuntimeSettings().put("router", name)
    return names


def _pools(text: str) -> list[float]:
    """Raises UsageError."""
    try:
        pools = [float(part) for part in text.split(",")]
    except ValueError as exc:
        raise click.UsageError(f"--pools {text!r} is not a list of numbers") from exc
    if not all(0 < pool < math.inf for pool in pools):
        raise click.UsageError("--pools must be above zero")
    return pools


async def _turn(name: str, command: str, load: RoutingLoad, seed: int) -> TurnFigures:
    """One cold cluster under the load, after a few requests that warm up connections and code, not prefixes."""
    from kvrelay.bench.cases import Case, CaseTimes, running
    from kvrelay.bench.load.lengths import Length
    from kvrelay.bench.load.mix import ClassSpec, Dataset, DatasetKind
    from kvrelay.bench.progress import ProgressBar
    from kvrelay.bench.serving import ServeOptions, require_success, run_serve
    from kvrelay.launch.routing import routing_state

    shared = Dataset(
        DatasetKind.SHARED_PREFIX,
        prompt=Length("fixed", load.question),
        output=Length("fixed", load.output),
        groups=load.groups,
        per_group=load.per_group,
        system=Length("fixed", load.system),
    )
    spec = ClassSpec(name="shared", dataset=shared, rate=load.rate)
    small = Dataset(prompt=Length("fixed", 8), output=Length("fixed", 2))
    warm = ClassSpec(name="warm", dataset=small, max_concurrency=16, num_requests=64)
    with tempfile.TemporaryDirectory() as folder:
        async with running(Case(name, command=command), Path(folder), CaseTimes()) as target:
            await run_serve(ServeOptions(target, (warm,), warm_up=0, retokenize=False), ProgressBar(None))
            before = _tallies(await routing_state(target.url))
            options = ServeOptions(target, (spec,), warm_up=0, seed=seed, retokenize=False, backend=name)
            report = (await run_serve(options, ProgressBar(None))).report
            after = _tallies(await routing_state(target.url))
    require_success(report)
    total = report.total
    assert total.ttft_s is not None
    assert total.e2e_s is not None
    work = [after[worker]["work"] - before[worker]["work"] for worker in before]
    handled = [after[worker]["handled"] - before[worker]["handled"] for worker in before]
    return TurnFigures(
        ttft_mean_s=total.ttft_s.mean,
        ttft_p50_s=total.ttft_s.median,
        ttft_p99_s=total.ttft_s.p99,
        e2e_mean_s=total.e2e_s.mean,
        hit_ratio=(total.cached_tokens or 0) / total.input_tokens,
        infinite_hit_ratio=_infinite_hit_ratio(spec, seed),
        imbalance=max(handled) / statistics.mean(handled),
        work_imbalance=max(work) / statistics.mean(work),
        requests_per_s=total.requests_per_s,
        failed=float(total.failed),
    )


def _tallies(state: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Tokens by worker, as the frontend counted them."""
    (model,) = state["models"]
    tallies = {}
    for worker in (entry["state"] for entry in model["workers"]):
        work = worker["computed_tokens"] + worker["generated_tokens"]
        tallies[worker["worker_id"]] = {"work": work, "handled": work + worker["cached_tokens"]}
    return tallies


def _infinite_hit_ratio(spec: Any, seed: int) -> float:
    """Share of the load's prompt tokens whose blocks have come up before, in order of arrival. As in the engine, the
    last token of a prompt is always computed."""
    from kvrelay.bench.load.mix import build_class
    from kvrelay.core.hashing import compute_sequence_hashes

    known: set[int] = set()
    hits = total = 0
    for request in build_class(spec, seed).requests:
        assert isinstance(request.prompt, tuple)
        blocks = compute_sequence_hashes(request.prompt[:-1], BLOCK_SIZE)
        leading = next((at for at, block in enumerate(blocks) if block not in known), len(blocks))
        known.update(blocks[leading:])
        hits += leading * BLOCK_SIZE
        total += len(request.prompt)
    return hits / total


def _summarise(turns: list[dict[str, Any]], names: list[str], pools: list[float]) -> list[dict[str, Any]]:
    """Medians over the rounds of each pool and policy, and the mean TTFT over the first policy's."""
    labels = ("policy", "pool", "round")
    results = []
    for pool in pools:
        rows: list[dict[str, Any]] = []
        for name in names:
            own = [turn for turn in turns if turn["pool"] == pool and turn["policy"] == name]
            figures = [{key: value for key, value in turn.items() if key not in labels} for turn in own]
            rows.append({"pool": pool, "policy": name, **medians(figures)})
        results += [{**row, "ttft_over_first": row["ttft_mean_s"] / rows[0]["ttft_mean_s"]} for row in rows]
    return results


def _print(report: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    load = report["load"]
    console = Console()
    console.print(
        f"{report['workers']} {report['engine']} workers, {load['groups']} x {load['per_group']} prompts of "
        f"{load['system']} + {load['question']} tokens, {load['output']} generated, {load['rate']:g} requests/s; ms, "
        f"medians of {report['rounds']}; one infinite cache hits {report['results'][0]['infinite_hit_ratio']:.3f}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    columns = ("pool", "policy", "TTFT", "p50", "p99", "ratio", "hits", "imbal.", "work", "failed")
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for row in report["results"]:
        table.add_row(
            f"{row['pool']:g}",
            row["policy"],
            *(f"{row[name] * 1e3:.1f}" for name in ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s")),
            f"{row['ttft_over_first']:.2f}x",
            f"{row['hit_ratio']:.3f}",
            f"{row['imbalance']:.2f}",
            f"{row['work_imbalance']:.2f}",
            f"{row['failed']:.0f}",
        )
    console.print(table)
