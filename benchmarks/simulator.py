"""The simulator beside the cluster that it simulates: saturated throughput, TTFT and E2E at parts of the capacity, the
share of remote prefills, and the rate at which an objective breaks.

Each setting is started, calibrated as by ``kvrelay simulate calibrate``, and loaded: first a closed loop, whose rate is
the capacity, then open loops at shares of it. The simulator gets the requests at the times at which the client
sent them. Over all settings: does the simulator rank them as the machine does, and what would its choice cost?
"""

from __future__ import annotations

import asyncio
import itertools
import platform
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from benchmarks.options import MOCK, serve_args_option
from kvrelay.bench.client.connection import parse_target
from kvrelay.bench.errors import BenchError
from kvrelay.bench.given import numbers
from kvrelay.bench.load.datasets import Dataset
from kvrelay.bench.load.mix import ClassSpec
from kvrelay.bench.load.request import parse_length
from kvrelay.bench.progress import progress_bar
from kvrelay.bench.report.files import print_result, write_result, write_text
from kvrelay.bench.report.metrics import Outcome, RequestRecord
from kvrelay.bench.report.table import Row, results_table
from kvrelay.bench.serving import RunOptions, run_serve
from kvrelay.certify.servers import Cluster, running_cluster
from kvrelay.cli.options import json_option, model_argument
from kvrelay.config import DisaggConfig, EngineConfig
from kvrelay.core.handoff import OrderPolicy
from kvrelay.errors import InvalidInputError
from kvrelay.evaluate.load import replayed, sent_of
from kvrelay.evaluate.sections import accuracy
from kvrelay.evaluate.workbench import places_of
from kvrelay.launch.models import resolve_model
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.calibrate_command import calibrate
from kvrelay.simulate.cluster import ClusterSpec
from kvrelay.simulate.costs import Costs, encode_costs
from kvrelay.simulate.result import SimulationResult
from kvrelay.simulate.simulation import simulate

LENGTHS, STREAMS = (64, 1024), 32
"""Of the calibration, as kvrelay simulate calibrate has them."""
ATTAINED = 0.9
"""An objective is broken when fewer requests meet it."""
SLACK = 3.0
NUM_SEEDS = 5
"""The share of remote prefills depends on the draws of the steps' times: other seeds differ by up to 20 points."""
PAUSE_S = 2.0
"""Between two loads, more or less."""
ALWAYS = DisaggConfig(disagg_policy="always")
SMALL_CHUNKS = EngineConfig(max_num_batched_tokens=256)
SETTINGS: dict[str, tuple[str, ClusterSpec]] = {
    "1P1D": ("--prefill 1 --decode 1", ClusterSpec(1, 1)),
    "1P1D always": ("--prefill 1 --decode 1 --disagg-policy always", ClusterSpec(1, 1, disagg=ALWAYS)),
    "1P1D prefill-first": (
        "--prefill 1 --decode 1 --order prefill-first",
        ClusterSpec(1, 1, order=OrderPolicy.PREFILL_FIRST),
    ),
    "1P1D chunks 256": ("--prefill 1 --decode 1 --max-num-batched-tokens 256", ClusterSpec(1, 1, engine=SMALL_CHUNKS)),
    "aggregated x2": ("--prefill 0 --decode 2", ClusterSpec(both=2)),
    "aggregated x2 chunks 256": (
        "--prefill 0 --decode 2 --max-num-batched-tokens 256",
        ClusterSpec(both=2, engine=SMALL_CHUNKS),
    ),
    "2P2D": ("--prefill 2 --decode 2", ClusterSpec(2, 2)),
}
_ERRORS = {
    "setting": "setting",
    "load": "load",
    "requests/s": "real_requests_per_s:.1f",
    "throughput error": "error_requests_per_s:+.1%",
    "mean TTFT error": "error_ttft_mean_s:+.1%",
    "median E2E error": "error_e2e_p50_s:+.1%",
    "remote": "real_remote:.0%",
    "simulated": "simulated_remote:.0%",
}
_RANKS = {"load": "load", "rank correlation": "correlation:.2f", "regret": "regret:.1%"}
_BREAKS = {
    "setting": "setting",
    "TTFT objective, ms": "limit_ms:.0f",
    "breaks at, requests/s": "real_per_s:.1f",
    "simulated": "simulated_per_s:.1f",
    "error": "error:+.1%",
}
DEFAULT_SETTINGS = ",".join(list(SETTINGS)[:6])


@click.command()
@model_argument
@click.option("--engine", default=MOCK, type=click.Choice([MOCK, "torch"]), help="Engine of the workers.")
@click.option("--settings", default=DEFAULT_SETTINGS, help=f"Of {', '.join(SETTINGS)}.")
@click.option("--shares", default="0.5,0.8,0.95,1.1", help="Open loops, as shares of the capacity.")
@click.option(
    "--slo-ttft-ms", default=0.0, help="The objective that breaks; 0: three times the mean TTFT of the first share."
)
@click.option("--requests", default=200, type=click.IntRange(10), help="Requests of each load.")
@click.option("--concurrency", default=16, type=click.IntRange(1), help="Of the closed loop.")
@click.option("--prompt", default="uniform~200~1200", help="Lengths of prompts in tokens.")
@click.option("--answer", default="uniform~20~120", help="Lengths of answers in tokens.")
@click.option("--seed", default=0, type=click.IntRange(0), help="Seed of the load.")
@click.option("--output-dir", default="bench-results", type=click.Path(path_type=Path), help="Folder of the results.")
@serve_args_option
@json_option
def simulator(**given: Any) -> None:
    """Errors of the simulator against running clusters. Needs an idle machine. Writes simulator.json and simulator.md.

    Example: python -m benchmarks simulator --engine torch --settings "1P1D,aggregated x2"
    """
    names = [name.strip() for name in given["settings"].split(",")]
    if unknown := [name for name in names if name not in SETTINGS]:
        raise InvalidInputError(f"--settings: {unknown[0]!r} is none of {', '.join(SETTINGS)}", param="settings")
    shares = numbers(given["shares"], "--shares")
    measured = [asyncio.run(measure(name, shares, given)) for name in names]
    rows = [row for setting, _ in measured for row in setting]
    found = {"rows": rows, "ranking": ranking(rows), "breaking": [broken for _, broken in measured]}
    report = {"kind": "kvrelay-bench-simulator/3", **found}
    write_result(given["output_dir"], "simulator", report, markdown(report))
    print_result(report, markdown(report), given["as_json"])


async def measure(name: str, shares: Sequence[float], given: dict[str, Any]) -> tuple[list[Row], Row]:
    """One setting: a row for the closed loop, then one for each share; and the rates at which the objective breaks."""
    flags, spec = SETTINGS[name]
    folder: Path = given["output_dir"]
    words = [str(resolve_model(given["model"])), "--engine", given["engine"]]
    words += shlex.split(f"{given['serve_args']} {flags}")
    file = name.replace(" ", "-")
    async with running_cluster(words, folder / "logs" / f"{file}.log") as cluster:
        calibration = await calibrate(cluster.control, parse_target(cluster.url), platform.node(), LENGTHS, STREAMS, 0)
        costs = calibration.costs
        write_text(folder / f"costs-{file}.json", encode_costs(costs).decode())
        closed, places = await load(cluster, given, 0, max_concurrency=given["concurrency"])
        served = replayed(sent_of(closed), given["concurrency"])
        row, _ = compared(spec, costs, closed, served, places)
        rows = [{"setting": name, "load": "closed", **row}]
        open_loops: list[tuple[float, list[RequestRecord], SimulationResult]] = []
        for at, share in enumerate(shares, 1):
            rate = share * rows[0]["real_requests_per_s"]
            records, places = await load(cluster, given, at, rate=rate)
            row, simulated = compared(spec, costs, records, replayed(sent_of(records)), places, served)
            rows.append({"setting": name, "load": f"{share:.0%}", **row})
            open_loops.append((rate, records, simulated))
    return rows, {"setting": name, **breaking(open_loops, given["slo_ttft_ms"] / 1000)}


async def load(
    cluster: Cluster, given: dict[str, Any], at: int, **how: Any
) -> tuple[list[RequestRecord], Counter[str]]:
    """The records of all answered requests, by time of sending, and the places of their prefills. Each load ``at`` a
    setting has prompts of its own, or the prefix cache would hold those of the load before, and the simulated one would
    not."""
    before = places_of(await cluster.workers())
    lengths = Dataset(prompt=parse_length(given["prompt"]), output=parse_length(given["answer"]))
    spec = ClassSpec(dataset=lengths, num_requests=given["requests"], **how)
    target, seed = parse_target(cluster.url), given["seed"] + 1000 * at
    with progress_bar() as bar:
        run = await run_serve(RunOptions(target, (spec,), seed=seed, retokenize=False), bar)
    good = [record for record in run.result.records if record.outcome is Outcome.OK]
    if len(good) < 0.99 * given["requests"]:
        raise BenchError(f"{given['requests'] - len(good)} of {given['requests']} requests failed")
    places = places_of(await cluster.workers()) - before
    return sorted(good, key=lambda record: record.sent_ns), places


def compared(
    spec: ClusterSpec,
    costs: Costs,
    records: Sequence[RequestRecord],
    arrivals: list[Arrival],
    places: Counter[str],
    served: Sequence[Arrival] = (),
) -> tuple[Row, SimulationResult]:
    """Real and simulated figures; errors are simulated / real - 1. ``places``: real ones. ``served``: what the workers
    had answered before. And the whole simulated result."""
    simulated = simulate(spec, arrivals, costs)
    found, row = accuracy.simulated_figures(simulated), Row()
    for name, value in accuracy.measured_figures(sent_of(records)).items():
        row |= {f"real_{name}": value, f"simulated_{name}": found[name], f"error_{name}": found[name] / value - 1}
    row["real_remote"] = places["remote"] / max(places.total(), 1)
    shares = [remote_share(spec, costs, served, arrivals, seed) for seed in range(NUM_SEEDS)]
    row["simulated_remote"] = float(np.mean(shares))
    return row, simulated


def remote_share(
    spec: ClusterSpec, costs: Costs, served: Sequence[Arrival], arrivals: Sequence[Arrival], seed: int
) -> float:
    """Of the prefills of ``arrivals``, on simulated workers that have learnt from ``served``, as the real ones had."""
    before = simulate(spec, served, costs, seed=seed)
    both = simulate(spec, in_turn(served, arrivals, before.end_s + PAUSE_S), costs, seed=seed)
    # The first part of a simulation does not depend on what comes later.
    places = Counter(both.places) - Counter(before.places)
    return places["remote"] / max(places.total(), 1)


def in_turn(first: Sequence[Arrival], second: Sequence[Arrival], start_s: float) -> list[Arrival]:
    """One load after the other, which begins at ``start_s``."""
    moved = [
        msgspec.structs.replace(one, time_s=one.time_s + start_s)
        if one.after is None
        else msgspec.structs.replace(one, after=one.after + len(first))
        for one in second
    ]
    return [*first, *moved]


def breaking(open_loops: Sequence[tuple[float, list[RequestRecord], SimulationResult]], limit_s: float) -> Row:
    """The rate, real and simulated, from which on fewer than ATTAINED of the requests have their first token within
    ``limit_s``, and the error; None if not between the measured rates. ``open_loops``: rate, real, simulated."""
    real = [np.array([one.ttft_s for one in records if one.ttft_s is not None]) for _, records, _ in open_loops]
    simulated = [np.array([one.ttft_s for one in result.done]) for _, _, result in open_loops]
    limit_s = limit_s or SLACK * float(real[0].mean())
    rates = [
        crossing([(rate, float((ttfts_s <= limit_s).mean())) for (rate, _, _), ttfts_s in zip(open_loops, side)])
        for side in (real, simulated)
    ]
    error = rates[1] / rates[0] - 1 if rates[0] and rates[1] else None
    return {"limit_ms": 1000 * limit_s, "real_per_s": rates[0], "simulated_per_s": rates[1], "error": error}


def crossing(attained: Sequence[tuple[float, float]]) -> float | None:
    """Where the share, given by rate, first falls below ATTAINED; linear between the rates."""
    for (low, before), (high, after) in itertools.pairwise(attained):
        if before >= ATTAINED > after:
            return low + (high - low) * (before - ATTAINED) / (before - after)
    return None


def ranking(rows: Sequence[Row]) -> list[Row]:
    """By load: Spearman's correlation of the settings' median E2E, and the regret: how much slower than the best
    setting the simulator's choice is on the machine."""
    found = []
    for kind in dict.fromkeys(row["load"] for row in rows):
        real, simulated = (
            np.array([row[f"{side}_e2e_p50_s"] for row in rows if row["load"] == kind])
            for side in ("real", "simulated")
        )
        if real.size > 1:
            ranks = [np.argsort(np.argsort(values)) for values in (real, simulated)]
            correlation = float(np.corrcoef(ranks[0], ranks[1])[0, 1])
            regret = float(real[np.argmin(simulated)] / real.min() - 1)
            found.append({"load": kind, "correlation": correlation, "regret": regret})
    return found


def markdown(report: Row) -> str:
    """The three tables."""
    tables = (("rows", _ERRORS, 2), ("ranking", _RANKS, 1), ("breaking", _BREAKS, 1))
    return "\n\n".join(results_table(report[of], columns, left=left, markdown=True) for of, columns, left in tables)
