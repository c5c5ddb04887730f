"""A report for people: a table in the terminal, and one HTML page that loads nothing, with its plots drawn as SVG."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from kvrelay.bench.report.page import filled_page, line_plot
from kvrelay.bench.report.table import table
from kvrelay.certify.findings import CertifyReport, Group, Row, Verdict

SENTENCES = {
    Verdict.PASS: "Right, fast and holding, as far as the rows below prove it.",
    Verdict.WARN: "Right as far as the rows below prove it; read the warnings.",
    Verdict.VOID: "Right as far as the rows below prove it; the times prove nothing, because the machine was in use.",
    Verdict.FAIL: "Not fit: read the rows that failed.",
    Verdict.SKIP: "Nothing was measured.",
}
AXES = {
    "bandwidth": ("Bandwidth over size", "bytes", "bytes per second"),
    "first token": ("First token over prompt length", "tokens", "seconds"),
}


def text_of(report: CertifyReport) -> str:
    """The table and the verdict."""
    rows = [(row.group, row.title, row.cell, row.verdict, row.reason) for row in report.rows]
    lines = table(("", "what", "with", "verdict", "why"), rows, left=5)
    counts = ", ".join(f"{n} {verdict}" for verdict in Verdict if (n := _count(report.rows, verdict)))
    return f"{report.machine}\n\n{lines}\n\n{report.verdict}: {SENTENCES[report.verdict]} ({counts})"


def page_of(report: CertifyReport) -> str:
    """The HTML."""
    texts = {
        "MODEL": report.model,
        "VERDICT": report.verdict.value,
        "TONE": report.verdict.lower(),
        "SENTENCE": SENTENCES[report.verdict] + ("" if report.is_complete else " The run was interrupted."),
        "MACHINE": report.machine,
        "COMMAND": report.command,
        "BEGAN": report.began,
        "RELEASE": report.release,
    }
    parts = {"ROWS": "\n".join(_groups(report.rows)), "PLOTS": "\n".join(_plots(report.rows))}
    return filled_page("kvrelay.certify", texts, parts)


def _groups(rows: Sequence[Row]) -> Iterator[str]:
    for group in Group:
        own = [_row(row) for row in rows if row.group is group]
        if own:
            yield "\n".join([f"<h2>{group}</h2>", *own])


def _row(row: Row) -> str:
    escape = html.escape
    evidence = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in row.evidence.items())
    details = f"<details><summary>evidence</summary><dl>{evidence}</dl></details>" if evidence else ""
    return (
        f'<article class="{row.verdict.lower()}"><span class="badge">{row.verdict}</span>'
        f"<div><h3>{escape(row.title)}</h3><p class=cell>{escape(row.cell)}</p>"
        f"<p>{escape(row.reason)}</p>{details}</div></article>"
    )


def _plots(rows: Sequence[Row]) -> list[str]:
    """A plot for each chart that has a line."""
    found = []
    for chart, (title, x, y) in AXES.items():
        lines = [series for row in rows for series in row.series if series.chart == chart and series.points]
        if lines:
            found.append(f"<h2>{title}</h2>\n{line_plot(lines, title, x, y)}")
    return found


def _count(rows: Sequence[Row], verdict: Verdict) -> int:
    return sum(row.verdict is verdict for row in rows)
