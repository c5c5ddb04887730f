"""Separation against tensor parallelism and replicas: two slots as 1P1D, as two workers, as one of two ranks."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.evaluate.calibration import CLIENTS, Basis
from kvrelay.evaluate.effects import GAP_P99, GOODPUT, TOKENS, TTFT_P90, Row, effects, effects_sentence
from kvrelay.evaluate.findings import Section
from kvrelay.evaluate.load import Point
from kvrelay.evaluate.plan import Wish
from kvrelay.evaluate.shown import comparison
from kvrelay.evaluate.workbench import REPLICAS, SPLIT, TWO_RANKS, ServerCase, Workbench

NAME = "arrangements"
CASES = (REPLICAS, SPLIT, TWO_RANKS)
SHARES = (0.5, 0.8)


def points_of(basis: Basis) -> list[Point]:
    return [*(basis.at(share) for share in SHARES), Point(f"{CLIENTS} clients", concurrency=CLIENTS)]


def cases_of(basis: Basis) -> list[ServerCase]:
    """Without two ranks if none could be calibrated."""
    return [case for case in CASES if case != TWO_RANKS or not basis.refused]


def wishes(basis: Basis) -> list[Wish]:
    return [Wish(NAME, len(cases_of(basis)), tuple(points_of(basis)))]


def take(bench: Workbench, basis: Basis) -> tuple[Section, Sequence[Row]]:
    """And the rows, with which the simulator is checked."""
    points = points_of(basis)
    rows = bench.rows(NAME, cases_of(basis), points)
    return section_of(rows, [point.name for point in points], basis.refused), rows


def goodput_sentence(rows: Sequence[Row]) -> str:
    """Which of two replicas and 1P1D kept more requests within the objectives, at the rates that were measured."""
    rates = list(dict.fromkeys(row["point"] for row in rows if row.get("rate")))
    return effects_sentence(effects(rows, (GOODPUT,), REPLICAS.name, [SPLIT.name], rates))


def section_of(rows: Sequence[Row], points: Sequence[str], refused: str = "") -> Section:
    """``refused``: why there are no two ranks."""
    *rates, closed = points
    others = (SPLIT.name, TWO_RANKS.name)
    found = [
        *effects(rows, (TTFT_P90, GAP_P99, GOODPUT), REPLICAS.name, others, rates),
        *effects(rows, (TOKENS,), REPLICAS.name, others, [closed]),
    ]
    return comparison(
        "Separation against replicas and tensor parallelism",
        "The same requests and the same cores for two replicas behind the router, one prefill and one decode worker, "
        "and one worker of two ranks.",
        rows,
        found,
        cases=(REPLICAS.name, *others),
        notes=[f"{TWO_RANKS.name} was not measured: {refused}"] if refused else (),
    )
