"""CPU time per request of two servers that run side by side, asked in short turns: what a change or a flag costs.

A machine drifts and its neighbours come and go: what counts is the ratio of neighbouring turns, with the 95 % interval
of its mean by resampling.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.loads import ClosedLoop, all_running, in_turns, measure_load, print_rows
from benchmarks.options import parsed
from kvrelay.bench.cases import Case, check_names
from kvrelay.bench.client.connection import Target
from kvrelay.bench.client.stream import BodyOptions
from kvrelay.bench.compare import serve_case
from kvrelay.bench.report.table import Row
from kvrelay.cli.options import json_option, model_argument
from kvrelay.errors import InvalidInputError

LOADS = {
    "8 tokens": ClosedLoop(32, 8, 8, 400),
    "64 tokens": ClosedLoop(32, 64, 8, 160),
    "64 at once": ClosedLoop(32, 64, 64, 256),
    "long prompts": ClosedLoop(2460, 8, 4, 80),
}
PROCESSES = ("frontend", "worker")
_COLUMNS = {
    "load": "load",
    "process": "process",
    "first us": "first_us:.0f",
    "second us": "second_us:.0f",
    "second/first": "ratio:.3f",
    "from": "low:.3f",
    "to": "high:.3f",
}


@click.command()
@model_argument
@click.option("--case", "others", multiple=True, metavar="NAME=COMMAND", help="Two servers; default: marks off and on.")
@click.option("--rounds", default=20, type=click.IntRange(2, 1000), help="Turns of each server and load.")
@json_option
def turns(model: str | None, others: tuple[str, ...], rounds: int, as_json: bool) -> None:
    """CPU time per request of frontends and workers: two servers, in turn.

    Example: python -m benchmarks turns --case 'before=../before/.venv/bin/kvrelay serve --engine mock --port {port}'
    --case 'after=kvrelay serve --engine mock --port {port}'
    """
    mock = "--engine mock --prefill 0 --speedup-ratio 0"
    cases = parsed(others) or [
        serve_case("without marks", model, mock, "--no-request-marks"),
        serve_case("with marks", model, mock, ""),
    ]
    if len(cases) != 2 or any(case.command is None for case in cases):
        raise InvalidInputError("two servers that are started here are compared", param="case")
    check_names(tuple(cases))
    rows = asyncio.run(_measure(cases, rounds))
    title = f"{cases[0].name} (first) and {cases[1].name} (second), CPU time per request"
    print_rows(rows, _COLUMNS, as_json, title=title, left=2)


async def _measure(cases: Sequence[Case], num_rounds: int) -> list[Row]:
    async with all_running(cases) as targets:
        rows: list[Row] = []
        for load in LOADS:
            found = await in_turns(targets, num_rounds, partial(_turn, load))
            rows += [_row(load, name, [[turn[name] for turn in each] for each in found]) for name in PROCESSES]
        return rows


async def _turn(load: str, target: Target, seed: int) -> dict[str, float]:
    """Microseconds of CPU time per request, by kind of process."""
    spec = LOADS[load].spec(load)
    before = _cpu_ns(target.port)
    report = await measure_load(target, spec, body=BodyOptions(model="", plain=True), seed=seed, warm_up=0)
    after = _cpu_ns(target.port)
    return {kind: (after[kind] - before[kind]) / report.successful / 1e3 for kind in PROCESSES}


def _cpu_ns(port: int) -> dict[str, int]:
    """CPU time so far of the server with this port, by kind of process."""
    used = dict.fromkeys(PROCESSES, 0)
    servers = [child for child in psutil.Process().children() if str(port) in child.cmdline()]
    for process in (each for server in servers for each in server.children(recursive=True)):
        kind = next((kind for kind in PROCESSES if kind in process.cmdline()), None)
        if kind is not None:
            # The kernel's own nanoseconds: psutil's times are ticks of 10 ms.
            tasks = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
            used[kind] += sum(int(task.read_text().split()[0]) for task in tasks)
    return used


def _row(load: str, process: str, used: list[list[float]]) -> Row:
    ratios = [second / first for first, second in zip(*used, strict=True) if first]
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(ratios, k=len(ratios))) for _ in range(2000)) or [float("nan")] * 2000
    figures: dict[str, Any] = {"first_us": statistics.median(used[0]), "second_us": statistics.median(used[1])}
    ratio = statistics.fmean(ratios) if ratios else float("nan")
    return {"load": load, "process": process, **figures, "ratio": ratio, "low": means[50], "high": means[1949]}
