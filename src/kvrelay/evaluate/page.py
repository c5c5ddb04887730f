"""The report for people: sentences in the terminal, and one HTML page that loads nothing."""

from __future__ import annotations

import html
from collections.abc import Iterable

from kvrelay.bench.report.page import filled_page, line_plot
from kvrelay.bench.report.table import table
from kvrelay.evaluate.findings import Plot, Report, Section, Table

_NUMERIC = set("0123456789.-+%e ms")
"""Of numbers, perhaps in milliseconds."""


def text_of(report: Report) -> str:
    """The answer with its tables, and each section's sentence."""
    answer, *others = report.sections
    tables = "\n\n".join(table(one.head, one.rows, left=len(one.head)) for one in answer.tables)
    rest = "\n".join(f"{section.title}: {section.sentence}" for section in others)
    return f"{answer.sentence}\n\n{tables}\n\n{rest}"


def page_of(report: Report) -> str:
    """The HTML. What comes from files and servers is escaped."""
    texts = {
        "MODEL": report.model,
        "MACHINE": report.machine,
        "VERSIONS": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        "BEGAN": report.began,
        "LOAD": report.load,
        "COMMAND": report.command,
    }
    answer, *others = map(_section, report.sections)
    sections = [answer.replace("<section>", '<section class="answer">', 1), *others]
    parts = {"SETTINGS": "".join(map(_row, report.settings.items())), "SECTIONS": "\n".join(sections)}
    return filled_page("kvrelay.evaluate", texts, parts)


def _section(section: Section) -> str:
    escape = html.escape
    parts = [
        f"<h2>{escape(section.title)}</h2>",
        f"<p>{escape(section.sentence)}</p>",
        f"<p class=about>{escape(section.about)}</p>",
        *(f"<p class=note>{escape(note)}</p>" for note in section.notes),
        *map(_table, section.tables),
        *map(_plot, section.plots),
    ]
    return f"<section>{''.join(parts)}</section>"


def _table(one: Table) -> str:
    """Nothing without a row."""
    if not one.rows:
        return ""
    head = "".join(_cell("th", name, column) for name, column in zip(one.head, zip(*one.rows)))
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(map(_row, one.rows))}</table></div>'


def _row(cells: Iterable[str]) -> str:
    return f"<tr>{''.join(_cell('td', cell, (cell,)) for cell in cells)}</tr>"


def _cell(tag: str, text: str, looks: Iterable[str]) -> str:
    """Aligned left if one of ``looks`` has words."""
    mark = "" if all(set(look) <= _NUMERIC for look in looks) else " class=text"
    return f"<{tag}{mark}>{html.escape(text)}</{tag}>"


def _plot(plot: Plot) -> str:
    """Nothing without a line: one rate alone is in the table."""
    if all(len(line.points) < 2 for line in plot.lines):
        return ""
    figure = line_plot(plot.lines, html.escape(plot.title), html.escape(plot.x), html.escape(plot.y))
    return f"<h3>{html.escape(plot.title)}</h3>{figure}" if figure else ""
