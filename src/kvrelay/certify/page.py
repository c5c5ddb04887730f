"""A report for people: a table in the terminal, and one HTML page that loads nothing, with its plots drawn as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from kvrelay.bench.report.files import write_text
from kvrelay.bench.report.table import table
from kvrelay.certify.findings import CertifyReport, Group, Row, Series, Verdict

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
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 320, 70, 44, 12
_NUM_COLOURS = 8


def text_of(report: CertifyReport) -> str:
    """The table and the verdict."""
    rows = [(row.group, row.title, row.cell, row.verdict, row.reason) for row in report.rows]
    lines = table(("", "what", "with", "verdict", "why"), rows, left=5)
    counts = ", ".join(f"{n} {verdict}" for verdict in Verdict if (n := _count(report.rows, verdict)))
    return f"{report.machine}\n\n{lines}\n\n{report.verdict}: {SENTENCES[report.verdict]} ({counts})"


def write_page(path: Path, report: CertifyReport) -> None:
    """Raises InvalidInputError if the file cannot be written."""
    write_text(path, page_of(report))


def page_of(report: CertifyReport) -> str:
    """The HTML."""
    page = (resources.files("kvrelay.certify") / "page.html").read_text("utf-8")
    about = {
        "MODEL": report.model,
        "VERDICT": report.verdict.value,
        "TONE": report.verdict.lower(),
        "SENTENCE": SENTENCES[report.verdict] + ("" if report.is_complete else " The run was interrupted."),
        "MACHINE": report.machine,
        "COMMAND": report.command,
        "BEGAN": report.began,
        "RELEASE": report.release,
    }
    for name, text in about.items():
        page = page.replace(f"{{{{{name}}}}}", html.escape(text))
    page = page.replace("{{ROWS}}", "\n".join(_groups(report.rows)))
    return page.replace("{{PLOTS}}", "\n".join(_plots(report.rows)))


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
            found.append(f"<h2>{title}</h2>\n{_plot(lines, title, x, y)}")
    return found


def _plot(lines: Sequence[Series], title: str, x_name: str, y_name: str) -> str:
    """Both axes logarithmic."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points if y > 0]
    x_axis = _Axis(min(xs), max(xs), _LEFT, _WIDTH - 12)
    y_axis = _Axis(min(ys), max(ys), _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<line class=grid x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor=end>{label}</text>'
        for at, label in y_axis.ticks()
    ]
    parts += [
        f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor=middle>{label}</text>'
        for at, label in x_axis.ticks()
    ]
    parts.append(f'<text x="{_WIDTH // 2}" y="{_HEIGHT - 6}" text-anchor=middle>{x_name}</text>')
    legend = []
    for number, line in enumerate(lines):
        colour = f"c{number % _NUM_COLOURS}"
        points = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in line.points if y > 0)
        parts.append(f'<polyline class="{colour}" points="{points}"/>')
        legend.append(f'<li class="{colour}">{html.escape(line.name)}</li>')
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role=img aria-label="{title}">{"".join(parts)}</svg>'
    return f"<figure>{svg}<figcaption>{y_name}, both axes logarithmic<ul>{''.join(legend)}</ul></figcaption></figure>"


class _Axis:
    """A logarithmic one from ``low`` to ``high``, drawn from ``begin`` to ``end``."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self._low, self._high = math.log10(low), math.log10(max(high, low * 1.01))
        self._begin, self._end = begin, end

    def at(self, value: float) -> float:
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return self._begin + share * (self._end - self._begin)

    def ticks(self) -> list[tuple[float, str]]:
        """Where to write which number: 1, 2 and 5 times powers of ten, or fewer of them."""
        decades = range(math.floor(self._low), math.ceil(self._high) + 1)
        for steps in ((1, 2, 5), (1,)):
            values = [step * 10.0**decade for decade in decades for step in steps]
            found = [value for value in values if self._low - 1e-9 <= math.log10(value) <= self._high + 1e-9]
            if 2 <= len(found) <= 9:
                break
        return [(self.at(value), short_number(value)) for value in found]


def short_number(value: float) -> str:
    """With k, M, G for thousands, and m, µ for thousandths."""
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m")):
        if value >= scale * 0.9999:
            return f"{value / scale:g}{suffix}"
    return f"{value / 1e-6:g}µ"


def _count(rows: Sequence[Row], verdict: Verdict) -> int:
    return sum(row.verdict is verdict for row in rows)
