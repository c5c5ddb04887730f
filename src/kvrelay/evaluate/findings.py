"""What evaluate has found: sections with a sentence, tables and plots, and the report that they make."""

from __future__ import annotations

from typing import Any

import msgspec


class Line(msgspec.Struct, frozen=True):
    """A line of a plot."""

    name: str
    points: tuple[tuple[float, float], ...]


class Plot(msgspec.Struct, frozen=True):
    """Lines over one quantity; both axes are logarithmic. ``x`` and ``y``: what is on them, with the unit."""

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]


class Table(msgspec.Struct, frozen=True):
    """Cells as text; the first column names the row."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Section(msgspec.Struct, frozen=True):
    """One question. ``sentence``: its answer, made from the figures below. ``about``: what was done, with which
    settings. ``notes``: what failed, or was left out, and why."""

    title: str
    sentence: str
    about: str
    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()
    notes: tuple[str, ...] = ()


class Report(msgspec.Struct, frozen=True):
    """A whole evaluation. ``settings`` and ``versions`` by name. ``figures``: of the answer, for programs; those of
    cases are in the journal."""

    kind: str
    model: str
    machine: str
    load: str
    command: str
    began: str
    versions: dict[str, str]
    settings: dict[str, str]
    figures: dict[str, Any]
    sections: tuple[Section, ...]
