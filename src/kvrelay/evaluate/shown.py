"""Rows as tables, lines and notes of a section, and the whole section of a comparison. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvrelay.bench.compare import summarise
from kvrelay.bench.report.table import cells
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
    "requests/s": "requests_per_s:.2f",
    "answer tokens/s": "tokens_per_s:.0f",
    "TTFT P50": "ttft_p50_s:ms",
    "P90": "ttft_p90_s:ms",
    "P99": "ttft_p99_s:ms",
    "per token P50": "tpot_p50_s:ms.2f",
    "gap P90": "gap_p90_s:ms",
    "gap P99": "gap_p99_s:ms",
    "within objectives": "goodput:.0%",
    "remote": "remote:.0%",
}
"""Heading to figure, as ``results_table`` has them."""
PERCENTILES = {
    f"{of} {p.upper()}": f"{of.lower()}_{p}_s:ms" for of in ("TTFT", "gap") for p in ("p50", "p90", "p95", "p99")
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
    columns: Mapping[str, str] | None = None,
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


def rows_table(rows: Sequence[Row], columns: Mapping[str, str] = COLUMNS) -> Table:
    """One line for each point and case: medians of the rounds."""
    order = points_of(rows)
    found = sorted(summarise(rows, labels=("point", "case")), key=lambda row: order.index(row["point"]))
    lines = ((row["point"], row["case"], *cells(row, columns)) for row in found)
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
