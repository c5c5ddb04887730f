"""Prints what the tests of faults measured, from pytest's JUnit file: ``python tools/fault_table.py FILE``.

The figures belong into docs/reliability.md, from a run on an idle machine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

COLUMNS = ("longest_pause_s", "whole_again_s")


def rows_of(report: Path) -> list[tuple[str, ...]]:
    """Test, seconds that it took, and its figures ("-" where it has none); only tests that measured something."""
    rows = []
    for case in ElementTree.parse(report).iter("testcase"):
        figures = {item.get("name", ""): item.get("value", "") for item in case.iter("property")}
        if any(column in figures for column in COLUMNS):
            rows.append((case.get("name", ""), case.get("time", ""), *(figures.get(column, "-") for column in COLUMNS)))
    return rows


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: fault_table.py JUNIT_FILE", file=sys.stderr)
        return 2
    print(f"| test | took, s | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}")
    for row in rows_of(Path(arguments[0])):
        print(f"| {' | '.join(row)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
