"""Rows as tables, lines and notes of a section, and the whole section of a comparison. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvrelay.bench.report.table import number
from kvrelay.evaluate.effects import (
    MAX_STOLEN_CORES,
    Effect,
    Row,
    effects_sentence,
    effects_table,
    good,
    is_calm,
    median,
    points_of,
    unmeasured,
)
from kvrelay.evaluate.findings import Line, Plot, Section, Table

COLUMNS = {
    "requests/s": ("requests_per_s", ".2f", 1.0),
    "answer tokens/s": ("tokens_per_s", ".0f", 1.0),
    "TTFT P50": ("ttft_p50_s", ".1f", 1e3),
    "P90": ("ttft_p90_s", ".1f", 1e3),
    "P99": ("ttft_p99_s", ".1f", 1e3),
    "per token P50": ("tpot_p50_s", ".2f", 1e3),
    "gap P90": ("gap_p90_s", ".1f", 1e3),
    "gap P99": ("gap_p99_s", ".1f", 1e3),
    "within objectives": ("goodput", ".0%", 1.0),
    "remote": ("remote", ".0%", 1.0),
}
"""Heading to figure, format and scale: times in milliseconds."""
PERCENTILES = {
    f"{name} {p.upper()}": (f"{of}_{p}_s", ".1f", 1e3)
    for name, of in (("TTFT", "ttft"), ("gap", "gap"))
    for p in ("p50", "p90", "p95", "p99")
}
MAX_FOREIGN_CORES = 0.3


def comparison(
    title: str,
    about: str,
    rows: Sequence[Row],
    found: Sequence[Effect],
    *,
    told: Sequence[Effect] | None = None,
    cases: Sequence[str] = (),
    more: str = "",
    columns: Mapping[str, tuple[str, str, float]] | None = None,
    tables: Sequence[Table] = (),
    plots: tuple[Plot, ...] = (),
    notes: Sequence[str] = (),
) -> Section:
    """A section of measured rows and of what differs between them. ``told``: those of the differences that the sentence
    names; None: all. It names those of ``cases``, too, of which nothing was measured; ``more`` follows it. ``tables``
    follow the own ones, ``notes`` come first."""
    return Section(
        title,
        effects_sentence(found if told is None else told) + unmeasured(rows, cases) + more,
        about,
        (rows_table(rows, columns or COLUMNS), effects_table(found), *tables),
        plots,
        notes=(*notes, *failures(rows)),
    )


def rows_table(rows: Sequence[Row], columns: Mapping[str, tuple[str, str, float]] = COLUMNS) -> Table:
    """One line for each point and case: medians of the rounds."""
    lines = []
    order = points_of(rows)
    pairs = dict.fromkeys((row["point"], row["case"]) for row in rows)
    for point, case in sorted(pairs, key=lambda pair: order.index(pair[0])):
        own = good(rows, case, point)
        cells = (number(median(own, name), spec, scale) for name, spec, scale in columns.values())
        lines.append((point, case, *cells))
    return Table(("load", "case", *columns), tuple(lines))


def lines_over(rows: Sequence[Row], x: str, figure: str, scale: float = 1.0) -> tuple[Line, ...]:
    """A line for each case: the figure's medians over ``x``, another figure of the rows."""
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        points = dict.fromkeys((row["point"], row[x]) for row in rows if row["case"] == case and row.get(x))
        found = [(at, median(good(rows, case, point), figure)) for point, at in points]
        lines.append(Line(case, tuple(sorted((at, value * scale) for at, value in found if value is not None))))
    return tuple(lines)


def latency_plots(rows: Sequence[Row], x: str, x_name: str) -> tuple[Plot, ...]:
    return (
        Plot(f"First tokens over {x_name}", x_name, "P90 in ms", lines_over(rows, x, "ttft_p90_s", 1e3)),
        Plot(f"Gaps between tokens over {x_name}", x_name, "P99 in ms", lines_over(rows, x, "gap_p99_s", 1e3)),
    )


def failures(rows: Sequence[Row]) -> tuple[str, ...]:
    """Which rows have no figures and why, which lack slow answers, and which were taken on a machine in use."""
    errors = Counter((row["case"], row["error"]) for row in rows if row["error"])
    notes = [
        f"{case}, {count} of {len(rows)} turns have no figures: {error}" for (case, error), count in errors.items()
    ]
    late = Counter[str]()
    for row in rows:
        late[row["case"]] += row.get("unanswered", 0) * (not row["error"])
    notes += [f"{case}: {count} answers did not come in time and are not counted." for case, count in (+late).items()]
    busy = [row["foreign_cores"] for row in rows if row.get("foreign_cores", 0.0) > MAX_FOREIGN_CORES]
    if busy:
        notes.append(
            f"{len(busy)} of {len(rows)} turns were taken while other processes used more than {MAX_FOREIGN_CORES:g} "
            f"cores (up to {max(busy):.1f}): their times say little."
        )
    stolen = [row["stolen_cores"] for row in rows if not is_calm(row)]
    if stolen:
        notes.append(
            f"In {len(stolen)} of {len(rows)} turns this machine's host kept more than {MAX_STOLEN_CORES:g} cores from "
            f"it (steal, up to {max(stolen):.2g}): their times are later than this machine's own, P99 most of all. "
            "Cases are compared by the other rounds if both have two of them."
        )
    return tuple(notes)
