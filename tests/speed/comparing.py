"""Stored counts against those of today. More work needs a reason in the commit that stores it; less is stored, too."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("counters.json")
COMMAND = "python -m tests.speed --store"
TOLERANCE = 0.05
OF_THIS_PYTHON = {"opcodes", "calls"}
"""Another version of Python has other opcodes, and calls other functions for the same code."""

Values = Mapping[str, Mapping[str, float]]
"""By scenario, then by counter; zeros are left out."""


class Stored(NamedTuple):
    python: str
    values: Values


def python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def stored(file: Path = FILE) -> Stored:
    content = json.loads(file.read_text())
    return Stored(content["python"], content["counters"])


def store(values: Values, file: Path = FILE) -> None:
    file.write_text(json.dumps({"python": python_version(), "counters": values}, indent=1) + "\n")


def environment() -> dict[str, str]:
    """Of the process that counts: sets of strings have the same order in every run."""
    return {**os.environ, "PYTHONHASHSEED": "0"}


def changes(before: Stored, now: Values, python: str | None = None) -> list[str]:
    """A line for each counter that differs by more than 5 %."""
    same_python = before.python == (python or python_version())
    lines = []
    for scenario in sorted({*before.values, *now}):
        then, today = before.values.get(scenario, {}), now.get(scenario, {})
        for counter in sorted({*then, *today}):
            if same_python or counter not in OF_THIS_PYTHON:
                line = change(f"{scenario}: {counter}", then.get(counter, 0), today.get(counter, 0))
                lines += [line] if line else []
    return lines


def change(name: str, before: float, now: float) -> str | None:
    if abs(now - before) <= TOLERANCE * before:
        return None
    share = f"{(now - before) / before:+.1%}" if before else "new"
    advice = (
        f"do less, or store it ({COMMAND}) and say why in the commit"
        if now > before
        else f"store what was saved ({COMMAND})"
    )
    return f"{name} was {before:,.8g}, is {now:,.8g} ({share}): {advice}"
