"""The one table of all reports: aligned for a terminal, or in Markdown for a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, markdown: bool = False) -> str:
    """``rows`` under ``columns``. In a terminal the first ``left`` columns are aligned left, the others right."""
    lines = [list(columns), *map(list, rows)]
    if markdown:
        lines.insert(1, ["---"] * len(columns))
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.ljust(w) if at < left else cell.rjust(w) for at, (cell, w) in enumerate(pairs)).rstrip()
        for pairs in (tuple(zip(line, widths)) for line in lines)
    )


def number(value: float | None, spec: str = ".1f", scale: float = 1.0) -> str:
    """``value * scale`` as the format says; "-" for None."""
    return "-" if value is None else format(value * scale, spec)


def milliseconds(*values_s: float | None) -> list[str]:
    """Seconds as milliseconds with one decimal."""
    return [number(value, scale=1e3) for value in values_s]


Row = dict[str, Any]


def cells(row: Mapping[str, Any], columns: Mapping[str, str]) -> list[str]:
    """``columns``: heading to figure, as "name", "name:format", or "name:ms" with a format after it or without, for
    seconds that are shown as milliseconds."""

    def cell(column: str) -> str:
        name, _, spec = column.partition(":")
        value = row.get(name)
        if isinstance(value, str):
            return value
        return number(value, spec[2:] or ".1f", 1e3) if spec.startswith("ms") else number(value, spec or "g")

    return [cell(column) for column in columns.values()]


def results_table(rows: Sequence[Row], columns: Mapping[str, str], *, left: int = 1, markdown: bool = False) -> str:
    """A line for each row, with ``cells``."""
    return table(list(columns), (cells(row, columns) for row in rows), left=left, markdown=markdown)
