"""The frontend's own throughput, in front of mock engines that take no time."""

from __future__ import annotations

from typing import Any

import click

from benchmarks.loads import ClosedLoop, cpu_seconds, figures, measure_load
from benchmarks.options import parsed, rounds_option, serve_args_option
from kvrelay.bench.client.connection import Target
from kvrelay.bench.client.stream import BodyOptions
from kvrelay.bench.compare import finish, serve_case, summarise, take_turns
from kvrelay.bench.report.table import Row, results_table
from kvrelay.cli.options import json_option, model_argument

LOADS = {
    "requests": ClosedLoop(32, 8, 64, 2000),
    "streams": ClosedLoop(32, 64, 64, 1000),
    "long prompts": ClosedLoop(2460, 8, 16, 400),
    "one at a time": ClosedLoop(32, 1, 1, 300),
}
_FIGURES = ("requests_per_s", "output_tokens_per_s", "ttft_p50_s", "ttft_p99_s", "failed")
_COLUMNS = {
    "server": "case",
    "load": "shown",
    "req/s": "requests_per_s:,.0f",
    "tok/s": "output_tokens_per_s:,.0f",
    "TTFT p50 ms": "ttft_p50_s:ms.2f",
    "p99": "ttft_p99_s:ms.2f",
    "CPU ms a request": "cpu_per_request_s:ms.2f",
    "failed": "failed:.0f",
}


@click.command()
@model_argument
@click.option("--workers", default=4, type=click.IntRange(1, 64), help="Mock workers behind the frontend.")
@rounds_option
@click.option("--scale", default=1.0, type=click.FloatRange(0.01, 100), help="Multiplies the number of requests.")
@click.option("--url", "urls", multiple=True, help="NAME=URL of another server, measured in the same run; repeatable.")
@click.option("--plain", is_flag=True, help="Send only fields that OpenAI's own API knows, to every server.")
@serve_args_option
@json_option
def frontend(
    model: str | None, workers: int, rounds: int, scale: float, plain: bool, as_json: bool, **given: Any
) -> None:
    """A frontend with mock workers: requests/s, streamed tokens/s, time to the first token, CPU time of the process
    that answers, where its /metrics tell.

    Example: python -m benchmarks frontend --rounds 1 --scale 0.1
    """
    body = BodyOptions(model="", plain=plain)

    async def measure(target: Target, row: Row) -> Row:
        spec = LOADS[row["load"]].spec(row["load"], scale)
        cpu_before_s = await cpu_seconds(target)
        load = await measure_load(target, spec, body=body, seed=row["round"] - 1)
        used_s = await cpu_seconds(target) - cpu_before_s
        return {**figures(load, _FIGURES), "cpu_per_request_s": used_s / load.successful}

    # As large a pool as the peer's mock workers have: else long prompts evict, and each eviction is an event more.
    arguments = f"--engine mock --speedup-ratio 0 --num-blocks 65536 {given['serve_args']}"
    cases = [serve_case("kvrelay", model, arguments, f"--prefill 0 --decode {workers}"), *parsed(given["urls"])]
    turns = take_turns(cases, rounds, measure, points=[{"load": name} for name in LOADS])
    results = summarise(turns, {"failed": sum}, labels=("case", "load"))
    by_case: dict[str, Row] = {}
    for row in results:
        row["shown"] = LOADS[row["load"]].shown
        by_case.setdefault(row["case"], {})[row["load"]] = row
    text = "frontend with mock workers, medians\n\n" + results_table(results, _COLUMNS, left=2)
    finish({"workers": workers, "rounds": rounds, "cases": by_case}, text, turns, as_json)
