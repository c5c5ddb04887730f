"""What kvrelay costs over vLLM: vLLM's own server, with and without kvrelay in front of it, and vLLM in a kvrelay
worker, in turn, in one run.

    .venv-vllm/bin/python -m benchmarks.vllm_overhead MODEL [--rounds 3] [--at-once 1 16] [--output-tokens 64]

One vLLM server runs all the time; ``kvrelay serve --engine openai`` stands in front of it. ``kvrelay serve --engine
vllm`` has a vLLM of its own, which computes on the same cores while the other one is idle. Each turn sends prompts of
its own, so that none is in a cache. The last two columns are the ratio of throughput to vLLM's own server, and the
additional time to the first token, by the medians of the rounds. A turn has ``--requests`` for each of up to four
requests at once.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.loads import figures, fixed_load, measure_load
from benchmarks.vllm_steps import add_load_arguments, plain, worker
from kvrelay.bench.cases import Case, CaseTimes, running, turns_of
from kvrelay.bench.client.connection import Target
from kvrelay.bench.compare import summarise
from kvrelay.bench.report.table import Row, table

TIMES = CaseTimes(start_s=600.0)
FIGURES = {
    "tokens_per_s": "output_tokens_per_s",
    "ttft_s": "ttft_s.median",
    "itl_s": "itl_s.median",
    "failed": "failed",
}
WARM_UP = 8
PLAIN, FRONT, WITHIN = "vLLM", "kvrelay in front of it", "vLLM in kvrelay"


async def measure(given: argparse.Namespace, log_dir: Path) -> list[dict[str, str]]:
    alone = Case(PLAIN, command=f"{plain(given)} {given.vllm_args}")
    serve = f"{shlex.quote(sys.executable)} -m kvrelay serve {shlex.quote(given.model)} --port {{port}}"
    rows: list[dict[str, str]] = []
    async with AsyncExitStack() as stack:
        vllm = await stack.enter_async_context(running(alone, log_dir, TIMES))
        front = Case(FRONT, command=f"{serve} --engine openai --upstream http://127.0.0.1:{vllm.port}")
        targets = {PLAIN: vllm}
        for case in (front, Case(WITHIN, command=worker(given, ""))):
            targets[case.name] = await stack.enter_async_context(running(case, log_dir, TIMES))
        for at_once in given.at_once:
            found = await _turns(targets, at_once, given)
            rows += [_compared(at_once, name, row, found[PLAIN]) for name, row in found.items()]
    return rows


async def _turns(targets: dict[str, Target], at_once: int, given: argparse.Namespace) -> dict[str, Row]:
    """The medians of each side. Every turn has a seed of its own."""
    turns: list[Row] = []
    cases = [Case(name, url="http://127.0.0.1") for name in targets]
    for number, (round_number, case) in enumerate(turns_of(cases, given.rounds)):
        count = max(at_once, given.requests * min(at_once, 4))
        lengths = given.input_tokens, given.output_tokens
        spec = fixed_load("load", *lengths, max_concurrency=at_once, num_requests=count)
        seed = 1000 * at_once + number
        report = await measure_load(targets[case.name], spec, warm_up=WARM_UP, seed=seed)
        turns.append({"case": case.name, "round": round_number, "error": None, **figures(report, FIGURES)})
        print(f"{at_once} at once: {turns[-1]}", file=sys.stderr)
    return {row["case"]: row for row in summarise(turns, {"failed": sum})}


def _compared(at_once: int, name: str, row: Row, plain: Row) -> dict[str, str]:
    return {
        "at once": str(at_once),
        "case": name,
        "tok/s": f"{row['tokens_per_s']:.0f}",
        "TTFT P50 ms": f"{row['ttft_s'] * 1e3:.1f}",
        "ITL P50 ms": f"{row['itl_s'] * 1e3:.1f}",
        "failed": f"{row['failed']:.0f}",
        "throughput": f"{row['tokens_per_s'] / plain['tokens_per_s']:.3f}",
        "first token ms": f"{(row['ttft_s'] - plain['ttft_s']) * 1e3:+.1f}",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_load_arguments(parser)
    parser.set_defaults(at_once=[1, 16], requests=12, input_tokens=128, dtype="bfloat16")
    parser.add_argument("--vllm-args", default="", help="further arguments of vLLM's own server")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as logs:
        rows = asyncio.run(measure(given, Path(logs)))
    print(table(tuple(rows[0]), [list(row.values()) for row in rows], markdown=True))


if __name__ == "__main__":
    main()
