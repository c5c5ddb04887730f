"""Every decision with what it was made from, a JSON object a line; and planning a log again.

A log has two files of at most MAX_BYTES: PATH and, before it, PATH.1. Only their user can read them. A hold that says
the same as the one before is written once a minute.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvrelay.errors import InvalidInputError
from kvrelay.planner.base import Action, Demand, FleetView, Hold, Objectives, PlannerState
from kvrelay.planner.plan import plan

MAX_BYTES = 8 * 1024 * 1024
REPEAT_S = 60.0


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """``plan(fleet, demand, objectives, state)`` gave ``actions``. ``is_carried_out``: mode act, and not paused."""

    unix_s: float
    fleet: FleetView
    demand: Demand
    objectives: Objectives
    state: PlannerState
    actions: tuple[Action, ...]
    is_carried_out: bool


class DecisionLog:
    """``path`` None: nothing is written. A full disk costs the log, not the planner: ``error`` tells."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._said = ""
        self._said_s = 0.0
        self.error = ""

    def add(self, decision: Decision) -> None:
        """Write it, unless it repeats the last hold."""
        action = decision.actions[0]
        said = action.reason.partition(": ")[0].partition(" since ")[0] if isinstance(action, Hold) else ""
        if self._path is None or (said and said == self._said and decision.unix_s - self._said_s < REPEAT_S):
            return
        self._said, self._said_s = said, decision.unix_s
        try:
            self._write(self._path, msgspec.json.encode(decision) + b"\n")
            self.error = ""
        except OSError as exc:
            self.error = f"cannot write {self._path}: {exc.strerror}"

    def _write(self, path: Path, line: bytes) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size + len(line) > MAX_BYTES:
            path.replace(path.with_name(path.name + ".1"))
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(line)


def read_log(path: Path) -> Iterator[Decision]:
    """The decisions of one file. Raises InvalidInputError, which names the line."""
    decoder = msgspec.json.Decoder(Decision)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as exc:
                    raise InvalidInputError(f"{path}, line {number}: no decision of a planner: {exc}") from exc
    except OSError as exc:
        raise InvalidInputError(f"{path}: {exc.strerror}") from exc


def replay(decision: Decision) -> tuple[Action, ...]:
    """What this release plans from the same inputs."""
    actions, _ = plan(decision.fleet, decision.demand, decision.objectives, decision.state)
    return actions
