"""A real data-parallel group with spread experts under load: right answers, silences of streams, CPU time when idle.

    both ranks    clients that send one request after the other; the router spreads them
    bursts        many requests at once, and sleep between the bursts
    one rank      the same clients after the other rank was drained: that one only steps along

The answers are compared with those of one engine in this process. The model is a tiny Mixtral of random weights, whose
steps cost little beside their collectives.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import psutil
from tests.chaos.answers import KnownPrompt, Verdict
from tests.chaos.client import ChaosClient
from tests.chaos.cluster import ClusterUnderTest
from tests.chaos.report import AskedPrompt

from kvrelay.bench.report.files import print_result
from kvrelay.bench.report.machine import describe_machine
from kvrelay.bench.report.table import Row, results_table
from kvrelay.cli.options import json_option
from kvrelay.cli.processes import run_async
from kvrelay.errors import FatalError
from kvrelay.launch.admin import cluster_status
from kvrelay.llm import LLM, SamplingParams

PROMPT_LENGTHS = (2, 20, 90, 200)
NUM_OUTPUTS = 12
VOCABULARY = range(16, 1000)
NUM_CLIENTS = 8
BURST = 20
GAP_S = 0.5
STALL_S = 1.0
SETTLE_S = 1.0
"""After the last answer: the steps of the lookahead, and requests that are being cleaned up."""
DRAIN_TIMEOUT_S = 60.0
RANK_TIMEOUT_S = 60.0
"""On a busy machine a rank that waits for its turn must not count as hung."""
MAX_EXAMPLES = 5


_COLUMNS = {
    "pattern": "pattern",
    "requests": "num_requests",
    "right": "num_right",
    "tokens/s": "tokens_per_s:.0f",
    "first token, max s": "first_token_max_s:.2f",
    "silence, max s": "silence_max_s:.2f",
    "stalls": "num_stalls",
    "by rank": "shown",
}


group_option = click.option("--ranks", default=2, type=click.IntRange(2, 8), help="Size of the group.")


@click.command()
@group_option
@click.option("--requests", default=200, type=click.IntRange(1), help="Of each pattern.")
@click.option("--idle", default=10.0, type=click.FloatRange(0.1), help="Seconds of idleness.")
@json_option
def dp_group(ranks: int, requests: int, idle: float, as_json: bool) -> None:
    """A group with spread experts under load, every answer checked; its CPU time when idle. Ends with 1 if an answer
    was wrong.

    Example: python -m benchmarks dp-group --requests 20
    """
    report = run_async(run_group_benchmark(ranks, requests, idle))
    print_result(report, group_text(report), as_json)
    if any(row["num_right"] < row["num_requests"] for row in report["rows"]):
        sys.exit(1)


async def run_group_benchmark(num_ranks: int, num_requests: int, idle_s: float) -> Row:
    """Each pattern with ``num_requests`` requests. Raises FatalError if the group does not start.

    ``idle_cpu_share``: CPU time of all processes of the idle group, as a share of one core.
    """
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as directory:
        model = Path(directory) / "mixtral"
        prompts = await asyncio.to_thread(_prepare, model, 3 * num_requests)
        cluster = group_cluster(model, num_ranks, RANK_TIMEOUT_S)
        async with cluster, ChaosClient(cluster.url, cluster.model) as client:
            group = _Group(cluster, client)
            rows = [await group.measure("both ranks", prompts[:num_requests])]
            rows.append(await group.measure("bursts", prompts[num_requests : 2 * num_requests], burst=BURST))
            idle = await group.idle_cpu(idle_s)
            await group.drain_all_but_one()
            rows.append(await group.measure("one rank", prompts[2 * num_requests :]))
    about: Row = {"machine": describe_machine(), "num_ranks": num_ranks, "rows": rows}
    return {**about, "idle_s": idle_s, "idle_cpu_share": idle[0], "num_idle_processes": idle[1]}


def group_cluster(model: Path, num_ranks: int, rank_timeout_s: float) -> ClusterUnderTest:
    """One group of decode workers with spread experts."""
    flags = [str(model), "--dp", str(num_ranks), "--ep", "--dtype", "float32", "--num-threads", "1"]
    flags += ["--num-blocks", "512", "--max-model-len", "512", "--rank-timeout-s", f"{rank_timeout_s:g}"]
    return ClusterUnderTest(flags, [], {"prefill": 0, "decode": 1}, 1)


def group_text(report: Row) -> str:
    """The figures as a table."""
    by_rank = (" / ".join(str(count) for _, count in sorted(row["requests_by_rank"].items())) for row in report["rows"])
    rows = results_table([{**row, "shown": shown} for row, shown in zip(report["rows"], by_rank)], _COLUMNS)
    idle = f"{report['idle_cpu_share']:.1%} of a core ({report['num_idle_processes']} processes)"
    return f"{rows}\n\nidle: {idle}; stalls: silences above {STALL_S:g} s"


def _prepare(model: Path, count: int) -> list[KnownPrompt]:
    """Make the model; random prompts with the answers of one engine."""
    from kvrelay.executors.torch.checkpoints import make_model

    make_model(model, "mixtral", "tiny", dtype="float32")
    draw = random.Random(3)
    prompts = [[draw.choice(VOCABULARY) for _ in range(draw.choice(PROMPT_LENGTHS))] for _ in range(count)]
    sampling = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0, ignore_eos=True, detokenize=False)
    with LLM(model, dtype="float32", device="cpu", num_blocks=512, num_threads=1, max_num_waiting=count) as llm:
        outputs = llm.generate(prompts, sampling)
    return [
        KnownPrompt(tuple(prompt), NUM_OUTPUTS, stream=True, answer=tuple(output.token_ids))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


class _Group:
    def __init__(self, cluster: ClusterUnderTest, client: ChaosClient) -> None:
        self._cluster = cluster
        self._client = client

    async def measure(self, pattern: str, prompts: Sequence[KnownPrompt], *, burst: int = 0) -> Row:
        """With ``burst`` so many requests at once, else NUM_CLIENTS clients. A silence lies between two tokens of a
        stream; ``num_stalls`` are those above STALL_S. ``requests_by_rank``: requests that each rank has served."""
        before = await self._num_requests()
        begin_s = time.monotonic()
        records: list[AskedPrompt] = []
        if burst:
            for start in range(0, len(prompts), burst):
                some = prompts[start : start + burst]
                records += await asyncio.gather(*(self._client.ask(prompt) for prompt in some))
                await asyncio.sleep(GAP_S)
        else:
            left = iter(prompts)

            async def ask() -> None:
                for prompt in left:
                    records.append(await self._client.ask(prompt))

            await asyncio.gather(*(ask() for _ in range(NUM_CLIENTS)))
        seconds = time.monotonic() - begin_s
        after = await self._num_requests()
        silences = [b - a for record in records for a, b in pairwise(record.arrivals_s)]
        firsts = [each.arrivals_s[0] - each.begin_s for each in records if each.arrivals_s]
        wrong = [each.detail for each in records if each.verdict is not Verdict.RIGHT]
        return {
            "pattern": pattern,
            "num_requests": len(records),
            "num_right": len(records) - len(wrong),
            "tokens_per_s": len(records) * NUM_OUTPUTS / seconds,
            "first_token_max_s": max(firsts, default=0.0),
            "silence_max_s": max(silences, default=0.0),
            "num_stalls": sum(silence > STALL_S for silence in silences),
            "requests_by_rank": {rank: count - before.get(rank, 0) for rank, count in after.items()},
            "wrong": wrong[:MAX_EXAMPLES],
        }

    async def idle_cpu(self, seconds: float) -> tuple[float, int]:
        """CPU seconds per second of all processes of the group, and their number."""
        await asyncio.sleep(SETTLE_S)
        processes = self._cluster.worker_processes()
        begin_s, before = time.monotonic(), _cpu_s(processes)
        await asyncio.sleep(seconds)
        return (_cpu_s(processes) - before) / (time.monotonic() - begin_s), len(processes)

    async def drain_all_but_one(self) -> None:
        """Take every rank but the first out of discovery; they continue to step. Raises FatalError."""
        for rank, status in sorted((await self._ranks()).items()):
            if rank:
                await self._cluster.tell(status["worker_id"], "drain")
        deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
        while len(await self._ranks()) > 1:
            if time.monotonic() > deadline_s:
                raise FatalError(f"the other ranks have not left discovery within {DRAIN_TIMEOUT_S:g} s")
            await asyncio.sleep(0.1)

    async def _num_requests(self) -> dict[int, int]:
        return {rank: status["decode"]["num_requests"] for rank, status in (await self._ranks()).items()}

    async def _ranks(self) -> dict[int, dict[str, Any]]:
        """The status of each rank that is in discovery and answers, by its number."""
        report = await cluster_status(self._cluster.control)
        return {status["dp_rank"]: status for status in report["workers"] if "error" not in status}


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return float(sum(each.user + each.system for each in times))
