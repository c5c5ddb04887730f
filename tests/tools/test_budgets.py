"""Budgets of size: code is counted, explanations are not; every room has a budget that is neither broken nor idle."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import budgets

SOURCE = '''"""A module.

With two paragraphs.
"""

# A comment.
from os import (
    path,  # and another one
)

LIMIT = 3
"""What LIMIT means."""


def text() -> str:
    """Says something."""

    return """two
    lines"""
'''


def test_code_counts_and_explanations_do_not() -> None:
    assert budgets.lines_of_code(SOURCE) == len(
        ["from os import (", "path", ")", "LIMIT = 3", "def text", 'return """two', 'lines"""']
    )
    assert budgets.lines_of_code('"""Only a docstring."""\n') == 0


class Repository:
    """``src/kvrelay/room`` has 100 lines, half of them in a folder inside; ``deploy`` has 5,000 bytes of data."""

    def __init__(self, root: Path) -> None:
        self.root = root
        subprocess.run(["git", "init", "-q", str(root)], check=True)
        self.write("src/kvrelay/room/a.py", "x = 1\n" * 50)
        self.write("src/kvrelay/room/inner/b.py", "x = 1\n\n# why\n" * 50)
        self.write("src/kvrelay/room/typed", "")
        self.write("deploy/data.json", "x" * 5000)
        self.write("tests/test_a.py", "x = 1\n" * 1000)
        self.write("docs/a.md", "x" * 10_000)
        self.write("setup.py", "x = 1\n" * 1000)

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def check(self, lines: str, data: str = '"deploy" = 5000') -> int:
        """The exit code of the tool."""
        self.write("pyproject.toml", f"[tool.kvrelay.budgets.lines]\n{lines}\n[tool.kvrelay.budgets.bytes]\n{data}\n")
        return budgets.main(["--root", str(self.root)])


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


@pytest.mark.parametrize(
    "lines",
    ['"src/kvrelay/room" = 100', '"src/kvrelay/room" = 120', '"src/kvrelay/room" = 100\n"src/kvrelay/room/inner" = 50'],
)
def test_a_budget_that_is_kept_and_used(repository: Repository, lines: str) -> None:
    assert repository.check(lines) == 0


@pytest.mark.parametrize(
    ("lines", "data", "message"),
    [
        ('"src/kvrelay/room" = 99', '"deploy" = 5000', "src/kvrelay/room: 100 lines, budget 99; make it smaller"),
        ('"src/kvrelay/room" = 121', '"deploy" = 5000', "src/kvrelay/room: 100 lines, budget 121; lower"),
        ("", '"deploy" = 5000', "src/kvrelay/room: 100 lines, and no budget"),
        ('"src/kvrelay" = 100', '"deploy" = 5000', "src/kvrelay/room: 100 lines, and no budget"),
        ('"src/kvrelay/room" = 100\n"src/gone" = 1', '"deploy" = 5000', "src/gone: has a budget and no lines"),
        ('"src/kvrelay/room" = 100', "", "deploy: 5,000 bytes, and no budget"),
        ('"src/kvrelay/room" = 100', '"deploy" = 4999', "deploy: 5,000 bytes, budget 4,999; make it smaller"),
        ('"src/kvrelay/room" = 100', '"deploy" = 9000', "deploy: 5,000 bytes, budget 9,000; lower"),
    ],
)
def test_one_that_is_broken_idle_or_missing(
    repository: Repository, lines: str, data: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert repository.check(lines, data) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"budget: {message}")
    assert errors.count("\n") == 1


def test_ignored_files_and_deleted_ones_are_not_counted(repository: Repository) -> None:
    repository.write(".gitignore", "build/\n")
    repository.write("build/lib/a.py", "x = 1\n")
    repository.write("tools/gone.py", "x = 1\n")
    subprocess.run(["git", "-C", str(repository.root), "add", "."], check=True)
    (repository.root / "tools/gone.py").unlink()
    assert repository.check('"src/kvrelay/room" = 100') == 0


def test_the_printed_section_is_kept(repository: Repository) -> None:
    repository.check('"src/kvrelay/room/inner" = 1')
    printed = budgets.as_toml(budgets.compare(repository.root))
    assert printed.splitlines() == [
        "[tool.kvrelay.budgets.lines]",
        '"src/kvrelay/room" = 100',
        '"src/kvrelay/room/inner" = 50',
        "[tool.kvrelay.budgets.bytes]",
        '"deploy" = 5000',
    ]
    assert "inner" in budgets.table(budgets.compare(repository.root))
