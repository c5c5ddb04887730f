"""The pages name what exists: other pages and their headings, files of the source, flags, metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvrelay.cli.main import cli

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "GLOSSARY", "CONTRIBUTING")),
]
SCRIPTS = [path for room in ("tests", "tools", "benchmarks", "src") for path in sorted((ROOT / room).rglob("*.py"))]
FOREIGN = {
    "--cpus",
    "--junitxml",
    "--replicas",
    "--enable-shared",
    "--enable-optimizations",
    "--keys",
    "--kv-events-config",
}
"""Flags of other programs, in running text."""


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose_of(page: Path) -> str:
    """Without fenced blocks."""
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", prose_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def flags_of(command: click.Command) -> Iterator[str]:
    for param in command.params:
        yield from (*param.opts, *param.secondary_opts)
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            child = command.get_command(ctx, name)
            assert child is not None
            yield from flags_of(child)


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Of all commands, of scripts, and of the servers that scripts start."""
    scripts = "\n".join(path.read_text(encoding="utf-8") for path in SCRIPTS if path != Path(__file__))
    return {*flags_of(cli), *re.findall(r"""(?<=["' ])--[a-z][a-z0-9-]+""", scripts), *FOREIGN}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_exist(page: Path, flags: set[str]) -> None:
    prose = re.sub(r"^    .*$", "", prose_of(page), flags=re.MULTILINE)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", prose)) <= flags


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page: Path) -> None:
    paths = [path.as_posix() for path in SCRIPTS]
    for name in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", text_of(page)):
        assert any(path.endswith(f"/{name}") for path in paths), name
