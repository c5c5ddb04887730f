"""The journal of an evaluation: one JSON line for each case that is done, so that an interrupted run can go on.

    {"settings": {...}, "began": "..."}       what all cases depend on: options, machine, versions
    {"key": "chunks / 128 / 1", "result": {...}}

Lines are appended and flushed to disk one by one. A last line that was torn by a crash is dropped; its case is taken
again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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


class _Entry(msgspec.Struct, frozen=True):
    key: str
    result: Any


class Journal:
    """Results by key. ``began``: UTC, ISO 8601, of the run that this one goes on from."""

    def __init__(self, folder: Path, settings: dict[str, str], *, resumes: bool) -> None:
        """``resumes``: go on from what is in the folder. Raises InvalidInputError if that cannot be, or if a run that
        is not complete would be lost."""
        self._path = folder / NAME
        self._results: dict[str, Any] = {}
        head, earlier = _read(self._path)
        if resumes:
            if head is None:
                raise InvalidInputError(f"--resume: {folder} has no evaluation; leave out --resume", param="resume")
            _check_same(head.settings, settings, folder)
            self._results = earlier
        elif earlier and END not in earlier:
            raise InvalidInputError(
                f"{folder} has an evaluation that is not complete; go on with --resume, or give another --output-dir",
                param="output_dir",
            )
        self.began = head.began if resumes and head is not None else datetime.now(UTC).isoformat(timespec="seconds")
        # Written anew, so that nothing follows a torn line.
        entries = [_Entry(key, result) for key, result in self._results.items() if key != END]
        self._write("w", _Head(settings, self.began), *entries)

    def __contains__(self, key: str) -> bool:
        return key in self._results

    def __getitem__(self, key: str) -> Any:
        return self._results[key]

    def __len__(self) -> int:
        return len(self._results)

    def add(self, key: str, result: Any) -> None:
        """On disk when this returns."""
        self._results[key] = msgspec.to_builtins(result, enc_hook=str)
        self._write("a", _Entry(key, self._results[key]))

    def take(self, key: str, make: Callable[[], Any]) -> Any:
        """The result of this case, made only once."""
        if key not in self._results:
            self.add(key, make())
        return self._results[key]

    def _write(self, mode: str, *lines: object) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open(f"{mode}b") as file:
                file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as exc:
            raise InvalidInputError(f"cannot write {self._path}: {exc.strerror}", param="output_dir") from exc


def _read(path: Path) -> tuple[_Head | None, dict[str, Any]]:
    """The head and the results; None and nothing without a journal."""
    try:
        head, *lines = path.read_bytes().splitlines()
        found = msgspec.json.decode(head, type=_Head)
    except (OSError, *UNREADABLE):
        return None, {}
    results: dict[str, Any] = {}
    for line in lines:
        try:
            entry = msgspec.json.decode(line, type=_Entry)
        except UNREADABLE:
            break
        results[entry.key] = entry.result
    return found, results


def _check_same(earlier: dict[str, str], settings: dict[str, str], folder: Path) -> None:
    for name in sorted(set(earlier) | set(settings)):
        before, now = earlier.get(name, "none"), settings.get(name, "none")
        if before != now:
            raise InvalidInputError(
                f"--resume: the evaluation in {folder} has {name} {before!r}, this one {now!r}; give the same, or "
                "another --output-dir",
                param="resume",
            )
