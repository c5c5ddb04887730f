"""What certify has found: rows with a verdict, a reason and evidence; and the report that they make."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec


class Verdict(StrEnum):
    """``VOID``: measured, but on a machine in use, so that it proves nothing. ``SKIP``: not measured."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    VOID = "VOID"
    SKIP = "SKIP"


_SEVERITY = (Verdict.SKIP, Verdict.PASS, Verdict.VOID, Verdict.WARN, Verdict.FAIL)


class Group(StrEnum):
    """What a row is about."""

    RIGHT = "Right"
    FAST = "Fast"
    HOLDS = "Holds"


class Series(msgspec.Struct, frozen=True):
    """A line of a plot. ``chart``: "bandwidth" (bytes, bytes per second) or "first token" (tokens, seconds)."""

    chart: str
    name: str
    points: tuple[tuple[float, float], ...]


Facts = dict[str, str | int | float]
"""By name."""


class Row(msgspec.Struct, frozen=True):
    """One thing that was tried. ``cell``: with which engine, transport, order and ranks. ``reason``: one sentence."""

    group: Group
    title: str
    cell: str
    verdict: Verdict
    reason: str
    evidence: Facts = {}
    series: tuple[Series, ...] = ()
    seconds: float = 0.0


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Of no verdict: SKIP."""
    return max(verdicts, key=_SEVERITY.index, default=Verdict.SKIP)


class CertifyReport(msgspec.Struct, frozen=True):
    """A run. ``digest`` is of everything that the rows depend on: a run of another digest does not go on from it."""

    digest: str
    machine: str
    release: str
    model: str
    command: str
    began: str
    rows: tuple[Row, ...] = ()
    units: tuple[str, ...] = ()
    """What has been done, for a run that goes on from here."""
    is_complete: bool = False

    @property
    def verdict(self) -> Verdict:
        return worst(row.verdict for row in self.rows)

    @property
    def exit_code(self) -> int:
        """0 unless a row failed or none was measured."""
        return int(self.verdict in (Verdict.FAIL, Verdict.SKIP))
