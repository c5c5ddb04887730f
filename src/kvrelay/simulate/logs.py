"""Logs of one's own as loads: the access log of a frontend, and files with columns or fields of the usual names.

The names are compared without case, blanks, dots, dashes and underscores. Times are ISO 8601, or numbers: a name that
ends with ms, us or ns says so; else their size does, which is clear for times since 1970, and smaller numbers are
seconds.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.bench.formats import TraceRecord, csv_rows, first_line, json_lines, located_json_lines
from kvrelay.core.decoding import UNREADABLE
from kvrelay.errors import InvalidInputError

TIME, PROMPT, ANSWER = "time", "prompt tokens", "answer tokens"
NAMES: dict[str, tuple[str, ...]] = {
    TIME: ("timestamp", "time", "ts", "arrival_time", "arrival", "arrived_at", "start_time", "started_at", "start",
           "request_time", "created_at", "created", "datetime", "date", "sent_at"),
    PROMPT: ("prompt_tokens", "input_tokens", "input_length", "prompt_length", "context_tokens", "request_tokens",
             "num_prompt_tokens", "num_input_tokens", "prompt_len", "input_len", "input_token_count",
             "prompt_token_count", "isl"),
    ANSWER: ("output_tokens", "completion_tokens", "output_length", "answer_tokens", "generated_tokens",
             "response_tokens", "completion_length", "response_length", "num_output_tokens", "num_generated_tokens",
             "output_len", "output_token_count", "completion_token_count", "osl"),
}  # fmt: skip
UNITS_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3}
SIZES_S = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))
"""From this number on a time since 1970 is in units of so many seconds."""


class _AccessLine(msgspec.Struct):
    """A line of ``--access-log json``, written when the request has ended. ``prompt_tokens`` None: no answer."""

    time: datetime
    duration_s: float
    status: str | int
    prompt_tokens: int | None
    output_tokens: int | None


def read_log(path: Path) -> Iterator[TraceRecord] | None:
    """The file's requests by time; None if it is no such log. Raises InvalidInputError, which names line and field."""
    first = first_line(path)
    is_json = first.startswith(b"{")
    try:
        in_csv = csv.reader([first.decode(errors="replace")])
        names = list(msgspec.json.decode(first, type=dict[str, Any]) if is_json else next(in_csv, []))
    except (*UNREADABLE, csv.Error):
        return None
    if is_json and set(names) >= set(_AccessLine.__struct_fields__):
        return iter(sorted(_access_lines(path), key=lambda record: record.timestamp_s))
    if (columns := columns_of(names)) is None:
        return None
    return _records(columns, located_json_lines(path, dict[str, Any]) if is_json else csv_rows(path))


def columns_of(names: Sequence[str]) -> dict[str, str] | None:
    """The file's names for time, prompt and answer; None if one of them is missing."""
    plain = {_plain(name): name for name in reversed(names)}
    found: dict[str, str] = {}
    for meaning, known in NAMES.items():
        wanted = [_plain(name) for name in known]
        suffixes = ("", *UNITS_S, "s", "seconds") if meaning == TIME else ("",)
        for name in (known_name + suffix for known_name, suffix in itertools.product(wanted, suffixes)):
            if name in plain:
                found.setdefault(meaning, plain[name])
    return found if len(found) == len(NAMES) else None


def _plain(name: str) -> str:
    return re.sub(r"[\s._-]", "", name).lower()


def _access_lines(path: Path) -> Iterator[TraceRecord]:
    """Each request at its arrival. Refused and failed ones have an answer of 0 tokens, and a prompt of 1 if the log
    does not say how long it was. Other lines without a prompt (of models, of health) are no requests."""
    for item in json_lines(path, _AccessLine):
        if item.prompt_tokens or str(item.status) >= "400":
            arrived_s = item.time.timestamp() - item.duration_s
            yield TraceRecord(arrived_s, item.prompt_tokens or 1, item.output_tokens or 0)


def _records(columns: Mapping[str, str], rows: Iterator[tuple[str, Mapping[str, Any]]]) -> Iterator[TraceRecord]:
    """The unit of the times is that of the first row."""
    seconds_of: Callable[[Any], float] | None = None
    for where, row in rows:
        values = {meaning: row.get(name) for meaning, name in columns.items()}
        try:
            meaning = TIME
            seconds_of = seconds_of or _time_reader(columns[TIME], values[TIME])
            time_s = seconds_of(values[TIME])
            meaning = PROMPT
            num_prompt = _count(values[PROMPT])
            meaning = ANSWER
            num_answer = _count(values[ANSWER])
        except (ValueError, TypeError, OverflowError) as exc:
            found = values[meaning]
            what = "is missing" if found in (None, "") else f"is {str(found)[:40]!r}"
            kind = "ISO 8601 or a number" if meaning == TIME else "a whole number"
            raise InvalidInputError(f"{where}: `{columns[meaning]}` {what}; the {meaning} must be {kind}") from exc
        yield TraceRecord(time_s, num_prompt, num_answer)


def _count(value: Any) -> int:
    number = float(value)
    if number != int(number):
        raise ValueError("not a whole number")
    return int(number)


def _time_reader(name: str, first: Any) -> Callable[[Any], float]:
    """How the times of this column are read, by its name and its first value."""
    try:
        number = float(first)
    except ValueError:
        return _iso_s
    unit_s = UNITS_S.get(_plain(name)[-2:]) or next((unit_s for least, unit_s in SIZES_S if number >= least), 1.0)
    return lambda value: float(value) * unit_s


def _iso_s(value: Any) -> float:
    """Seconds since 1970; without a zone it is UTC."""
    moment = datetime.fromisoformat(str(value).strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
