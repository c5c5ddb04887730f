"""Writes docs/flags.md: every flag of ``serve``, ``worker`` and ``frontend`` with its default and unit.
``--check`` fails if the page is not current."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import Field, fields
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from kvrelay.cli.help import GroupedOption
from kvrelay.cli.main import cli
from kvrelay.cli.processes import FRONTEND_SETTINGS, WORKER_SETTINGS
from kvrelay.cli.serve import SERVE_SETTINGS
from kvrelay.config.settings import Settings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"
COMMANDS: dict[str, tuple[type[Settings], ...]] = {
    "serve": SERVE_SETTINGS,
    "worker": WORKER_SETTINGS,
    "frontend": FRONTEND_SETTINGS,
}
ONLY = {
    "dp_rank": "worker only: ",
    "dp_address": "worker only: ",
    "metrics_port": "not frontend: ",
    "metrics_host": "not frontend: ",
}
"""Of settings that not all commands of their section have."""
HEAD = """# Flags

<!-- Written by tools/flag_table.py: do not edit. -->

The flags of `kvrelay serve`, `worker` and `frontend`, by section. `--help` lists those of every day, `--help-all` all.
A setting of a section can also stand in the YAML file of `--config`, under its section, or in the environment as
`KVRELAY_NAME` (with `_` for `-`). Flags win over the environment, and that over the file, whose values are read as the
texts of flags, also `0123` and `off`; an empty one counts as not given.

In brackets: the default, then the other values or the range.
"""


def values(item: Field[Any], hint: Any) -> str:
    """The default of a setting, and what else it may be."""
    others = [str(other) for other in get_args(hint) if other != item.default] if get_origin(hint) is Literal else []
    return ", ".join((shown(item.default), *others)) + bounds(item.metadata.get("low"), item.metadata.get("high"))


def bounds(low: float | None, high: float | None) -> str:
    """The permitted range of a number; that it is not negative goes without saying."""
    if high is not None:
        return f", {low or 0:g} to {high:g}"
    return f", at least {low:g}" if low else ""


def row(flags: str, allowed: str, about: str) -> str:
    """One item of the list. A default that is nothing is not said twice."""
    return f"- {flags} ({allowed}): {re.sub(r'[;.] (default|empty): none[.]$', '.', about, flags=re.IGNORECASE)}"


def shown(value: object) -> str:
    """A default, as one would write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"`{value}`" if isinstance(value, (str, int, float)) and value != "" else "none"


def page() -> Iterator[str]:
    """The lines of the page."""
    yield HEAD
    commands: dict[str, list[str]] = {}
    for name in COMMANDS:
        for line in own_options(name):
            commands.setdefault(line, []).append(name)
    for names, lines in groupby(
        sorted(commands, key=lambda line: len(commands[line])), key=lambda line: commands[line]
    ):
        yield f"## kvrelay {', '.join(names)}\n\n" + "\n".join(lines) + "\n"
    for cls in dict.fromkeys(cls for classes in COMMANDS.values() for cls in classes):
        names = [name for name, classes in COMMANDS.items() if cls in classes]
        yield f"## {cls.section}\n\n{(cls.__doc__ or '').splitlines()[0]} Of {', '.join(names)}.\n"
        hints = get_type_hints(cls)
        for item in fields(cls):
            flag = "--" + item.name.replace("_", "-")
            flags = f"`{flag}`, `--no-{flag[2:]}`" if hints[item.name] is bool else f"`{flag}`"
            only = ONLY.get(item.name, "")
            yield row(flags, values(item, hints[item.name]), only + item.metadata["help"])
        yield ""


def own_options(name: str) -> Iterator[str]:
    """The options of a command that are no settings."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    for param in command.params:
        if not isinstance(param, click.Option) or isinstance(param, GroupedOption) or param.hidden:
            continue
        about, _, told = (param.help or "").partition("  [default: ")
        default, kind, ends = f"`{told.rstrip(']')}`" if told else shown(param.default), param.type, ""
        if isinstance(kind, click.Choice):
            default = ", ".join((default, *(choice for choice in kind.choices if choice != param.default)))
        elif isinstance(kind, click.IntRange):
            ends = bounds(kind.min, kind.max)
        yield row(f"`{param.opts[0]}`", default + ends, about)


def main(words: list[str] | None = None) -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = "\n".join(page()).rstrip("\n") + "\n"
    if not parser.parse_args(words).check:
        PAGE.write_text(text, encoding="utf-8")
    elif text != PAGE.read_text(encoding="utf-8"):
        print("docs/flags.md is not current: run tools/flag_table.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
