"""Files of conversations and traces, read into typed values; every format that the room knows is named here.

A reader is lazy if the format allows it, checks each record, and names file and line of each error. It does not know
the purpose of the records.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from kvrelay.bench.errors import MissingPackageError
from kvrelay.core.decoding import UNREADABLE
from kvrelay.errors import InvalidInputError

_T = TypeVar("_T")

MAX_LINE_BYTES = 2**26

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}


class FileFormat(StrEnum):
    """A file's format; ``AUTO`` looks at the name and at the first record."""

    AUTO = "auto"
    SHAREGPT = "sharegpt"
    LMSYS = "lmsys"
    DOLLY = "dolly"
    MESSAGES = "messages"
    TEXT = "text"
    MOONCAKE = "mooncake"


class ChatTurn(msgspec.Struct, frozen=True):
    """One message. ``role`` is user, assistant or system, or another value of the file."""

    role: str
    content: str


class Conversation(msgspec.Struct, frozen=True):
    """The turns of a conversation, in order."""

    turns: tuple[ChatTurn, ...]

    def text(self, *, first_turn_only: bool = False) -> str:
        """The turns' contents, joined by line ends; with ``first_turn_only`` up to the first user turn."""
        if not first_turn_only:
            return "\n".join(turn.content for turn in self.turns)
        first = next((at for at, turn in enumerate(self.turns) if turn.role == "user"), 0)
        return "\n".join(turn.content for turn in self.turns[: first + 1])


class TraceRecord(msgspec.Struct, frozen=True):
    """One request of a trace: seconds since the trace's epoch, lengths in tokens, ids of its blocks where known.

    A hash id stands for ``hash_tokens`` tokens. ``chat`` names the request for its successors in the session, and
    ``parent`` is the chat whose answer it continues.
    """

    timestamp_s: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()
    hash_tokens: int = 512
    chat: str | None = None
    parent: str | None = None


class _ShareTurn(msgspec.Struct):
    value: str | None
    role: str = msgspec.field(name="from", default="user")


class _ShareItem(msgspec.Struct):
    conversations: list[_ShareTurn]

    def turns(self) -> list[ChatTurn]:
        return [ChatTurn(_ROLES.get(turn.role, turn.role), turn.value or "") for turn in self.conversations]


class _DollyItem(msgspec.Struct):
    instruction: str
    response: str
    context: str = ""

    def turns(self) -> list[ChatTurn]:
        question = f"{self.instruction}\n{self.context}" if self.context else self.instruction
        return [ChatTurn("user", question), ChatTurn("assistant", self.response)]


class _Part(msgspec.Struct):
    text: str = ""


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None


class _MessagesItem(msgspec.Struct):
    messages: list[_Message]

    def turns(self) -> list[ChatTurn]:
        return [
            ChatTurn(message.role, message.content or "")
            if not isinstance(message.content, list)
            else ChatTurn(message.role, "".join(part.text for part in message.content))
            for message in self.messages
        ]


class _MooncakeItem(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def detect_format(path: Path) -> FileFormat:
    """Detect the format by the name and the first record. Raises InvalidInputError if the file cannot be read."""
    if path.suffix == ".parquet":
        return FileFormat.LMSYS
    first = first_line(path)
    if first.startswith(b"["):
        return FileFormat.SHAREGPT
    for key, found in (
        (b'"hash_ids"', FileFormat.MOONCAKE),
        (b'"conversations"', FileFormat.SHAREGPT),
        (b'"messages"', FileFormat.MESSAGES),
        (b'"instruction"', FileFormat.DOLLY),
    ):
        if first.startswith(b"{") and key in first:
            return found
    if path.suffix in (".json", ".jsonl"):
        raise InvalidInputError(f"{path}: the first record is of no known format; name one with --format")
    return FileFormat.TEXT


def read_conversations(path: Path, fmt: FileFormat = FileFormat.AUTO) -> Iterator[Conversation]:
    """The file's conversations. An empty file, or one of another format, raises InvalidInputError."""
    fmt = detect_format(path) if fmt is FileFormat.AUTO else fmt
    readers: dict[FileFormat, Callable[[Path], Iterator[list[ChatTurn]]]] = {
        FileFormat.SHAREGPT: _read_sharegpt,
        FileFormat.LMSYS: _read_lmsys,
        FileFormat.DOLLY: lambda path: (item.turns() for item in json_lines(path, _DollyItem)),
        FileFormat.MESSAGES: lambda path: (item.turns() for item in json_lines(path, _MessagesItem)),
        FileFormat.TEXT: _read_text,
    }
    if fmt not in readers:
        raise InvalidInputError(f"{path} is a {fmt.value} file: it holds no text")
    return not_empty(path, (Conversation(tuple(turns)) for turns in readers[fmt](path) if turns))


def read_mooncake(path: Path) -> Iterator[TraceRecord]:
    """A Mooncake trace: milliseconds become seconds, ids of blocks are kept."""
    return not_empty(path, _read_mooncake(path))


def read_azure(path: Path) -> Iterator[TraceRecord]:
    """An Azure LLM trace: CSV with TIMESTAMP, ContextTokens, GeneratedTokens; times are relative to its first row."""
    return not_empty(path, _read_azure(path))


def json_lines(path: Path, item: type[_T]) -> Iterator[_T]:
    """Decode every line that is not blank as ``item``; the error names the line."""
    return (found for _, found in located_json_lines(path, item))


def located_json_lines(path: Path, item: type[_T]) -> Iterator[tuple[str, _T]]:
    """The same, each with file and line for a message."""
    decoder = msgspec.json.Decoder(item)
    with opened(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{path}:{number}"
                try:
                    yield where, decoder.decode(line)
                except UNREADABLE as exc:
                    raise InvalidInputError(f"{where}: {exc}") from exc


def _read_sharegpt(path: Path) -> Iterator[list[ChatTurn]]:
    if not first_line(path).startswith(b"["):
        return (item.turns() for item in json_lines(path, _ShareItem))
    try:
        with opened(path) as lines:
            return (item.turns() for item in msgspec.json.decode(b"".join(lines), type=list[_ShareItem]))
    except UNREADABLE as exc:
        raise InvalidInputError(f"{path}: not a ShareGPT file: {exc}") from exc


def _read_lmsys(path: Path) -> Iterator[list[ChatTurn]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as exc:
        raise MissingPackageError("pyarrow", f"reading {path.name}") from exc
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096, columns=["conversation"]):
                if "conversation" not in batch.schema.names:
                    raise InvalidInputError(f"{path} has no column 'conversation'")
                for messages in msgspec.convert(batch.column("conversation").to_pylist(), list[list[_Message]]):
                    yield _MessagesItem(messages).turns()
    except (ArrowException, OSError, msgspec.ValidationError) as exc:
        raise InvalidInputError(f"{path}: not a parquet file of conversations: {exc}") from exc


def _read_text(path: Path) -> Iterator[list[ChatTurn]]:
    with opened(path) as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = line.decode().rstrip("\r\n")
            except UnicodeDecodeError as exc:
                raise InvalidInputError(f"{path}:{number}: not UTF-8 text") from exc
            yield [ChatTurn("user", text)] if text else []


def _read_mooncake(path: Path) -> Iterator[TraceRecord]:
    for item in json_lines(path, _MooncakeItem):
        if item.input_length < 1 or item.output_length < 0:
            raise InvalidInputError(
                f"{path}: a request of {item.input_length} and {item.output_length} tokens is none; remove it"
            )
        yield TraceRecord(item.timestamp / 1000, item.input_length, item.output_length, tuple(item.hash_ids))


def _read_azure(path: Path) -> Iterator[TraceRecord]:
    epoch: datetime | None = None
    for where, row in csv_rows(path):
        try:
            # Seven decimals are written; datetime reads six.
            moment = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26])
            epoch = moment if epoch is None else epoch
            time_s = (moment - epoch).total_seconds()
            input_len, output_len = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, ValueError, TypeError, AttributeError) as exc:
            raise InvalidInputError(f"{where}: not a row of TIMESTAMP,ContextTokens,GeneratedTokens") from exc
        if min(input_len, output_len) < 0:
            raise InvalidInputError(f"{where}: a request of {input_len} and {output_len} tokens is none; remove it")
        yield TraceRecord(time_s, max(1, input_len), max(1, output_len))


def csv_rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Each row by the names of the first line, with its place for errors. Raises InvalidInputError."""
    with opened(path) as lines:
        rows = csv.DictReader(line.decode(errors="replace") for line in lines)
        try:
            for row in rows:
                yield f"{path}:{rows.line_num}", row
        except csv.Error as exc:
            raise InvalidInputError(f"{path}:{rows.line_num + 1}: {exc}") from exc


def not_empty(path: Path, records: Iterator[_T]) -> Iterator[_T]:
    """Pull the first record now, so that a wrong file is reported before anything is started."""
    first = next(records, None)
    if first is None:
        raise InvalidInputError(f"{path} is empty: no record in it")
    return itertools.chain([first], records)


@contextmanager
def opened(path: Path) -> Iterator[Iterator[bytes]]:
    """The lines, without the mark (BOM) that spreadsheets write before the first one. A line above MAX_LINE_BYTES comes
    in parts: a device may have no end of line. Raises InvalidInputError."""
    try:
        file = path.open("rb")
    except OSError as exc:
        raise InvalidInputError(f"cannot read {path}: {exc.strerror}") from exc
    with file:
        if file.peek(2).startswith(b"\x1f\x8b"):
            raise InvalidInputError(f"{path} is compressed; unpack it first (gunzip)")
        file.read(3 if file.peek(3).startswith(b"\xef\xbb\xbf") else 0)
        yield iter(partial(file.readline, MAX_LINE_BYTES), b"")


def first_line(path: Path) -> bytes:
    """The first that is not blank, stripped; empty if there is none. Raises InvalidInputError, also for a pipe or a
    device: the first line is read twice, and a device may have no end."""
    with opened(path) as lines:
        if not path.is_file():
            raise InvalidInputError(f"{path} is no file, and is read twice; write it to a file first")
        return next(filter(None, map(bytes.strip, lines)), b"")
