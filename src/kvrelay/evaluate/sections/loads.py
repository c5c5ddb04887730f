"""How latency grows: with clients from 1 to 64, and with the rate, with Poisson arrivals and with even ones."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.evaluate.calibration import Basis
from kvrelay.evaluate.effects import GAP_P99, GOODPUT, TOKENS, TTFT_P90, Row, effects
from kvrelay.evaluate.findings import Plot, Section
from kvrelay.evaluate.load import Point
from kvrelay.evaluate.plan import Wish
from kvrelay.evaluate.shown import COLUMNS, PERCENTILES, comparison, latency_plots, lines_over
from kvrelay.evaluate.workbench import REPLICAS, SPLIT, Workbench
from kvrelay.simulate.advise import Advice

NAME = "loads"
CASES = (REPLICAS, SPLIT)
CLIENTS, SHORT_CLIENTS = (1, 2, 4, 8, 16, 32, 64), (1, 64)
SHARES, SHORT_SHARES = (0.3, 0.5, 0.7, 0.9), (0.9,)
EVEN = 100.0
"""Shape of gaps that are nearly equal."""


def wishes(bench: Workbench, basis: Basis) -> list[Wish]:
    closed, opened = _points(bench, basis)
    return [Wish(NAME, len(CASES), (*closed, *opened))]


def _points(bench: Workbench, basis: Basis) -> tuple[list[Point], list[Point]]:
    """By clients, and by rate."""
    clients, shares = (SHORT_CLIENTS, SHORT_SHARES) if bench.options.is_short else (CLIENTS, SHARES)
    poisson = [basis.at(share) for share in shares]
    even = [Point(f"{one.name}, even", rate=one.rate, burstiness=EVEN) for one in poisson]
    return [Point(f"{num} client{'s' * (num > 1)}", concurrency=num) for num in clients], [*poisson, *even]


def rows_of(bench: Workbench, basis: Basis) -> Sequence[Row]:
    closed, opened = _points(bench, basis)
    return bench.rows(NAME, CASES, [*closed, *opened])


def take(bench: Workbench, basis: Basis, advice: Advice) -> list[Section]:
    closed, opened = _points(bench, basis)
    rows = rows_of(bench, basis)
    by_name = {point.name: [row for row in rows if row["point"] == point.name] for point in (*closed, *opened)}
    return [
        closed_section([row for point in closed for row in by_name[point.name]], [point.name for point in closed]),
        open_section([row for point in opened for row in by_name[point.name]], [point.name for point in opened]),
    ]


def closed_section(rows: Sequence[Row], points: Sequence[str]) -> Section:
    found = effects(rows, (TTFT_P90, GAP_P99, TOKENS), REPLICAS.name, [SPLIT.name], points)
    tokens = lines_over(rows, "concurrency", "tokens_per_s")
    return comparison(
        f"From {points[0].split()[0]} to {points[-1]}",
        "Closed loops: each client sends its next request after its answer. Times in milliseconds.",
        rows,
        found,
        told=[one for one in found if one.point in (points[0], points[-1])],
        plots=(
            *latency_plots(rows, "concurrency", "clients"),
            Plot("Answer tokens over clients", "clients", "answer tokens per second", tokens),
        ),
    )


def open_section(rows: Sequence[Row], points: Sequence[str]) -> Section:
    """``points``: the Poisson ones by rate, then the even ones."""
    poisson = points[: len(points) // 2]
    random = [row for row in rows if row["point"] in poisson]
    found = effects(rows, (TTFT_P90, GAP_P99, GOODPUT), REPLICAS.name, [SPLIT.name], points)
    return comparison(
        "Over the rate, with Poisson and with even arrivals",
        f"Open loops. Even arrivals have burstiness {EVEN:g}: gamma gaps of that shape, nearly equal ones. The plots "
        "have Poisson arrivals. Times in milliseconds.",
        rows,
        found,
        told=[one for one in found if one.point in (poisson[-1], points[-1])],
        columns={**PERCENTILES, "within objectives": COLUMNS["within objectives"]},
        plots=latency_plots(random, "rate", "requests per second"),
    )
