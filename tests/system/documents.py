"""The shell commands and files of a Markdown page, as a reader would use them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class File:
    """A block with a file's name behind its language."""

    name: str
    text: str


@dataclass(frozen=True)
class Command:
    """One line of a ``sh`` block."""

    line: str

    def words(self, variables: dict[str, str]) -> list[str]:
        """The line as a shell would cut it, with ``$NAME`` replaced."""
        known = re.sub(r"\$([A-Z_]+)", lambda found: variables[found[1]], self.line)
        return shlex.split(known)


def steps_of(page: Path, replace: dict[str, str]) -> Iterator[File | Command]:
    """The page's files and commands in their order, with pieces of text replaced throughout."""
    text = page.read_text(encoding="utf-8")
    for old, new in replace.items():
        text = text.replace(old, new)
    for language, name, body in BLOCK.findall(text):
        if name:
            yield File(name, body)
        elif language == "sh":
            yield from (Command(line) for line in body.splitlines() if line and not line.startswith("#"))
