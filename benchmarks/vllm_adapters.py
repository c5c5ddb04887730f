"""What eight adapters (LoRA) at once cost over one: kvrelay's prefill and decode workers beside vLLM's own server.

    .venv-vllm/bin/python -m benchmarks.vllm_adapters MODEL [--at-once 16] [--pairs 1] [--rounds 3]

MODEL is the bundled one (src/kvrelay/data/llama-kvrecall): the adapters are random, of its shapes. Both servers run all
the time, and each computes on the same cores while the other is idle. They take turns with requests of one adapter, and
with as many of eight, each of which comes as often as the others. No prompt comes twice to a server and an adapter.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.adapters import write_adapter

from benchmarks.loads import fixed_load, measure_load
from benchmarks.vllm_steps import Turn, load_parser, plain, print_table, take_turns, worker
from kvrelay.bench.client.connection import Target
from kvrelay.bench.report.metrics import LoadReport
from kvrelay.bench.report.table import Row

ADAPTERS = [f"adapter-{number}" for number in range(8)]
RANK = 8
PLAIN, SPLIT = "vllm serve", "kvrelay"
ASKED = {"one": ADAPTERS[:1] * len(ADAPTERS), "eight": ADAPTERS}
"""The adapters of eight clients. With one adapter there are as many, so that the load's own work is the same."""

COLUMNS = {
    "at once": "at_once",
    "case": "case",
    "one adapter, tok/s": "one_per_s:.0f",
    "eight, tok/s": "eight_per_s:.0f",
    "eight over one": "ratio:.3f",
    "over vLLM's own": "over_plain:.3f",
    "failed": "failed:.0f",
}


def commands(given: argparse.Namespace, folder: Path) -> dict[str, str]:
    modules = " ".join(shlex.quote(f"{name}={folder / name}") for name in ADAPTERS)
    workers = f"--prefill {given.pairs} --decode {given.pairs} --disagg-policy always --vllm-connector kvrelay"
    loaded = f"--lora-dir {shlex.quote(str(folder))} --max-loras {len(ADAPTERS)}"
    # Of a CPU's slots one must be free (docs/vllm.md, Adapters); kvrelay adds it itself.
    modules = f"--enable-lora --max-loras {len(ADAPTERS) + 1} --lora-modules {modules}"
    return {
        PLAIN: f"{plain(given)} --max-lora-rank {RANK} {modules}",
        SPLIT: worker(given, f"{workers} --max-lora-rank {RANK} {loaded}"),
    }


def turn(given: argparse.Namespace, at_once: int) -> Turn:
    each = at_once // len(ADAPTERS)

    async def load(target: Target, model: str, seed: int, requests: int) -> LoadReport:
        lengths = given.input_tokens, given.output_tokens
        spec = fixed_load("load", *lengths, max_concurrency=each, num_requests=requests)
        return await measure_load(target, spec, model=model, warm_up=0, seed=seed)

    async def rate(target: Target, models: Sequence[str], seed: int, requests: int) -> tuple[float, int]:
        """Tokens per second, and requests that failed."""
        begun = time.perf_counter()
        loads = (load(target, name, len(models) * seed + at, requests) for at, name in enumerate(models))
        reports = await asyncio.gather(*loads)
        took_s = time.perf_counter() - begun
        return sum(report.output_tokens for report in reports) / took_s, sum(report.failed for report in reports)

    async def measure(target: Target, seed: int) -> Row:
        """One adapter and eight one after the other, so that a drift of the machine affects both."""
        await rate(target, ADAPTERS, 3 * seed, each)  # warms up
        rows = {name: await rate(target, models, 3 * seed + 1, given.requests * each) for name, models in ASKED.items()}
        one, eight = (rows[name][0] for name in ASKED)
        failed = sum(failed for _, failed in rows.values())
        return {"one_per_s": one, "eight_per_s": eight, "ratio": eight / one, "failed": failed}

    return measure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = load_parser(__doc__)
    parser.set_defaults(at_once=[16], max_num_seqs=32)
    parser.add_argument("--pairs", type=int, default=1, help="prefill and decode workers of kvrelay, of each as many")
    given = parser.parse_args(arguments)
    turns = {str(at_once): turn(given, at_once) for at_once in given.at_once}
    with tempfile.TemporaryDirectory() as folder:
        for seed, name in enumerate(ADAPTERS):
            write_adapter(Path(folder) / name, seed, rank=RANK)
        found = asyncio.run(take_turns(commands(given, Path(folder)), turns, given.rounds))
    print_table(
        [
            {"at_once": at_once, "case": name, **row, "over_plain": row["ratio"] / rows[PLAIN]["ratio"]}
            for at_once, rows in found.items()
            for name, row in rows.items()
        ],
        COLUMNS,
    )


if __name__ == "__main__":
    main()
