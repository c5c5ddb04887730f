"""First and second token of a lone prompt on a prefill and a decode worker with vLLM and kvrelay's connector, and how
much of them the hand-off takes when the prompt is computed.

    .venv-vllm/bin/python -m benchmarks.vllm_hand_off MODEL [--prompt-tokens 2000 8000] [--chunks 2048 8192]
        [--against SRC ...] [--rounds 5] [--requests 4]

A pair for each number of tokens in a chunk; another one for each SRC, the folder ``src`` of another checkout. All pairs
run all the time, and take turns; no prompt comes twice. Medians of the rounds. By the waterfalls of the requests:
``after prefill``, from the end of the prompt's computation to the first token; ``load``, from the staging pool to the
decode worker's vLLM, which the second token waits for.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import statistics
import sys
from collections.abc import Sequence

import msgspec

from benchmarks.loads import figures, fixed_load, measure_load
from benchmarks.vllm_steps import Turn, print_table, take_turns
from kvrelay.bench.client.connection import Target
from kvrelay.bench.report.table import Row
from kvrelay.launch.frontend_calls import listed_requests, request_waterfall
from kvrelay.marks.waterfall import Waterfall

BLOCK_SIZE = 32
SERVE_ARGS = "--transport shm --dtype bfloat16 --max-model-len 8192 --kv-cache-memory 512MiB"
FIGURES = ("ttft_p50_s", "itl_p50_s", "failed")
PARTS = ("after prefill", "load")
COLUMNS = {
    "tokens": "tokens",
    "case": "case",
    "first token ms": "ttft_p50_s:ms",
    "second token ms": "itl_p50_s:ms",
    **{f"{part} ms": f"{part}:.2f" for part in PARTS},
    "failed": "failed:.0f",
}


def pair(given: argparse.Namespace, chunk: int, sources: str = "") -> str:
    """The command of a prefill and a decode worker."""
    where = f"env PYTHONPATH={shlex.quote(sources)} " if sources else ""
    return (
        f"{where}{shlex.quote(sys.executable)} -m kvrelay serve {shlex.quote(given.model)} --port {{port}} "
        "--engine vllm --vllm-connector kvrelay --disagg-policy always --prefill 1 --decode 1 --enforce-eager "
        f"--block-size {BLOCK_SIZE} --max-num-batched-tokens {chunk} {given.serve_args}"
    )


def turn(num_tokens: int, num_requests: int) -> Turn:
    async def measure(target: Target, seed: int) -> Row:
        load = fixed_load("load", num_tokens, 2, max_concurrency=1, num_requests=num_requests)
        report = await measure_load(target, load, warm_up=1, seed=seed)
        shown = [
            msgspec.convert(await request_waterfall(target.url, request["id"]), Waterfall)
            for request in await listed_requests(target.url, num_requests, "recent")
        ]
        found = [parts(each) for each in shown]
        medians = {part: statistics.median(each[part] for each in found) for part in PARTS}
        return {**figures(report, FIGURES), **medians}

    return measure


def parts(shown: Waterfall) -> dict[str, float]:
    """PARTS in milliseconds, of a request whose prompt was remote. Its decode worker has no prefill."""
    last = {span.phase: span for span in shown.spans}
    assert shown.ttft_ms is not None
    load = last["load"]
    return {"after prefill": shown.ttft_ms - last["prefill"].end_ms, "load": load.end_ms - load.start_ms}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[2000, 8000])
    parser.add_argument("--chunks", type=int, nargs="+", default=[2048, 8192], help="tokens of a step")
    parser.add_argument("--against", nargs="*", default=[], help="folders of other sources of kvrelay")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4, help="of a turn")
    parser.add_argument("--serve-args", default=SERVE_ARGS, help="further flags of kvrelay serve")
    given = parser.parse_args(arguments)
    commands = {
        f"chunks of {chunk}{f', {sources}' if sources else ''}": pair(given, chunk, sources)
        for chunk in given.chunks
        for sources in ("", *given.against)
    }
    turns = {str(num_tokens): turn(num_tokens, given.requests) for num_tokens in given.prompt_tokens}
    found = asyncio.run(take_turns(commands, turns, given.rounds))
    rows = [{"tokens": tokens, "case": name, **row} for tokens, cases in found.items() for name, row in cases.items()]
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
