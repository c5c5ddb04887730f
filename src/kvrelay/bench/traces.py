"""Traces of requests by format: Mooncake, Azure, Qwen-Bailian and BurstGPT. Lengths and times only, no text.

Every reader is a stream: a million rows take the memory of one. Columns and fields that are not listed here are
ignored, because every publisher adds some; a missing one is an error that names file, line and field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

from kvrelay.bench.formats import TraceRecord, csv_rows, first_line, json_lines, not_empty, read_azure, read_mooncake
from kvrelay.errors import InvalidInputError

BAILIAN_TOKENS = 16
NO_PARENT = "-1"


class TraceFormat(StrEnum):
    """The formats; each by the first field that only it has."""

    MOONCAKE = "mooncake"
    BAILIAN = "bailian"
    AZURE = "azure"
    BURST_GPT = "burstgpt"


class UnknownTraceError(InvalidInputError):
    """The file is of none of these formats."""


class _BailianItem(msgspec.Struct):
    chat_id: int | str
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    parent_chat_id: int | str = NO_PARENT


def read_trace(path: Path) -> Iterator[TraceRecord]:
    """The trace's requests in the file's order; the format is found by the first line. Raises InvalidInputError."""
    readers: dict[TraceFormat, Callable[[Path], Iterator[TraceRecord]]] = {
        TraceFormat.MOONCAKE: read_mooncake,
        TraceFormat.BAILIAN: read_bailian,
        TraceFormat.AZURE: read_azure,
        TraceFormat.BURST_GPT: read_burst_gpt,
    }
    return not_empty(path, readers[detect_trace(path)](path))


def detect_trace(path: Path) -> TraceFormat:
    """Raises UnknownTraceError for a file of another kind."""
    first = first_line(path)
    if not first:
        raise InvalidInputError(f"{path} is empty: no record in it")
    if first.startswith(b"{"):
        if b'"chat_id"' in first:
            return TraceFormat.BAILIAN
        if b'"timestamp"' in first and b'"input_length"' in first:
            return TraceFormat.MOONCAKE
    if b"ContextTokens" in first and b"GeneratedTokens" in first and b"TIMESTAMP" in first:
        return TraceFormat.AZURE
    if b"Request tokens" in first and b"Response tokens" in first and b"Timestamp" in first:
        return TraceFormat.BURST_GPT
    raise UnknownTraceError(
        f"{path}: the first line is of no known trace; give JSON lines of Mooncake or Qwen-Bailian, CSV of Azure "
        "(TIMESTAMP,ContextTokens,GeneratedTokens) or BurstGPT (Timestamp,Request tokens,Response tokens), or a "
        "recording of kvrelay worker --record-steps"
    )


def read_bailian(path: Path) -> Iterator[TraceRecord]:
    """A Qwen-Bailian trace: seconds, ids of 16-token blocks, and the chat that each request continues."""
    for item in json_lines(path, _BailianItem):
        parent, ids = str(item.parent_chat_id), tuple(item.hash_ids)
        chats = str(item.chat_id), None if parent == NO_PARENT else parent
        yield TraceRecord(item.timestamp, item.input_length, item.output_length, ids, BAILIAN_TOKENS, *chats)


def read_burst_gpt(path: Path) -> Iterator[TraceRecord]:
    """A BurstGPT trace: seconds and lengths. Rows without an answer are failed requests and left out."""
    for where, row in csv_rows(path):
        try:
            time_s = float(row["Timestamp"])
            input_len, output_len = int(row["Request tokens"]), int(row["Response tokens"])
        except (KeyError, ValueError, TypeError) as exc:
            raise InvalidInputError(f"{where}: not a row of Timestamp,Request tokens,Response tokens") from exc
        if output_len > 0:
            yield TraceRecord(time_s, input_len, output_len)
