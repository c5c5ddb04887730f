"""Where prefills run and who gets a request first: policies and orders over rates, on one running pair and on two
replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrelay.evaluate.calibration import Basis
from kvrelay.evaluate.effects import GOODPUT, TTFT_P90, Row, effects
from kvrelay.evaluate.findings import Section
from kvrelay.evaluate.load import Point
from kvrelay.evaluate.plan import Wish
from kvrelay.evaluate.shown import comparison, latency_plots
from kvrelay.evaluate.workbench import REPLICAS, SPLIT, Workbench
from kvrelay.simulate.advise import Advice

NAME = "policies"
DEFAULT = "cost, auto"
VARIANTS = {
    DEFAULT: ("cost", "auto"),
    "threshold": ("threshold", "auto"),
    "always": ("always", "auto"),
    "decode-first": ("cost", "decode-first"),
    "prefill-first": ("cost", "prefill-first"),
}
"""Name to policy and order."""
ORDERS = ("decode-first", "prefill-first")
SHARES, SHORT_SHARES = (0.3, 0.6, 0.9), (0.6,)
AGGREGATED = "aggregated"


def wishes(bench: Workbench, basis: Basis) -> list[Wish]:
    _, points, together = _points(bench, basis)
    return [Wish(NAME, 1, tuple(points)), Wish(NAME, 1, tuple(together))]


def _points(bench: Workbench, basis: Basis) -> tuple[list[str], list[Point], list[Point]]:
    """The rates' names, and the points of 1P1D and of two replicas."""
    rates = [basis.at(share) for share in (SHORT_SHARES if bench.options.is_short else SHARES)]
    points = [_variant(name, rate) for rate in rates for name in VARIANTS]
    together = [Point(rate.name, rate.rate, shown=(AGGREGATED, rate.name)) for rate in rates]
    return [rate.name for rate in rates], points, together


def _variant(name: str, rate: Point) -> Point:
    policy, order = VARIANTS[name]
    settings = {"disagg_policy": policy}
    return Point(f"{name}, {rate.name}", rate.rate, order=order, settings=settings, shown=(name, rate.name))


def take(bench: Workbench, basis: Basis, advice: Advice) -> list[Section]:
    return [section_of(*_measured(bench, basis))]


def order(bench: Workbench, basis: Basis) -> str:
    """A sentence about the order."""
    return order_sentence(*_measured(bench, basis))


def _measured(bench: Workbench, basis: Basis) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows, and the names of the rates."""
    rates, points, together = _points(bench, basis)
    return [*bench.rows(NAME, [SPLIT], points), *bench.rows(NAME, [REPLICAS], together)], rates


def section_of(rows: Sequence[Row], points: Sequence[str]) -> Section:
    others = [*(name for name in VARIANTS if name != DEFAULT), AGGREGATED]
    found = effects(rows, (TTFT_P90, GOODPUT), DEFAULT, others, points)
    return comparison(
        "Policies and orders over the rate",
        "1P1D with each policy of --disagg-policy and each order, set while it runs, and two replicas. In a round all "
        "get the same lengths at the same times, with tokens of their own. Times in milliseconds.",
        rows,
        found,
        told=[one for one in found if one.point == points[-1]],
        cases=others,
        plots=latency_plots(rows, "rate", "requests per second"),
    )


def order_sentence(rows: Sequence[Row], points: Sequence[str]) -> str:
    """Which order had earlier first tokens at each rate, if that is shown; auto otherwise."""
    firsts = [
        f"{ORDERS[one.size < 0]} has earlier first tokens at {one.point}"
        for one in effects(rows, (TTFT_P90,), ORDERS[0], ORDERS[1:], points)
        if one.is_shown
    ]
    return (
        f"auto; measured here: {'; '.join(firsts)}" if firsts else "auto; between the two orders nothing is shown here"
    )
