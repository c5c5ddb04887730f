"""The journal of an evaluation: one JSON line for each case that is done, so that an interrupted run can go on.

    {"settings": {...}, "began": "..."}       what all cases depend on: options, machine, versions
    {"key": "chunks / 128 / 1", "result": {...}}

Lines are appended and flushed to disk one by one. A last line that was torn by a crash is dropped; its case is taken
again, and so is one that failed. Then what was computed from it (``made_from``) is computed again, too, if it changed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.core.decoding import UNREADABLE
from kvrelay.errors import InvalidInputError

NAME = "cases.jsonl"
END = "end"
"""Key of the last line of an evaluation that is complete."""


class _Head(msgspec.Struct, frozen=True):
    settings: dict[str, str]
    began: str


class _Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """``made_from``: digest of what the result was computed from; empty for a measured one."""

    key: str
    result: Any
    made_from: str = ""

    @property
    def is_failed(self) -> bool:
        return isinstance(self.result, dict) and bool(self.result.get("error"))


class Journal:
    """Results by key. ``began``: UTC, ISO 8601, of the run that this one goes on from. ``num_failed``: cases that
    failed there and are taken again."""

    def __init__(self, folder: Path, settings: dict[str, str], *, resumes: bool) -> None:
        """``resumes``: go on from what is in the folder. Raises InvalidInputError if that cannot be, or if a run that
        is not complete would be lost."""
        self._path = folder / NAME
        self._entries: dict[str, _Entry] = {}
        self.num_failed = 0
        head, earlier = _read(self._path)
        if resumes:
            if head is None:
                raise InvalidInputError(f"--resume: {folder} has no evaluation; leave out --resume", param="resume")
            _check_same(head.settings, settings, folder)
            self._entries = {key: entry for key, entry in earlier.items() if key != END and not entry.is_failed}
            self.num_failed = sum(entry.is_failed for entry in earlier.values())
        elif earlier and END not in earlier:
            raise InvalidInputError(
                f"{folder} has an evaluation that is not complete; go on with --resume, or give another --output-dir",
                param="output_dir",
            )
        self.began = head.began if resumes and head is not None else datetime.now(UTC).isoformat(timespec="seconds")
        # Written anew, so that nothing follows a torn line.
        self._write("w", _Head(settings, self.began), *self._entries.values())

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __getitem__(self, key: str) -> Any:
        return self._entries[key].result

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: str, result: Any, made_from: str = "") -> None:
        """On disk when this returns."""
        self._entries[key] = _Entry(key, msgspec.to_builtins(result, enc_hook=str), made_from)
        self._write("a", self._entries[key])

    def take(self, key: str, make: Callable[[], Any], made_from: object = None) -> Any:
        """The result of this case, made only once, and again if it was made from something else."""
        digest = "" if made_from is None else hashlib.sha256(msgspec.json.encode(made_from, enc_hook=str)).hexdigest()
        if key not in self._entries or self._entries[key].made_from != digest:
            self.add(key, make(), digest)
        return self[key]

    def _write(self, mode: str, *lines: object) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open(f"{mode}b") as file:
                file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as exc:
            raise InvalidInputError(f"cannot write {self._path}: {exc.strerror}", param="output_dir") from exc


def _read(path: Path) -> tuple[_Head | None, dict[str, _Entry]]:
    """The head and the entries, the last one of each key; None and nothing without a journal."""
    try:
        head, *lines = path.read_bytes().splitlines()
        found = msgspec.json.decode(head, type=_Head)
    except (OSError, *UNREADABLE):
        return None, {}
    entries: dict[str, _Entry] = {}
    for line in lines:
        try:
            entry = msgspec.json.decode(line, type=_Entry)
        except UNREADABLE:
            break
        entries[entry.key] = entry
    return found, entries


def _check_same(earlier: dict[str, str], settings: dict[str, str], folder: Path) -> None:
    for name in sorted(set(earlier) | set(settings)):
        before, now = earlier.get(name, "none"), settings.get(name, "none")
        if before != now:
            raise InvalidInputError(
                f"--resume: the evaluation in {folder} has {name} {before!r}, this one {now!r}; give the same, or "
                "another --output-dir",
                param="resume",
            )
