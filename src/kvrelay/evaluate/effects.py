"""Is a difference between two cases larger than what the same case differs by from round to round? Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Row = Mapping[str, Any]
"""A measured point: "case", "point", "round", "error" and figures by name."""


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
    """A figure of two cases, in the rounds of each."""

    figure: Figure
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
        text = self.figure.text
        if min(map(len, self.rounds)) < 2:
            return f"{self.figure.label}: not shown, one round tells no noise"
        first, second = self.medians
        if not self.is_shown:
            return (
                f"{self.figure.label}: not shown, {self.names[1]} and {self.names[0]} differ by "
                f"{text(abs(self.size))} and rounds by {text(self.noise)}"
            )
        change = f" ({second / first - 1:+.0%})" if first else ""
        return f"{self.figure.label}: {self.names[1]} {text(second)}, {self.names[0]} {text(first)}{change}"


def effect(rows: Sequence[Row], figure: Figure, first: str, second: str, point: str) -> Effect | None:
    """Of two cases at one point; None if one of them has no value."""
    values = [
        tuple(row[figure.name] for row in good(rows, case, point) if row[figure.name] is not None)
        for case in (first, second)
    ]
    return Effect(figure, (first, second), (values[0], values[1])) if all(values) else None


def effects_sentence(
    rows: Sequence[Row], figures: Sequence[Figure], first: str, second: str, points: Sequence[str]
) -> str:
    """What differs at which point."""
    unmeasured = [case for case in (first, second) if not any(good(rows, case, point) for point in points)]
    if unmeasured:
        return f"{' and '.join(unmeasured)}: not measured."
    said = []
    for point in points:
        found = [one.sentence for figure in figures if (one := effect(rows, figure, first, second, point)) is not None]
        if found:
            said.append(f"At {point}: {'; '.join(found)}.")
    return " ".join(said) or f"{first} and {second}: not measured at the same load."


def good(rows: Sequence[Row], case: str, point: str) -> list[Row]:
    """The rounds of a case at a point that did not fail."""
    return [row for row in rows if row["case"] == case and row["point"] == point and not row["error"]]


def median(rows: Sequence[Row], name: str) -> float | None:
    """Over the rows that have the figure."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.median(values) if values else None
