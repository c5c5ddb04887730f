"""The pages name what exists: other pages and their headings, files of the source, flags, metrics."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvrelay.cli.main import cli

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "GLOSSARY", "CONTRIBUTING", "CHANGELOG")),
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


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words of each ``kvrelay ...`` in its blocks, without what a shell does beside it."""
    text = re.sub(r"\\\n\s*", "", text_of(page))
    blocks = "\n".join(
        (*re.findall(r"^```[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL), *re.findall(r"^    .*", text, re.M))
    )
    for line in re.findall(r"^\s*(?:\w+=\S+ )*kvrelay ((?!is ).*)", blocks, re.MULTILINE):
        yield re.split(r" [|;&]| #", f"{line} ")[0].split() if line.count("'") % 2 else shlex.split(line, comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_their_flags(page: Path) -> None:
    for words in commands_of(page):
        command: click.Command = cli
        for word in words:
            if isinstance(command, click.Group) and (child := command.get_command(click.Context(command), word)):
                command = child
        known = {
            "--help",
            *(flag for param in (*cli.params, *command.params) for flag in (*param.opts, *param.secondary_opts)),
        }
        assert {word.split("=")[0] for word in words if word.startswith("--") and " " not in word} <= known, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page: Path) -> None:
    paths = [path.as_posix() for path in SCRIPTS]
    for name in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", text_of(page)):
        assert any(path.endswith(f"/{name}") for path in paths), name
