"""The pages name what exists: other pages and their headings, files and classes of the source, commands, flags and
metrics. A default that a page states is the flag's."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from benchmarks.__main__ import benchmarks

from kvrelay.cli.main import cli
from kvrelay.marks import waterfall

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "GLOSSARY", "CONTRIBUTING", "CHANGELOG")),
]
SCRIPTS = [path for room in ("tests", "tools", "benchmarks", "src") for path in sorted((ROOT / room).rglob("*.py"))]
DEPLOYED = sorted((ROOT / "deploy").rglob("*"))
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


PROGRAMS: dict[str, click.Command] = {"kvrelay": cli, "python -m benchmarks": benchmarks}


def commands_of(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The program and the words of each of its commands, in blocks without what a shell does beside it, and inline."""
    text = re.sub(r"\\\n\s*", "", text_of(page))
    blocks = "\n".join(
        (*re.findall(r"^```[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL), *re.findall(r"^    .*", text, re.M))
    )
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose_of(page))]
    for name in PROGRAMS:
        start = rf"(?:\w+=\S+ )*(?:\S*/)?{name} "
        lines = re.findall(rf"^\s*{start}((?!is ).*)", blocks, re.MULTILINE)
        lines += [found[1] for code in inline if (found := re.match(rf"{start}(.*)", code))]
        for line in lines:
            broken = line.count("'") % 2 or line.count('"') % 2
            yield name, re.split(r" [|;&]| #", f"{line} ")[0].split() if broken else shlex.split(line, comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_flags_exist(page: Path) -> None:
    for program, words in commands_of(page):
        command = PROGRAMS[program]
        known = {"--help", *flags_here(command)}
        for word in words:
            if not isinstance(command, click.Group) or not re.fullmatch(r"[a-z][a-z0-9-]+", word):
                continue
            if child := command.get_command(click.Context(command), word):
                command = child
                known |= flags_here(command)
            else:
                assert word == "info", words  # the value of --log-level
        assert {word.split("=")[0] for word in words if word.startswith("--") and " " not in word} <= known, words


def flags_here(command: click.Command) -> set[str]:
    return {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page: Path) -> None:
    paths = [path.as_posix() for path in (*SCRIPTS, *DEPLOYED)]
    for name in re.findall(r"`(\w+/[\w/-]+\.(?:py|yaml|json|conf))[ `]", text_of(page)):
        assert any(path.endswith(f"/{name}") for path in paths), name
    for module in re.findall(r"-m ((?:tests|benchmarks|kvrelay)\.[a-z_.]*[a-z_])", text_of(page)):
        place = f"/{module.replace('.', '/')}"
        assert any(path.endswith((f"{place}.py", f"{place}/__main__.py")) for path in paths), module


@pytest.fixture(scope="module")
def classes() -> dict[str, tuple[set[str], set[str]]]:
    """Per class of the source the names in its body, and its bases; of several with one name, all."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for path in SCRIPTS:
        if path.is_relative_to(ROOT / "src"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    names, bases = found.setdefault(node.name, (set(), set()))
                    parts = [
                        getattr(part, field, None) for part in ast.walk(node) for field in ("id", "attr", "name", "arg")
                    ]
                    names.update(part for part in parts if isinstance(part, str))
                    bases.update(re.findall(r"\w+", " ".join(map(ast.unparse, node.bases))))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_classes_exist(page: Path, classes: dict[str, tuple[set[str], set[str]]]) -> None:
    def has(name: str, attribute: str) -> bool:
        names, bases = classes.get(name, (set(), set()))
        return attribute in names or any(has(base, attribute) for base in bases - {name})

    for name, attribute in re.findall(r"\b([A-Z][a-z]+\w*)\.([a-z_]\w*)", text_of(page)):
        assert has(name, attribute), f"{name}.{attribute}"
    if page.name in ("architecture.md", "extending.md", "routing.md", "cost-model.md", "GLOSSARY.md"):
        assert set(re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", text_of(page))) <= classes.keys()


FACTORS = {"MiB": 2**20, "GiB": 2**30, "days": 86400}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_defaults_are_the_flags(page: Path) -> None:
    """As in ``--flag` (64 MiB)`` or ``--flag` (default 16)``. ``test_flag_table.py`` holds the table to the flags."""
    rows = re.findall(r"^- `(--[a-z0-9-]+)`[^(]*\(`([^`]*)`", text_of(ROOT / "docs" / "flags.md"), flags=re.MULTILINE)
    defaults = {flag: {default, f"{default}".removesuffix(".0")} for flag, default in rows}
    stated = r"`(--[a-z0-9-]+)`\s(?:bytes\s)?\((?:default:?\s)?([\d.,]+)(?:\s(s|MiB|GiB|days))?[;):]"
    for flag, number, unit in re.findall(stated, text_of(page)):
        if flag in defaults:
            value = f"{float(number.replace(',', '')) * FACTORS.get(unit, 1):.15g}"
            assert defaults[flag] & {value, f"{number}{unit}"}, (flag, number, unit)


REFERENCE = ROOT / "docs" / "operations-reference.md"


@pytest.mark.parametrize("page", [page for page in PAGES if page != REFERENCE], ids=lambda page: page.name)
def test_metrics_are_those_of_the_reference(page: Path) -> None:
    """``tests/worker/test_metrics.py`` holds the reference to what workers and frontends tell."""
    known = set(re.findall(r"\b[a-z][a-z0-9_]+\b", text_of(REFERENCE)))
    named = re.findall(r"`((?:kvrelay_)?[a-z][a-z0-9_]+_(?:total|seconds|ratio))\b", prose_of(page))
    for name in {re.sub(r"^kvrelay_(worker_)?", "", name) for name in named}:
        assert name in known or name.startswith("kv_tier_"), name


def test_the_spans_of_a_waterfall_are_explained() -> None:
    tables = (waterfall.AT_FRONTEND, waterfall.AT_DECODE, waterfall.AT_PREFILL)
    spans = {span for table in tables for after in table.values() for span in after.values()}
    assert spans <= set(re.findall(r"`([a-z_]+)`", text_of(ROOT / "docs" / "where-time-goes.md")))


def test_the_glossary_is_sorted() -> None:
    terms = re.findall(r"^\| ([^|]+) \|", text_of(ROOT / "GLOSSARY.md"), flags=re.MULTILINE)[1:]
    assert terms == sorted(terms, key=str.lower)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_whole(page: Path) -> None:
    """A row after an empty line begins no table of its own."""
    for table in re.findall(r"(?:^\|.*\n)+", prose_of(page), flags=re.MULTILINE):
        rows = table.splitlines()
        assert len(rows) > 2, rows[0]
        assert re.fullmatch(r"(\|---)+\|", rows[1]), rows[0]
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1, rows[0]
