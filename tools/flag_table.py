"""Writes docs/flags.md: every flag of ``serve``, ``worker`` and ``frontend`` with its default and unit.
``--check`` fails if the page is not current."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import Field, fields
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
UNITS = {"tokens_per_minute": "tokens per minute", "_per_minute": "per minute", "_ms": "milliseconds", "_s": "seconds"}
UNITS |= {"kv_cache_memory": "size", "vllm_staging": "size", "block_size": "tokens", "queue_size": "prefills"}
UNITS |= {"_bytes": "bytes", "buffer_size": "bytes", "_tokens": "tokens", "_len": "tokens", "_length": "tokens"}
UNITS |= {"port": "port", "num_blocks": "blocks", "kv_watermark": "KV pools", "_weight": "prefill tokens"}
"""By the end of a name; the first that fits."""
HEAD = """# Flags

<!-- Written by tools/flag_table.py: do not edit. -->

Every flag of `kvrelay serve`, `kvrelay worker` and `kvrelay frontend`. `--help` lists those of every day, `--help-all`
all. A setting of a section can also stand in the YAML file of `--config`, under its section, or in the environment as
`KVRELAY_NAME` (with `_` for `-` in both). Flags win over the environment, and that over the file.
The file's values are read as the texts of flags, also `0123` and `off`; an empty one counts as not given.
`--dp-rank` and `--dp-address` are for `kvrelay worker` only.
"""


def unit(name: str, hint: Any) -> str:
    """What a value is counted in, or which there are."""
    if hint is bool:
        return "yes or no"
    if get_origin(hint) is Literal:
        return ", ".join(map(str, get_args(hint)))
    return next((word for end, word in UNITS.items() if name.endswith(end)), "text" if hint is str else "number")


def bounds(item: Field[Any]) -> str:
    """The permitted range of a setting."""
    low, high = item.metadata.get("low"), item.metadata.get("high")
    if low is None:
        return ""
    return f", at least {low:g}" if high is None else f", {low:g} to {high:g}"


def row(*cells: str) -> str:
    """One line of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def shown(value: object) -> str:
    """A default, as one would write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"`{value}`" if isinstance(value, (str, int, float)) and value != "" else "none"


def page() -> Iterator[str]:
    """The lines of the page."""
    yield HEAD
    for name, classes in COMMANDS.items():
        sections = ", ".join(f"[{cls.section}](#{cls.section})" for cls in classes)
        yield f"## kvrelay {name}\n\nBeside the settings of the sections {sections}:\n"
        yield from own_options(name)
        yield ""
    for cls in dict.fromkeys(cls for classes in COMMANDS.values() for cls in classes):
        yield f"## {cls.section}\n\n{(cls.__doc__ or '').splitlines()[0]}\n"
        yield row("flag", "default", "unit or values", "meaning") + "\n|---|---|---|---|"
        hints = get_type_hints(cls)
        for item in fields(cls):
            flag = "--" + item.name.replace("_", "-")
            flags = f"`{flag}`, `--no-{flag[2:]}`" if hints[item.name] is bool else f"`{flag}`"
            values = unit(item.name, hints[item.name]) + bounds(item)
            yield row(flags, shown(item.default), values, item.metadata["help"])
        yield ""


def own_options(name: str) -> Iterator[str]:
    """The options of a command that are no settings."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    yield row("flag", "default", "unit or values", "meaning") + "\n|---|---|---|---|"
    for param in command.params:
        if not isinstance(param, click.Option) or isinstance(param, GroupedOption) or param.hidden:
            continue
        about, _, told = (param.help or "").partition("  [default: ")
        kind = param.type
        values = "seconds" if isinstance(kind, click.FloatRange) else "text"
        if isinstance(kind, click.Choice):
            values = ", ".join(kind.choices)
        elif isinstance(kind, click.IntRange):
            values = f"{kind.min} to {kind.max}"
        elif param.is_flag:
            values = "-"
        yield row(f"`{param.opts[0]}`", f"`{told.rstrip(']')}`" if told else shown(param.default), values, about)


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
