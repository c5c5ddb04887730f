"""Results on disk: written whole or not at all, read back with a check of what they are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from kvrelay.bench.report.metrics import REPORT_KIND, ServeReport
from kvrelay.errors import InvalidInputError

_T = TypeVar("_T")


def to_json(value: object) -> str:
    """A dataclass as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def write_text(path: Path, text: str) -> None:
    """Write under another name first, so that an interrupted write leaves no half of a result."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError as exc:
        raise InvalidInputError(f"cannot write {path}: {exc.strerror}", param="output") from exc


def read_json(path: Path, kind: type[_T]) -> _T:
    """Read a result back. Raises InvalidInputError for a file that is not one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as exc:
        raise InvalidInputError(f"cannot read {path}: {exc.strerror}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidInputError(f"{path} is not a result of this benchmark: {exc}") from exc


def read_serve_report(path: Path) -> ServeReport:
    """A report that ``bench serve`` wrote."""
    report = read_json(path, ServeReport)
    if report.kind != REPORT_KIND:
        raise InvalidInputError(f"{path} is a {report.kind} report, not {REPORT_KIND}")
    return report
