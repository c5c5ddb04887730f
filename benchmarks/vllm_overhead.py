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
from collections.abc import Sequence

from benchmarks.loads import FIRST, figures, fixed_load, measure_load
from benchmarks.vllm_steps import WARM_UP, Turn, load_parser, plain, print_table, take_turns, worker
from kvrelay.bench.client.connection import Target
from kvrelay.bench.report.table import Row

FIGURES = {
    "tokens_per_s": "output_tokens_per_s",
    "ttft_s": "ttft_s.median",
    "itl_s": "itl_s.median",
    "failed": "failed",
}
PLAIN, FRONT, WITHIN = "vLLM", "kvrelay in front of it", "vLLM in kvrelay"


def commands(given: argparse.Namespace) -> dict[str, str]:
    serve = f"{shlex.quote(sys.executable)} -m kvrelay serve {shlex.quote(given.model)} --port {{port}}"
    return {
        PLAIN: f"{plain(given)} {given.vllm_args}",
        FRONT: f"{serve} --engine openai --upstream {FIRST}",
        WITHIN: worker(given, ""),
    }


def turn(given: argparse.Namespace, at_once: int) -> Turn:
    async def measure(target: Target, seed: int) -> Row:
        count = max(at_once, given.requests * min(at_once, 4))
        lengths = given.input_tokens, given.output_tokens
        spec = fixed_load("load", *lengths, max_concurrency=at_once, num_requests=count)
        return figures(await measure_load(target, spec, warm_up=WARM_UP, seed=seed), FIGURES)

    return measure


def _compared(at_once: str, name: str, row: Row, plain: Row) -> dict[str, str]:
    return {
        "at once": at_once,
        "case": name,
        "tok/s": f"{row['tokens_per_s']:.0f}",
        "TTFT P50 ms": f"{row['ttft_s'] * 1e3:.1f}",
        "ITL P50 ms": f"{row['itl_s'] * 1e3:.1f}",
        "failed": f"{row['failed']:.0f}",
        "throughput": f"{row['tokens_per_s'] / plain['tokens_per_s']:.3f}",
        "first token ms": f"{(row['ttft_s'] - plain['ttft_s']) * 1e3:+.1f}",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = load_parser(__doc__)
    parser.set_defaults(at_once=[1, 16], requests=12, input_tokens=128, dtype="bfloat16")
    parser.add_argument("--vllm-args", default="", help="further arguments of vLLM's own server")
    given = parser.parse_args(arguments)
    turns = {str(at_once): turn(given, at_once) for at_once in given.at_once}
    found = asyncio.run(take_turns(commands(given), turns, given.rounds))
    print_table(
        [_compared(at_once, name, row, rows[PLAIN]) for at_once, rows in found.items() for name, row in rows.items()]
    )


if __name__ == "__main__":
    main()
