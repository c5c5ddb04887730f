"""What a planner process says of itself, in discovery under its lease: for ``kvrelay plan``, the page, metrics, and for
the other planners, which find out here who decides."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import msgspec

from kvrelay.core.activity import Number, Seconds
from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.histogram import ENDLESS_S
from kvrelay.planner.base import Action, Measured, Numbers, Objectives, Range

MAX_BYTES = 65536
PAUSED = "planner.paused"
"""Setting: true while planners only suggest."""
HELD = "planner.held."
"""Settings, one for each worker whose role was set by hand; ``planner.held.count``: nothing is started or stopped."""
COUNT = "count"
HARMLESS = 0.5
"""Of an objective: times within that are good, whatever was expected."""
MAX_CHANGES = 20
WRONG_TIMES, WRONG_S = 2.0, 60.0
"""The planner doubts its model if an estimate is off by more than so many times for so long."""


class Change(msgspec.Struct, frozen=True):
    """An action that was carried out at ``unix_s``."""

    unix_s: float
    what: str
    reason: str


class PlannerReport(msgspec.Struct, frozen=True, kw_only=True):
    """``is_leader``: this one decides. ``actions``: its last plan, of ``unix_s``. ``held``: workers (or ``count``) that
    are left alone. ``shape``: of the fleet, e.g. 2P2D. ``problem``: why it decides nothing; empty: it does.
    ``can_start``: it starts a worker if requests wait for one. ``num_changes``: actions that it has carried out since
    its start, ``changes`` the latest of them, in order. ``measured``: what it compares its estimates with. ``doubt``:
    they disagree. ``cpu_cores``: of the process and what it has started, the mean since the report before; and their
    memory."""

    planner_id: str
    host: str
    pid: int
    started_unix: float
    mode: str
    is_leader: bool = False
    is_paused: bool = False
    unix_s: float = 0.0
    shape: str = ""
    actions: tuple[Action, ...] = ()
    held: tuple[str, ...] = ()
    problem: str = ""
    can_start: bool = False
    num_changes: int = 0
    measured: Measured | None = None
    doubt: str = ""
    changes: tuple[Change, ...] = ()
    cpu_cores: Seconds = 0.0
    rss_bytes: Number = 0


class Doubts:
    """Whether the estimates of a planner are what clients get, over time."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def look(self, now_s: float, expected: Numbers, measured: Measured | None, objectives: Objectives) -> str:
        """The disagreement, if it has lasted; empty: there is none, or not for long enough."""
        found = "; ".join(disagreements(expected, measured, objectives))
        if not found:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s >= WRONG_S:
            return f"{found}; do not rely on this plan (kvrelay plan pause makes it a suggestion)"
        return ""


def disagreements(expected: Numbers, measured: Measured | None, objectives: Objectives) -> list[str]:
    """Estimates that are off by more than WRONG_TIMES whatever the measured value within its bucket is. Where both are
    well within the objective, they differ by what frontends and network add, and no plan depends on it."""
    if measured is None or not expected.requests_per_s:
        return []
    pairs = (
        ("first token", expected.ttft_s, measured.ttft_s, objectives.ttft_s),
        ("between tokens", expected.itl_s, measured.itl_s, objectives.itl_s),
    )
    return [
        f"{name}: expected {seconds:.3g} s, measured {shown(bucket)}"
        for name, seconds, bucket, aim_s in pairs
        if max(seconds, bucket[1]) > HARMLESS * aim_s
        and not bucket[0] / WRONG_TIMES <= seconds <= bucket[1] * WRONG_TIMES
    ]


def shown(bucket: Range) -> str:
    """For people."""
    return f"{bucket[0]:g} to {bucket[1]:g} s" if bucket[1] < ENDLESS_S else f"more than {bucket[0]:g} s"


def beside(numbers: Mapping[str, float], measured: Mapping[str, Range] | None) -> list[str]:
    """What was expected beside what clients got, for people; of a report's JSON. Nothing without either."""
    if measured is None or not numbers["requests_per_s"]:
        return []
    names = (("first token (95 %)", "ttft_s"), ("between tokens", "itl_s"))
    return [f"{name}: expected {numbers[key]:.3g} s, measured {shown(measured[key])}" for name, key in names]


_decoder = msgspec.json.Decoder(PlannerReport)


def read_reports(entries: Mapping[str, bytes]) -> list[PlannerReport]:
    """Of all planners in discovery, the one that decides first. Unreadable ones are left out.

    The one that decides goes on. Clocks of several machines differ, so the start of a planner counts only between
    those that all decide, or of which none does.
    """
    found: list[PlannerReport] = []
    for value in entries.values():
        with suppress(*UNREADABLE):
            if len(value) <= MAX_BYTES:
                found.append(_decoder.decode(value))
    return sorted(found, key=lambda report: (not report.is_leader, report.started_unix, report.planner_id))
