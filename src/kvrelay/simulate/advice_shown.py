"""An Advice for people: a table in the terminal, and one HTML page that loads nothing from elsewhere."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import msgspec

from kvrelay.bench.report.files import write_text
from kvrelay.simulate.advise import Advice, Measured

HEAD = ("cluster", "goodput", "good tokens/s", "TTFT p50", "p90", "p99 ms", "ITL p50", "p90", "p99 ms", "per M tokens")


def text_of(advice: Advice) -> str:
    """Table, capacities, verdict and command line."""
    rows = [HEAD, *map(_cells, advice.table)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join(cell.ljust(w) if not at else cell.rjust(w) for at, (cell, w) in enumerate(zip(row, widths)))
        for row in rows
    ]
    for found in advice.capacities:
        spread = f"{min(found.by_seed):.3g} to {max(found.by_seed):.3g} over {len(found.by_seed)} seeds"
        lines.append(f"capacity of {found.candidate}: {found.requests_per_s:.3g} requests/s ({spread})")
    return "\n".join([*lines, advice.verdict, advice.command])


def page_of(advice: Advice, load: str) -> str:
    """The HTML. ``load`` describes the load and the costs, in a sentence."""
    data = {
        "verdict": advice.verdict,
        "command": advice.command,
        "load": load,
        "head": HEAD,
        "rows": [_cells(row) for row in advice.table],
        "capacity": [{"name": str(one.candidate), "points": one.points} for one in advice.capacities],
        "ttft": [{"name": str(row.candidate), "points": _shares(row.ttft_sample_ms)} for row in advice.table],
    }
    # "<" would let a name end the script element.
    encoded = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    plot = resources.files("kvrelay.frontend") / "ui" / "uplot"
    page = (resources.files("kvrelay.simulate") / "page.html").read_text("utf-8")
    for mark, text in (
        ("/*UPLOT_CSS*/", (plot / "uPlot.min.css").read_text("utf-8")),
        ("/*UPLOT_JS*/", (plot / "uPlot.iife.min.js").read_text("utf-8")),
        ("/*DATA*/", encoded),
    ):
        page = page.replace(mark, text)
    return page


def write_page(path: Path, advice: Advice, load: str) -> None:
    """Raises InvalidInputError if the file cannot be written."""
    write_text(path, page_of(advice, load))


def _cells(row: Measured) -> tuple[str, ...]:
    return (
        str(row.candidate),
        f"{row.goodput:.1%}",
        f"{row.good_tokens_per_s:.1f}",
        *(f"{value:.0f}" for value in row.ttft_ms),
        *(f"{value:.1f}" for value in row.itl_ms),
        "-" if row.price is None else f"{row.price:.2f}",
    )


def _shares(values: tuple[float, ...]) -> list[tuple[float, float]]:
    """The share of requests at or below each value; ``values`` ascend."""
    return [(value, (at + 1) / len(values)) for at, value in enumerate(values)]
