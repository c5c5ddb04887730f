"""How soon a worker is warm again after its restart: the hit rate of its first seconds, with and without host memory.

    before    prompts that share long prefixes, asked until the hit rate is steady
    restart   SIGTERM, or SIGKILL to the server and its workers; the same command again
    after     the same prompts, from the moment the server is ready

A hit rate is the share of prompt tokens that an answer's usage counts as cached.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import click
import msgspec
import numpy as np
import psutil

from benchmarks.loads import print_rows
from kvrelay.bench.cases import Case, CaseTimes, running
from kvrelay.bench.client.connection import ConnectionPool, Target
from kvrelay.bench.client.service import ask
from kvrelay.bench.client.stream import ChunkUsage
from kvrelay.bench.compare import serve_case
from kvrelay.bench.report.table import Row
from kvrelay.cli.options import json_option, model_argument
from kvrelay.cli.processes import run_async

POOL_BLOCKS, NUM_PREFIXES, PREFIX_TOKENS, OWN_TOKENS = 640, 13, 1024, 16
WINDOW_S = 2.0
"""The target: within so many seconds the hit rate is what it was."""
ANSWER_S = 60.0
WAYS = ("SIGTERM", "SIGKILL")
TIERS = {"off": "", "host": "--host-kv-cache 512MiB --host-kv-linger-s 60"}
_COLUMNS = {
    "tiers": "tiers",
    "ended by": "way",
    "hits before": "before:.2f",
    "first 2 s": "first:.2f",
    "after/before": "ratio:.2f",
    "lowest": "ratio_low:.2f",
}


class _Usage(msgspec.Struct):
    usage: ChunkUsage


@click.command()
@model_argument
@click.option("--rounds", default=3, type=click.IntRange(1, 100), help="Restarts of each kind.")
@json_option
def warm_restart(model: str | None, rounds: int, as_json: bool) -> None:
    """The hit rate of a worker's first two seconds after a restart, beside its hit rate before.

    Example: python -m benchmarks warm-restart --rounds 5
    """
    rows = run_async(_measure(model, rounds))
    print_rows(rows, _COLUMNS, as_json, left=2)


async def _measure(model: str | None, num_rounds: int) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for tiers, flags in TIERS.items():
            common = f"--prefill 0 --num-blocks {POOL_BLOCKS} --num-threads 1"
            case = serve_case(f"tiers {tiers}", model, common, flags)
            for way in WAYS:
                turns = [await _restart(case, Path(folder), way, seed) for seed in range(num_rounds)]
                ratios = [after / max(before, 1e-9) for before, after in turns]
                rows.append(
                    {
                        "tiers": tiers,
                        "way": way,
                        "before": statistics.median(before for before, _ in turns),
                        "first": statistics.median(after for _, after in turns),
                        "ratio": statistics.median(ratios),
                        "ratio_low": min(ratios),
                    }
                )
    return rows


async def _restart(case: Case, folder: Path, way: str, seed: int) -> tuple[float, float]:
    """The hit rates before the restart and in the first ``WINDOW_S`` after it."""
    prompts = _Prompts(seed)
    async with running(case, folder, CaseTimes()) as target:
        await _hit_rate(target, prompts, num=4 * NUM_PREFIXES)
        before = await _hit_rate(target, prompts, num=8 * NUM_PREFIXES)
        if way == "SIGKILL":
            _kill_own_children()
    async with running(case, folder, CaseTimes()) as target:
        return before, await _hit_rate(target, prompts, until_s=time.monotonic() + WINDOW_S)


def _kill_own_children() -> None:
    """The server that this process has started, and what that one has. The broker of host memory leads a session of
    its own, and is nobody's child."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


class _Prompts:
    """Prefixes drawn at random, each time with other last tokens."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(1000 + seed)
        self._prefixes = self._rng.integers(3, 500, (NUM_PREFIXES, PREFIX_TOKENS)).tolist()
        self.num_asked = 0

    def next(self) -> list[int]:
        self.num_asked += 1
        own = self._rng.integers(3, 500, OWN_TOKENS).tolist()
        return [*self._prefixes[self._rng.integers(NUM_PREFIXES)], *own]


async def _hit_rate(target: Target, prompts: _Prompts, num: int = 10**6, until_s: float = float("inf")) -> float:
    """Of prompts asked one after another, at most ``num`` and until then."""
    num_tokens = num_cached = 0
    async with ConnectionPool(target) as pool:
        while prompts.num_asked < num and time.monotonic() < until_s:
            body = {"prompt": prompts.next(), "max_tokens": 2, "ignore_eos": True}
            usage = (await asyncio.wait_for(ask(pool, "/v1/completions", _Usage, body), ANSWER_S)).usage
            num_tokens += usage.prompt_tokens
            details = usage.prompt_tokens_details
            num_cached += (details.cached_tokens or 0) if details else 0
    return num_cached / max(num_tokens, 1)
