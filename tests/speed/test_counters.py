"""The work of a step, a request, a chunk, a decision and a hand-off stays what it was; how changes are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from tests.speed import comparing
from tests.speed.comparing import Stored
from tests.speed.counting import PACKAGE, Counts, counting

BEFORE = Stored("3.11", {"step": {"opcodes": 1000, "torch": 100}, "request": {"system": 2}})


@pytest.mark.slow
def test_no_counter_has_changed_by_more_than_5_percent() -> None:
    """In a process of its own: what other tests have imported, warmed and traced does not count."""
    command = [sys.executable, "-m", "tests.speed", "--json"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, env=comparing.environment(), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    changes = comparing.changes(comparing.stored(), json.loads(done.stdout))
    assert not changes, "\n".join(changes)


@pytest.mark.parametrize(
    ("now", "lines"),
    [
        ({"step": {"opcodes": 1050, "torch": 95}, "request": {"system": 2}}, []),
        (
            {"step": {"opcodes": 1051, "torch": 100}, "request": {"system": 2}},
            ["step: opcodes was 1,000, is 1,051 (+5.1%): do less, or store it ("],
        ),
        (
            {"step": {"opcodes": 1000, "torch": 94}, "request": {"system": 3}},
            ["request: system was 2, is 3 (+50.0%): do less", "step: torch was 100, is 94 (-6.0%): store what was"],
        ),
        (
            {"step": {"opcodes": 1000, "torch": 100, "numba": 1}},
            ["request: system was 2, is 0 (-100.0%): store", "step: numba was 0, is 1 (new): do less"],
        ),
    ],
)
def test_a_change_is_told_with_both_values_and_the_command(now: comparing.Values, lines: list[str]) -> None:
    told = comparing.changes(BEFORE, now, "3.11")
    assert [line[: len(start)] for line, start in zip(told, lines, strict=True)] == lines
    assert all(comparing.COMMAND in line for line in told)


def test_another_python_has_other_opcodes() -> None:
    now = {"step": {"opcodes": 2000, "torch": 200}, "request": {"system": 2}}
    assert [line.split()[1] for line in comparing.changes(BEFORE, now, "3.13")] == ["torch"]


def test_what_is_stored_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "counters.json"
    comparing.store(BEFORE.values, file)
    assert comparing.stored(file) == Stored(comparing.python_version(), BEFORE.values)


def of_the_package(source: str) -> Callable[[], None]:
    """A function ``act`` that seems to stand in a file of the package."""
    names: dict[str, Any] = {"os": os, "json": json}
    exec(compile(source, f"{PACKAGE}/invented.py", "exec"), names)
    act: Callable[[], None] = names["act"]
    return act


def work_of(act: Callable[[], None]) -> Counts:
    act()
    with counting() as counts:
        act()
    return counts


def test_the_opcodes_of_the_package_are_counted_and_no_others() -> None:
    act = of_the_package("def act():\n for _ in ' ' * 10: pass\n")
    twice = of_the_package("def act():\n for _ in ' ' * 20: pass\n")
    once = work_of(act)
    assert once["opcodes"] > 10
    assert work_of(twice)["opcodes"] > once["opcodes"] + 10
    assert work_of(lambda: [act() for _ in range(1)].clear()) == once
    assert not work_of(lambda: None)


def test_calls_out_of_the_package_are_counted_and_those_into_the_system_apart() -> None:
    assert work_of(of_the_package("def act():\n len('')\n json.dumps\n")) == Counts(calls=1, opcodes=ANY)
    assert work_of(of_the_package("def act():\n os.getpid()\n")) == Counts(calls=1, system=1, opcodes=ANY)
    outside = work_of(of_the_package("def act():\n json.dumps(1)\n"))
    assert (outside["calls"], outside["system"]) == (1, 0)
    assert not work_of(lambda: os.getpid() and None)


def test_torch_operators_and_numba_functions_are_counted_wherever_they_are_called() -> None:
    import torch
    from numba import njit

    add = njit(lambda left, right: left + right)
    one = torch.ones(3)
    assert work_of(lambda: add(1, 2) and None) == Counts(numba=1)
    assert work_of(lambda: (one + one).sum() and None)["torch"] >= 2
