"""What kvrelay costs in front of a vLLM server: the same server with and without it, in turn, in one run.

    .venv-vllm/bin/python -m benchmarks.vllm_overhead MODEL [--rounds 3] [--at-once 1 16] [--output-tokens 64]

One vLLM server runs all the time; ``kvrelay serve --engine openai`` stands in front of it. Each turn sends prompts of
its own, so that none is in a cache. The last two columns are kvrelay's ratio of throughput, and its additional time to
the first token, by the medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.loads import figures, fixed_load, measure_load
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


async def measure(given: argparse.Namespace, log_dir: Path) -> list[dict[str, str]]:
    python, model = shlex.quote(sys.executable), shlex.quote(given.model)
    tool = shlex.quote(str(Path(__file__).parents[1] / "tools/vllm_servers.py"))
    cores = f"--cores {shlex.quote(given.cores)}" if given.cores else ""
    plain = Case(
        "vLLM", command=f"{python} {tool} {model} --port {{port}} {cores} -- --dtype {given.dtype} {given.vllm_args}"
    )
    rows: list[dict[str, str]] = []
    async with running(plain, log_dir, TIMES) as vllm:
        front = f"{python} -m kvrelay serve {model} --engine openai --upstream http://127.0.0.1:{vllm.port}"
        async with running(Case("kvrelay", command=f"{front} --port {{port}}"), log_dir, TIMES) as kvrelay:
            for at_once in given.at_once:
                found = await _turns({"vLLM": vllm, "kvrelay": kvrelay}, at_once, given)
                rows.append({"at once": str(at_once), **_compared(found["vLLM"], found["kvrelay"])})
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


def _compared(plain: Row, ours: Row) -> dict[str, str]:
    return {
        "vLLM tok/s": f"{plain['tokens_per_s']:.0f}",
        "kvrelay tok/s": f"{ours['tokens_per_s']:.0f}",
        "vLLM TTFT P50 ms": f"{plain['ttft_s'] * 1e3:.1f}",
        "kvrelay TTFT P50 ms": f"{ours['ttft_s'] * 1e3:.1f}",
        "failed": f"{plain['failed'] + ours['failed']:.0f}",
        "throughput": f"{ours['tokens_per_s'] / plain['tokens_per_s']:.3f}",
        "first token ms": f"{(ours['ttft_s'] - plain['ttft_s']) * 1e3:+.1f}",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--requests", type=int, default=12, help="for each of up to four requests at once")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cores", help="those that vLLM computes on; default: all, also beside kvrelay's processes")
    parser.add_argument("--vllm-args", default="--max-model-len 2048", help="further arguments of vLLM")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as logs:
        rows = asyncio.run(measure(given, Path(logs)))
    print(table(tuple(rows[0]), [list(row.values()) for row in rows], markdown=True))


if __name__ == "__main__":
    main()
