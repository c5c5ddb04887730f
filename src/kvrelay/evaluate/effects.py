"""Is a difference between two cases larger than what the same case differs by from round to round? Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvrelay.evaluate.findings import Table

Row = Mapping[str, Any]
"""A measured point: "case", "point", "round", "error" and figures by name."""
MAX_STOLEN_CORES = 0.005
"""Of a calm round. A virtual machine whose host keeps more than that from it stands still for tens of milliseconds now
and then, and computes more slowly between."""


class Figure(msgspec.Struct, frozen=True):
    """A figure of rows. ``scale``: to the shown unit."""

    name: str
    label: str
    unit: str
    scale: float = 1.0

    def text(self, value: float) -> str:
        shown = value * self.scale
        return f"{shown:.{0 if abs(shown) >= 100 else 1 if abs(shown) >= 10 else 2}f} {self.unit}".rstrip()


TTFT_P90 = Figure("ttft_p90_s", "P90 of first tokens", "ms", 1e3)
GAP_P99 = Figure("gap_p99_s", "P99 of gaps between tokens", "ms", 1e3)
TOKENS = Figure("tokens_per_s", "answer tokens per second", "")
GOODPUT = Figure("goodput", "requests within the objectives", "%", 100.0)


class Effect(msgspec.Struct, frozen=True):
    """A figure of two cases at a point, in the rounds of each."""

    figure: Figure
    point: str
    names: tuple[str, str]
    rounds: tuple[tuple[float, ...], tuple[float, ...]]

    @property
    def medians(self) -> tuple[float, float]:
        first, second = map(statistics.median, self.rounds)
        return first, second

    @property
    def size(self) -> float:
        """The second case's median less the first one's."""
        first, second = self.medians
        return second - first

    @property
    def noise(self) -> float:
        """The greater of what the rounds of each case differ by."""
        return max(max(values) - min(values) for values in self.rounds)

    @property
    def is_shown(self) -> bool:
        """One round tells nothing about noise."""
        return min(map(len, self.rounds)) > 1 and abs(self.size) > self.noise

    @property
    def sentence(self) -> str:
        (first, second), text = self.medians, self.figure.text
        change = f" ({second / first - 1:+.0%})" if first else ""
        return f"{self.figure.label}: {self.names[1]} {text(second)}, {self.names[0]} {text(first)}{change}"


def effects(
    rows: Sequence[Row], figures: Sequence[Figure], first: str, others: Sequence[str], points: Sequence[str]
) -> list[Effect]:
    """Of ``others`` against ``first``; without those of which one side has no value. Only calm rounds count if both
    sides have at least two of them."""
    found = []
    for point, other, figure in itertools.product(points, others, figures):
        sides = [[row for row in good(rows, case, point) if row[figure.name] is not None] for case in (first, other)]
        calm = [[row for row in side if is_calm(row)] for side in sides]
        used = calm if min(map(len, calm)) > 1 else sides
        values = [tuple(row[figure.name] for row in side) for side in used]
        if all(values):
            found.append(Effect(figure, point, (first, other), (values[0], values[1])))
    return found


def effects_sentence(found: Sequence[Effect]) -> str:
    """What differs at which point by more than the rounds do, and that the rest is not shown."""
    shown = [one for one in found if one.is_shown]
    said = [
        f"At {point}: {'; '.join(one.sentence for one in shown if one.point == point)}."
        for point in dict.fromkeys(one.point for one in shown)
    ]
    if not found:
        return "Not shown: nothing to compare was measured."
    if len(shown) < len(found):
        why = (
            "the rounds of a case differ by more than the cases"
            if max(len(values) for one in found for values in one.rounds) > 1
            else "one round tells nothing of noise"
        )
        said.append(f"{'Other differences are not' if shown else 'No difference is'} shown: {why}.")
    return " ".join(said)


def effects_table(found: Sequence[Effect]) -> Table:
    """Each difference beside that of the rounds."""
    rows = []
    for one in found:
        text, (first, second) = one.figure.text, one.medians
        verdict = "yes" if one.is_shown else "not shown"
        differ = (text(one.size), text(one.noise), verdict)
        rows.append((one.point, one.figure.label, one.names[1], text(second), one.names[0], text(first), *differ))
    head = ("load", "figure", "case", "median", "against", "median", "differ by", "rounds differ by", "shown")
    return Table(head, tuple(rows))


def unmeasured(rows: Sequence[Row], cases: Sequence[str]) -> str:
    """A sentence about cases without a single good row; empty without one."""
    missing = [case for case in cases if not any(row["case"] == case and not row["error"] for row in rows)]
    return f" {', '.join(missing)}: not measured." if missing else ""


def good(rows: Sequence[Row], case: str, point: str) -> list[Row]:
    """The rounds of a case at a point that did not fail."""
    return [row for row in rows if row["case"] == case and row["point"] == point and not row["error"]]


def is_calm(row: Row) -> bool:
    """Whether the machine's host gave it all that it wanted."""
    return float(row.get("stolen_cores", 0.0)) <= MAX_STOLEN_CORES


def points_of(rows: Sequence[Row]) -> list[str]:
    """The names of the rows' points, in their order."""
    return list(dict.fromkeys(row["point"] for row in rows))


def median(rows: Sequence[Row], name: str) -> float | None:
    """Over the rows that have the figure."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.median(values) if values else None
