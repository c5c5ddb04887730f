"""Budgets of size: what each room may take. ``make check`` runs this; ``--table`` prints counts beside budgets.

    python tools/budgets.py [--table | --toml]

A room is a package under ``src/kvrelay``, or another folder at the top (``tools``, ``deploy``). Tests, docs and files
at the top have no budget. Python is counted in lines of code: physical lines that hold a token of code. Blank lines,
comments and docstrings (statements that are only a string) are free, so no one saves on explanations. Everything else
is data and counted in bytes.

``[tool.kvrelay.budgets]`` in ``pyproject.toml`` has the budgets: a path, and what may lie below it. A room must have
one; a folder inside a room may have its own besides. A count above its budget is an error. So is a budget more than 3 %
above its count: lower it, so that what was saved stays saved. ``--toml`` prints the section with today's counts.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

FREE = {"tests", "docs"}
SLACK = 0.03
LEAST_SLACK = {"lines": 20, "bytes": 2048}
ROUNDED_TO = {"lines": 10, "bytes": 100}

NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

Counts = Mapping[str, Mapping[str, int]]
"""By unit (lines, bytes), then by path."""


class Row(NamedTuple):
    path: str
    unit: str
    count: int
    budget: int | None

    def problem(self) -> str | None:
        """What is wrong with this budget, and what to do."""
        what = f"{self.path}: {self.count:,} {self.unit}"
        if self.budget is None:
            return f"{what}, and no budget; give it one in [tool.kvrelay.budgets.{self.unit}]"
        if self.count > self.budget:
            return f"{what}, budget {self.budget:,}; make it smaller, or raise the budget and say why in the commit"
        if not self.count:
            return f"{self.path}: has a budget and no {self.unit}; remove the budget"
        if self.budget > self.count + max(SLACK * self.count, LEAST_SLACK[self.unit]):
            return f"{what}, budget {self.budget:,}; lower the budget, so that what was saved stays saved"
        return None


def lines_of_code(source: str) -> int:
    """Physical lines with a token of code, without statements that are only a string."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


def files(root: Path) -> list[PurePosixPath]:
    """All files of the repository that git does not ignore, those that are not committed yet included."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    paths = (PurePosixPath(name) for name in names if name)
    return [path for path in paths if len(path.parts) > 1 and path.parts[0][0] != "." and (root / path).is_file()]


def room(path: PurePosixPath) -> str:
    """``src/kvrelay/worker`` or ``tools``."""
    folders = path.parts[:-1]
    return "/".join(folders[:3] if folders[0] == "src" else folders[:1])


def counted(root: Path) -> tuple[Counts, Counts]:
    """Counts of every folder, and of every room, each with all that lies below."""
    folders: dict[str, Counter[str]] = {"lines": Counter(), "bytes": Counter()}
    rooms: dict[str, Counter[str]] = {"lines": Counter(), "bytes": Counter()}
    for path in files(root):
        if path.parts[0] in FREE:
            continue
        unit = "lines" if path.suffix == ".py" else "bytes"
        size = lines_of_code((root / path).read_text()) if unit == "lines" else (root / path).stat().st_size
        rooms[unit][room(path)] += size
        for folder in path.parents[:-1]:
            folders[unit][str(folder)] += size
    return folders, rooms


def read_budgets(root: Path) -> Counts:
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    budgets: dict[str, dict[str, int]] = settings["tool"]["kvrelay"]["budgets"]
    return budgets


def compare(root: Path) -> list[Row]:
    """All budgets, and all rooms that lack one."""
    folders, rooms = counted(root)
    budgets = read_budgets(root)
    return [
        Row(path, unit, folders[unit].get(path, 0), budgets.get(unit, {}).get(path))
        for unit in ("lines", "bytes")
        for path in sorted({*budgets.get(unit, {}), *(name for name, size in rooms[unit].items() if size)})
    ]


def table(rows: list[Row]) -> str:
    head = f"{'path':<36}{'unit':<7}{'count':>11}{'budget':>11}{'left':>9}"
    lines = [
        f"{path:<36}{unit:<7}{count:>11,}"
        + (f"{'none':>11}" if budget is None else f"{budget:>11,}{budget - count:>9,}")
        for path, unit, count, budget in rows
    ]
    return "\n".join([head, *lines])


def as_toml(rows: list[Row]) -> str:
    """The section with today's counts, rounded up a little."""
    lines = []
    for unit, step in ROUNDED_TO.items():
        lines.append(f"[tool.kvrelay.budgets.{unit}]")
        lines += [f'"{row.path}" = {-(-row.count // step) * step}' for row in rows if row.unit == unit and row.count]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="The repository.")
    parser.add_argument("--table", action="store_true", help="Print counts and budgets; report no errors.")
    parser.add_argument("--toml", action="store_true", help="Print the section with today's counts.")
    arguments = parser.parse_args(words)
    rows = compare(arguments.root)
    if arguments.table or arguments.toml:
        print(table(rows) if arguments.table else as_toml(rows))
        return 0
    problems = [problem for row in rows if (problem := row.problem())]
    for problem in problems:
        print(f"budget: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
