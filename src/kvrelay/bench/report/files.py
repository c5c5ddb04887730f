"""Results on disk, written completely or not at all, and checked when they are read; and the machine's description."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from kvrelay.bench.report.metrics import REPORT_KIND, ServeReport
from kvrelay.config.files import read_file
from kvrelay.core.decoding import UNREADABLE
from kvrelay.errors import InvalidInputError

_T = TypeVar("_T")


def to_json(value: object) -> str:
    """A dataclass as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def write_text(path: Path, text: str) -> None:
    """Write under another name first, so that an interrupted write leaves no partial result. What is no file is
    written to as it is: root may replace even ``/dev/null``, and ``/dev/stdout`` is a link."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_kept = path.is_symlink() or (path.exists() and not path.is_file())
        part = path if is_kept else path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
        if not is_kept:
            os.replace(part, path)
    except OSError as exc:
        raise InvalidInputError(f"cannot write {path}: {exc.strerror}", param="output") from exc


def write_result(folder: Path, name: str, report: object, markdown: str) -> None:
    """``name.json`` and ``name.md``."""
    write_text(folder / f"{name}.json", to_json(report))
    write_text(folder / f"{name}.md", markdown)


def print_result(report: object, text: str, as_json: bool) -> None:
    """The report to standard output: one JSON object, or its text."""
    click.echo(to_json(report) if as_json else text)


def read_kept(path: Path, kind: type[_T]) -> _T | None:
    """What an earlier run has left; None if it has left nothing of this kind."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *UNREADABLE):
        return None


def read_serve_report(path: Path) -> ServeReport:
    """A report that ``bench serve`` wrote. Raises InvalidInputError for a file that is not one."""
    try:
        report = msgspec.json.decode(read_file(path), type=ServeReport)
    except OSError as exc:
        raise InvalidInputError(f"cannot read {path}: {exc.strerror}") from exc
    except UNREADABLE as exc:
        raise InvalidInputError(f"{path} is not a result of this benchmark: {exc}") from exc
    if report.kind != REPORT_KIND:
        raise InvalidInputError(f"{path} is a {report.kind} report, not {REPORT_KIND}")
    return report
