"""How much of what speculation gains in vLLM is left behind kvrelay, with a hand-off for each prompt.

    .venv-vllm/bin/python -m benchmarks.vllm_speculation MODEL [--at-once 1 4] [--rounds 3] [--connector nixl]

Four servers in turn: vLLM's own and kvrelay's prefill and decode worker, each with drafts by n-grams and without. All
run all the time, and each computes on the same cores while the others are idle. In a round all get the same prompts,
which no round before had.

The gain is time per token without speculation over that with it, and ``kept`` is kvrelay's gain over vLLM's. Tokens per
step and the accepted share are counts of the servers: they do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
from collections.abc import Mapping, Sequence
from math import nan
from typing import NamedTuple

from benchmarks.loads import figures, fixed_load, measure_load, metrics_in
from benchmarks.vllm_steps import BLOCK_SIZE, Turn, load_parser, plain, print_table, take_turns, worker
from kvrelay.bench.client.connection import ConnectionPool, Target
from kvrelay.bench.report.table import Row

NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
PLAIN, SPLIT = "vllm serve", "kvrelay 1P1D"
DRAFTING = " with n-grams"
SETTLE_S = 2.0
"""A worker's last load sample is on its way to the frontend."""
WARM_UP = 4
FIGURES = ("output_tokens_per_s", "tpot_mean_s", "failed")
RATIOS = {
    "gain": "gain",
    "kept": "kept",
    "gain in tok/s": "rate_gain",
    "kept ": "rate_kept",
    "tokens per step": "tokens_per_step",
    "accepted": "accepted",
}
COLUMNS = {
    "at once": "at_once",
    "case": "case",
    "ms a token": "tpot_mean_s:ms.2f",
    "tok/s": "output_tokens_per_s:.0f",
    "failed": "failed:.0f",
    **{name: f"{of}:.2f" for name, of in RATIOS.items()},
}


class Drafts(NamedTuple):
    """Tokens since the server's start."""

    drafted: float = 0.0
    accepted: float = 0.0

    def since(self, before: Drafts) -> Drafts:
        return Drafts(self.drafted - before.drafted, self.accepted - before.accepted)


async def drafts_of(target: Target) -> Drafts:
    """Those that a vLLM server, or all workers of a kvrelay cluster, have counted."""
    async with ConnectionPool(target) as pool:
        cluster = await pool.send(target.head("GET", "/debug/cluster", 0))
        if cluster.status == 200:
            workers = json.loads(cluster.body)["workers"]
            return Drafts(*(sum(each[f"{name}_tokens"] for each in workers) for name in Drafts._fields))
        return drafts_in((await pool.send(target.head("GET", "/metrics", 0))).body.decode())


def drafts_in(metrics: str) -> Drafts:
    """Of vLLM's metrics page."""
    found = metrics_in(metrics)
    names = (f"vllm:spec_decode_num_{name}_tokens_total" for name in ("draft", "accepted"))
    return Drafts(*(found.get((name, ""), 0.0) for name in names))


def counted(drafts: Drafts, num_tokens: float) -> Row:
    """``num_tokens``: of the answers but for their first ones, each of which came from a step of its own, or with a
    drafted one that was accepted."""
    steps = num_tokens - drafts.accepted
    share = drafts.accepted / drafts.drafted if drafts.drafted else nan
    return {"tokens_per_step": num_tokens / steps if steps > 0.0 else nan, "accepted": share}


def commands(given: argparse.Namespace) -> dict[str, str]:
    found = {}
    for suffix, config in (("", None), (DRAFTING, NGRAMS)):
        drafting = {} if config is None else {"speculative_config": config}
        arguments = shlex.quote(json.dumps({"block_size": BLOCK_SIZE, **drafting}))
        split = f"--prefill 1 --decode 1 --disagg-policy always --vllm-connector {given.connector}"
        alone = f" --speculative-config {shlex.quote(json.dumps(config))}" if config is not None else ""
        found[PLAIN + suffix] = plain(given) + alone
        found[SPLIT + suffix] = worker(given, f"{split} --engine-args {arguments}")
    return found


def turn(given: argparse.Namespace, at_once: int, num_cases: int) -> Turn:
    async def measure(target: Target, seed: int) -> Row:
        lengths, own = (given.input_tokens, given.output_tokens), seed // num_cases
        count = given.requests * at_once
        warm = fixed_load("warm", *lengths, max_concurrency=at_once, num_requests=WARM_UP)
        await measure_load(target, warm, warm_up=0, seed=10**6 + own)
        await asyncio.sleep(SETTLE_S)
        before = await drafts_of(target)
        spec = fixed_load("load", *lengths, max_concurrency=at_once, num_requests=count)
        report = await measure_load(target, spec, warm_up=0, seed=own)
        await asyncio.sleep(SETTLE_S)
        drafts = (await drafts_of(target)).since(before)
        return {**figures(report, FIGURES), **counted(drafts, count * (given.output_tokens - 1))}

    return measure


def gains(rows: Mapping[str, Row], name: str) -> dict[str, float]:
    """Of both servers, by the figure ``name`` without speculation over that with it."""
    return {server: rows[server][name] / rows[server + DRAFTING][name] for server in (PLAIN, SPLIT)}


def shown(at_once: str, rows: Mapping[str, Row]) -> list[Row]:
    """A line for each case; only those with drafts have ratios."""
    gain, slower = gains(rows, "tpot_mean_s"), gains(rows, "output_tokens_per_s")
    lines = []
    for case, row in rows.items():
        line = {"at_once": at_once, "case": case, **row}
        server = case.removesuffix(DRAFTING)
        line |= {"gain": gain[server], "kept": gain[server] / gain[PLAIN]}
        line |= {"rate_gain": 1.0 / slower[server], "rate_kept": slower[PLAIN] / slower[server]}
        lines.append(line if case.endswith(DRAFTING) else line | dict.fromkeys(RATIOS.values(), ""))
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = load_parser(__doc__)
    parser.set_defaults(at_once=[1, 4], output_tokens=128, max_num_seqs=16)
    parser.add_argument("--connector", choices=("nixl", "kvrelay"), default="nixl")
    given = parser.parse_args(arguments)
    cases = commands(given)
    turns = {str(count): turn(given, count, len(cases)) for count in given.at_once}
    found = asyncio.run(take_turns(cases, turns, given.rounds))
    print_table([line for at_once, medians in found.items() for line in shown(at_once, medians)], COLUMNS)


if __name__ == "__main__":
    main()
