"""The frontend's own throughput, in front of mock engines that take no time."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.own_cluster import figures, measure_load, medians, random_load, serve_command

from kvrelay.bench.cases import Case, CaseTimes, check_names, parse_case, running
from kvrelay.bench.client.payload import BodyOptions
from kvrelay.bench.client.service import cpu_seconds
from kvrelay.bench.report.files import print_result
from kvrelay.bench.report.table import table
from kvrelay.cli.processes import run_async

LOADS = {
    # name: prompt tokens, output tokens, requests at once, requests per turn
    "requests": (32, 8, 64, 2000),
    "streams": (32, 64, 64, 1000),
    "long prompts": (2460, 8, 16, 400),
    "one at a time": (32, 1, 1, 300),
}
_FIGURES = {
    "requests_per_s": "requests_per_s",
    "output_tokens_per_s": "output_tokens_per_s",
    "ttft_p50_s": "ttft_s.median",
    "ttft_p99_s": "ttft_s.p99",
    "failed": "failed",
}
_COLUMNS = ("server", "load", "req/s", "tok/s", "TTFT p50 ms", "p99", "CPU ms a request", "failed")

Figures = dict[str, dict[str, float]]
"""The figures of each load."""


def measure_frontend(given: dict[str, Any]) -> None:
    """``kvrelay bench frontend``: the cases in turns, and medians over the rounds."""
    flags = f"--engine mock --speedup-ratio 0 --prefill 0 --decode {given['workers']}"
    own = serve_command(given["model"], flags, given["serve_args"])
    cases = (Case("kvrelay", command=own), *(parse_case(text) for text in given["urls"]))
    check_names(cases)
    turns: dict[str, list[Figures]] = {case.name: [] for case in cases}
    for seed in range(given["rounds"]):
        for case in cases:
            turns[case.name].append(run_async(_turn(case, given["scale"], seed, given["plain"])))
    results = {case: {load: medians([turn[load] for turn in own]) for load in LOADS} for case, own in turns.items()}
    report = {"workers": given["workers"], "rounds": given["rounds"], "cases": results}
    print_result(report, frontend_text(results), given["as_json"])


async def _turn(case: Case, scale: float, seed: int, plain: bool) -> Figures:
    """All loads against one server."""
    turn: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        async with running(case, Path(folder), CaseTimes()) as target:
            for name, (prompt, output, at_once, count) in LOADS.items():
                label = name.replace(" ", "_")
                spec = random_load(label, prompt, output, at_once, round(count * scale), vocab_size=400)
                cpu_before_s = await cpu_seconds(target)
                load = await measure_load(target, spec, body=BodyOptions(model="", plain=plain), seed=seed)
                used_s = await cpu_seconds(target) - cpu_before_s
                turn[name] = {**figures(load, _FIGURES), "cpu_per_request_s": used_s / load.successful}
    return turn


def frontend_text(cases: dict[str, Figures]) -> str:
    """The medians as a table."""
    rows = []
    for case, turn in cases.items():
        for load, (prompt, output, at_once, _) in LOADS.items():
            found = turn[load]
            rates = (f"{found['requests_per_s']:,.0f}", f"{found['output_tokens_per_s']:,.0f}")
            times = (f"{found[name] * 1e3:.2f}" for name in ("ttft_p50_s", "ttft_p99_s", "cpu_per_request_s"))
            rows.append((case, f"{prompt}/{output}, {at_once} at once", *rates, *times, f"{found['failed']:.0f}"))
    return "frontend with mock workers, medians\n\n" + table(_COLUMNS, rows, left=2)
