"""What a planner process says of itself, in discovery under its lease: for ``kvrelay plan``, the page, metrics, and for
the other planners, which find out here who decides."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvrelay.core.decoding import UNREADABLE
from kvrelay.planner.base import Action

MAX_BYTES = 65536
PAUSED = "planner.paused"
"""Setting: true while planners only suggest."""
HELD = "planner.held."
"""Settings, one for each worker whose role was set by hand; ``planner.held.count``: nothing is started or stopped."""
COUNT = "count"


class PlannerReport(msgspec.Struct, frozen=True, kw_only=True):
    """``is_leader``: this one decides. ``actions``: its last plan, of ``unix_s``. ``held``: workers (or ``count``) that
    are left alone. ``shape``: of the fleet, e.g. 2P2D. ``problem``: why it decides nothing; empty: it does.
    ``can_start``: it starts a worker if requests wait for one. ``num_changes``: actions that it
    has carried out since its start."""

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


_decoder = msgspec.json.Decoder(PlannerReport)


def read_reports(entries: Mapping[str, bytes]) -> list[PlannerReport]:
    """Of all planners in discovery, the one that decides first. Unreadable ones are left out."""
    found = []
    for value in entries.values():
        try:
            if len(value) <= MAX_BYTES:
                found.append(_decoder.decode(value))
        except UNREADABLE:
            continue
    return sorted(found, key=lambda report: (report.started_unix, report.planner_id))
