"""The simulator against this machine: the loads of the arrangements, to which no cost was fitted, simulated at the
times at which they were sent."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kvrelay.config import DisaggConfig
from kvrelay.evaluate.calibration import Basis
from kvrelay.evaluate.effects import Row, is_calm
from kvrelay.evaluate.findings import Section, Table
from kvrelay.evaluate.load import Sent, answered_per_s, replayed
from kvrelay.evaluate.workbench import REPLICAS, SPLIT, Workbench
from kvrelay.simulate.cluster import ClusterSpec
from kvrelay.simulate.result import SimulationResult
from kvrelay.simulate.simulation import simulate

NAME = "accuracy"
CLUSTERS = {SPLIT.name: ClusterSpec(prefill=1, decode=1), REPLICAS.name: ClusterSpec(both=2)}
MIN_SENT = 5
FIGURES = ("requests_per_s", "ttft_mean_s", "e2e_p50_s")
GOODPUT = "goodput"
SIDES = ("measured", "simulated")
SECONDS = 10.0


class Accuracy(msgspec.Struct, frozen=True):
    """Errors, simulated / measured - 1, of each case and load; of ``goodput`` simulated - measured, as a share of all
    requests. ``same_choice``: of how many loads, of all, the simulator finds the same one of two arrangements faster
    by its median answer."""

    throughput: tuple[float, ...]
    ttft: tuple[float, ...]
    e2e: tuple[float, ...]
    same_choice: tuple[int, int] = (0, 0)
    goodput: tuple[float, ...] = ()

    @property
    def worst_throughput(self) -> float:
        return max(map(abs, self.throughput), default=0.0)

    @property
    def worst_goodput(self) -> float:
        return max(map(abs, self.goodput), default=0.0)

    @property
    def worst_ttft(self) -> float:
        return max(map(abs, self.ttft), default=0.0)


def take(bench: Workbench, basis: Basis, rows: Sequence[Row]) -> tuple[Section, Accuracy]:
    checks = bench.journal.take(NAME, lambda: _checks(bench, basis, rows), (basis.costs[1], rows))
    found = accuracy_of(checks)
    return section_of(checks, found, basis), found


def _checks(bench: Workbench, basis: Basis, rows: Sequence[Row]) -> list[dict[str, Any]]:
    used = calm_rounds([row for row in rows if row["case"] in CLUSTERS and has_enough(row)])
    disagg = DisaggConfig(slo_ttft_ms=bench.options.slo_ttft_ms, slo_itl_ms=bench.options.slo_itl_ms)
    found = []
    for number, row in enumerate(used):
        with bench.bar.part(f"{NAME}: {row['case']}, {row['point']}", SECONDS / len(used)):
            cluster = CLUSTERS[row["case"]]
            spec = msgspec.structs.replace(cluster, disagg=disagg, max_model_len=bench.load.context)
            found.append(check_of(bench, basis, row, spec, number))
    return found


def has_enough(row: Row) -> bool:
    """Whether so many requests were answered that its figures can be compared."""
    return len(row.get("records") or ()) >= MIN_SENT


def check_of(bench: Workbench, basis: Basis, row: Row, spec: ClusterSpec, seed: int) -> dict[str, Any]:
    """A row's figures, and those of the simulated cluster that gets the same requests."""
    sent = msgspec.convert(row["records"], list[Sent])
    result = simulate(spec, replayed(sent, row["concurrency"]), basis.costs[1], seed=seed)
    return {
        "case": row["case"],
        "point": row["point"],
        "measured": measured_figures(sent) | {GOODPUT: row[GOODPUT]},
        "simulated": simulated_figures(result) | {GOODPUT: result.goodput(bench.options.objectives)},
    }


def calm_rounds(rows: Sequence[Row]) -> list[Row]:
    """Of each case and load the calm rounds, or all if there is none."""
    calm = {(row["case"], row["point"]) for row in rows if is_calm(row)}
    return [row for row in rows if is_calm(row) or (row["case"], row["point"]) not in calm]


def measured_figures(sent: Sequence[Sent]) -> dict[str, float]:
    """Of answered requests: rate until the last answer, mean first token, median answer."""
    return {
        "requests_per_s": answered_per_s(sent),
        "ttft_mean_s": float(np.mean([one.ttft_s for one in sent])),
        "e2e_p50_s": float(np.median([one.e2e_s for one in sent])),
    }


def simulated_figures(result: SimulationResult) -> dict[str, float]:
    """The same of a simulated cluster."""
    latencies = result.latencies()
    times = {"ttft_mean_s": latencies["ttft_s"]["mean"], "e2e_p50_s": latencies["e2e_s"]["p50"]}
    return {"requests_per_s": len(result.done) / result.end_s, **times}


def by_load(checks: Sequence[Row]) -> dict[tuple[str, str], list[dict[str, float]]]:
    """For each load and case the measured and the simulated figures, medians of the rounds."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for check in checks:
        groups.setdefault((check["point"], check["case"]), []).append(check)

    def medians(group: Sequence[Row], side: str) -> dict[str, float]:
        return {name: statistics.median(one[side][name] for one in group) for name in (*FIGURES, GOODPUT)}

    return {key: [medians(group, side) for side in SIDES] for key, group in groups.items()}


def accuracy_of(checks: Sequence[Row]) -> Accuracy:
    """Errors by figure, and agreement by load."""
    found = by_load(checks)
    errors = [tuple(simulated[name] / real[name] - 1 for real, simulated in found.values()) for name in FIGURES]
    pairs = [
        [[side["e2e_p50_s"] for side in sides] for (at, _), sides in found.items() if at == point]
        for point in dict.fromkeys(point for point, _ in found)
    ]
    compared = [pair for pair in pairs if len(pair) == 2]
    same = sum((one[0] < other[0]) == (one[1] < other[1]) for one, other in compared)
    good = tuple(simulated[GOODPUT] - real[GOODPUT] for real, simulated in found.values())
    return Accuracy(errors[0], errors[1], errors[2], (same, len(compared)), good)


def section_of(checks: Sequence[Row], found: Accuracy, basis: Basis) -> Section:
    lines = []
    for key, (real, simulated) in by_load(checks).items():
        cells = []
        for name, scale, spec in zip(FIGURES, (1.0, 1e3, 1e3), (".2f", ".1f", ".0f")):
            cells += [format(real[name] * scale, spec), format(simulated[name] * scale, spec)]
            cells.append(f"{simulated[name] / real[name] - 1:+.0%}")
        lines.append((*key, *cells, f"{real[GOODPUT]:.0%}", f"{simulated[GOODPUT]:.0%}"))
    names = ("requests/s", "mean TTFT", "median answer")
    columns = [word for name in names for word in (name, "simulated", "error")]
    head = ("load", "case", *columns, "within objectives", "simulated")
    costs = [
        (f"{ranks} rank{'s' * (ranks > 1)}", *(f"{value * 1e6:.6g}" for value in msgspec.structs.astuple(one.step)))
        for ranks, one in basis.costs.items()
    ]
    return Section(
        "How far the simulator is off, here",
        sentence_of(found),
        "Costs were fitted from a small load of their own (kvrelay simulate calibrate). These are other loads, which "
        "the simulator got at the times at which they were sent. Times in milliseconds; errors are simulated over "
        "measured, less one.",
        (
            Table(head, tuple(lines)),
            Table(("costs, in µs", *type(basis.costs[1].step).__struct_fields__), tuple(costs)),
        ),
        notes=basis.notes,
    )


def sentence_of(found: Accuracy) -> str:
    if not found.throughput:
        return "Not shown: no load was answered, so nothing simulated here can be trusted."
    errors_of = {"throughput": found.throughput, "mean first tokens": found.ttft, "median answers": found.e2e}
    spans = [f"{name} by {min(errors):+.0%} to {max(errors):+.0%}" for name, errors in errors_of.items()]
    if found.goodput:
        points = f"{100 * min(found.goodput):+.0f} to {100 * max(found.goodput):+.0f}"
        spans.append(f"requests within the objectives by {points} points")
    same, total = found.same_choice
    agrees = f" Of two arrangements it finds the faster one for {same} of {total} loads." if total else ""
    return f"The simulator is off for {', '.join(spans)}.{agrees}"
