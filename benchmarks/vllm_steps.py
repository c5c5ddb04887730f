"""What kvrelay's scheduler inside vLLM costs and gains: one aggregated vLLM worker each, in turn, in one run.

    .venv-vllm/bin/python -m benchmarks.vllm_steps recorder MODEL [--at-once 16 128] [--rounds 3]
    .venv-vllm/bin/python -m benchmarks.vllm_steps loop MODEL [--at-once 16 128] [--slo-itl-ms 30] [--rounds 3]
    .venv-vllm/bin/python -m benchmarks.vllm_steps chunks MODEL [--slo-itl-ms 30] [--rounds 3] [--seconds 30]

``recorder``: throughput with each step recorded, over that without a recorder. The others compare prompts cut by the
objective, vLLM's fixed budget and vLLM's own server, each over the last. ``loop``: throughput of equal requests, a
number of them at once. ``chunks``: chats beside long prompts, with times of the chats' tokens, throughput and the long
prompts' first tokens.

All servers run all the time, and each computes on the same cores while the others are idle. Each turn has prompts of
its own. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.loads import all_running, figures, fixed_load, measure_load, send
from kvrelay.bench.cases import Case, turns_of
from kvrelay.bench.client.connection import Target
from kvrelay.bench.client.driver import RunLimits
from kvrelay.bench.compare import summarise
from kvrelay.bench.interference import figures_of
from kvrelay.bench.report.table import Row, results_table

START_S = 900.0
WARM_UP = 8
BLOCK_SIZE = 32
WITH, WITHOUT = "recorder", "no recorder"
BY_OBJECTIVE, FIXED, PLAIN = "chunks by objective", "fixed budget", "vllm serve"
FIGURES = ("output_tokens_per_s", "ttft_p50_s", "itl_p50_s", "failed")
COLUMNS = {
    "at once": "at_once",
    "case": "case",
    "tok/s": "output_tokens_per_s:.0f",
    "ITL P50 ms": "itl_p50_s:ms.2f",
    "failed": "failed:.0f",
    "throughput": "throughput:.3f",
}
RATIOS = ("chat_itl_p99_s", "output_tokens_per_s", "long_ttft_p50_s")
CHUNK_COLUMNS = {
    "case": "case",
    "chat ITL P50 ms": "chat_itl_p50_s:ms",
    "chat ITL P99 ms": "chat_itl_p99_s:ms",
    "chat TTFT P50 ms": "chat_ttft_p50_s:ms.0f",
    "long TTFT P50 ms": "long_ttft_p50_s:ms.0f",
    "chat tok/s": "chat_tokens_per_s:.0f",
    "tok/s ": "output_tokens_per_s:.0f",
    "failed": "failed_requests:.0f",
    "chat ITL P99 ratio": "chat_itl_p99_s_ratio:.2f",
    "tok/s ratio": "output_tokens_per_s_ratio:.2f",
    "long TTFT ratio": "long_ttft_p50_s_ratio:.2f",
}
Turn = Callable[[Target, int], Awaitable[Row]]
"""From a server and a seed to figures by name."""


def worker(given: argparse.Namespace, flags: str) -> str:
    cores = f"--engine-cores {shlex.quote(given.cores)}" if given.cores else ""
    return (
        f"{shlex.quote(sys.executable)} -m kvrelay serve {shlex.quote(given.model)} --port {{port}} --engine vllm "
        f"--prefill 0 --decode 1 --enforce-eager {limits(given)} --block-size {BLOCK_SIZE} --kv-cache-memory 1GiB "
        f"--engine-args '{{\"block_size\": {BLOCK_SIZE}}}' {cores} {flags}"
    )


def limits(given: argparse.Namespace) -> str:
    return (
        f"--dtype {given.dtype} --max-model-len {given.max_model_len} --max-num-seqs {given.max_num_seqs} "
        f"--max-num-batched-tokens {given.max_num_batched_tokens}"
    )


def plain(given: argparse.Namespace) -> str:
    tool = shlex.quote(str(Path(__file__).parents[1] / "tools/vllm_servers.py"))
    cores = f"--cores {shlex.quote(given.cores)}" if given.cores else ""
    words = f"{shlex.quote(sys.executable)} {tool} {shlex.quote(given.model)} --port {{port}} {cores}"
    return f"{words} -- {limits(given)} --block-size {BLOCK_SIZE}"


async def take_turns(commands: Mapping[str, str], turns: Mapping[str, Turn], rounds: int) -> dict[str, dict[str, Row]]:
    """The medians of each turn, by the turn's name and the case's. Each turn has a seed of its own."""
    found: dict[str, dict[str, Row]] = {}
    cases = [Case(name, command=command) for name, command in commands.items()]
    async with all_running(cases, START_S) as targets:
        for name, turn in turns.items():
            rows: list[Row] = []
            for seed, (round_number, (case, target)) in enumerate(turns_of([*zip(commands, targets)], rounds)):
                row = await turn(target, 1000 * len(found) + seed)
                rows.append({"case": case, "round": round_number, "error": None, **row})
                print(f"{name}: {rows[-1]}", file=sys.stderr)
            found[name] = {row["case"]: row for row in summarise(rows, {"failed": sum})}
    return found


def throughputs(
    given: argparse.Namespace, commands: Mapping[str, str], base: str, num_requests: Callable[[int], int] | None = None
) -> list[Row]:
    """Closed loops of prompts and answers of fixed lengths, each beside that of the case ``base``. ``num_requests``: of
    a turn with so many at once; None: ``--requests`` for each."""

    def turn(at_once: int) -> Turn:
        async def measure(target: Target, seed: int) -> Row:
            lengths = given.input_tokens, given.output_tokens
            count = num_requests(at_once) if num_requests else given.requests * at_once
            spec = fixed_load("load", *lengths, max_concurrency=at_once, num_requests=count)
            return figures(await measure_load(target, spec, warm_up=WARM_UP, seed=seed), FIGURES)

        return measure

    turns = {str(at_once): turn(at_once) for at_once in given.at_once}
    found = asyncio.run(take_turns(commands, turns, given.rounds))
    return [
        {
            **{"at_once": at_once, "case": name, **row},
            "throughput": row["output_tokens_per_s"] / rows[base]["output_tokens_per_s"],
            "added_ttft_s": row["ttft_p50_s"] - rows[base]["ttft_p50_s"],
        }
        for at_once, rows in found.items()
        for name, row in rows.items()
    ]


def recorder(given: argparse.Namespace) -> None:
    commands = {WITH: worker(given, "--no-vllm-chunks-by-objective"), WITHOUT: worker(given, "--no-vllm-step-costs")}
    print_table(throughputs(given, commands, WITHOUT), COLUMNS)


def budgets(given: argparse.Namespace) -> dict[str, str]:
    slo = f"--slo-itl-ms {given.slo_itl_ms}"
    fixed = worker(given, f"{slo} --no-vllm-chunks-by-objective")
    return {BY_OBJECTIVE: worker(given, slo), FIXED: fixed, PLAIN: plain(given)}


def loop(given: argparse.Namespace) -> None:
    print_table(throughputs(given, budgets(given), PLAIN), COLUMNS)


def chunks(given: argparse.Namespace) -> None:
    async def measure(target: Target, seed: int) -> Row:
        chats = fixed_load("chat", given.input_tokens, given.output_tokens, max_concurrency=given.chats)
        long = fixed_load("long", given.long_tokens, 4, max_concurrency=given.longs)
        run = await send(target, chats, long, warm_up=WARM_UP, seed=seed, limits=RunLimits(time_limit_s=given.seconds))
        return {name: value for name, value in figures_of(run.report, "chat", "long").items() if name != "report"}

    rows = asyncio.run(take_turns(budgets(given), {"mix": measure}, given.rounds))["mix"]
    ratios = {name: {f"{of}_ratio": row[of] / rows[PLAIN][of] for of in RATIOS} for name, row in rows.items()}
    print_table([{"case": name, **row, **ratios[name]} for name, row in rows.items()], CHUNK_COLUMNS)


def load_parser(about: str | None, modes: Sequence[str] = ()) -> argparse.ArgumentParser:
    """``what`` of the modes, the model, the load of ``throughputs``, and what ``worker`` and ``plain`` start with."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if modes:
        parser.add_argument("what", choices=modes)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--requests", type=int, default=4, help="for each request at once")
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--cores", default="", help="those that each vLLM computes on; default: all")
    return parser


def print_table(rows: Sequence[Row], columns: Mapping[str, str]) -> None:
    """In Markdown."""
    print(results_table(rows, columns, markdown=True))


def main(arguments: Sequence[str] | None = None) -> None:
    modes = {"recorder": recorder, "loop": loop, "chunks": chunks}
    parser = load_parser(__doc__, list(modes))
    parser.add_argument("--slo-itl-ms", type=float, default=30.0)
    parser.add_argument("--chats", type=int, default=8, help="chats at once")
    parser.add_argument("--longs", type=int, default=1, help="long prompts at once")
    parser.add_argument("--long-tokens", type=int, default=1800)
    parser.add_argument("--seconds", type=float, default=30.0, help="of a turn")
    given = parser.parse_args(arguments)
    modes[given.what](given)


if __name__ == "__main__":
    main()
