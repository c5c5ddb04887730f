"""Bounds on the sizes of a request's fields. The parser refuses larger values, and the OpenAPI document shows each
bound.

A bound limits the cost of a request before its model is known: lengths are in characters (strings), items (lists) or
entries (maps). The pipeline checks whether a prompt fits into the context.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from kvrelay.core.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from kvrelay.errors import InvalidInputError

MAX_TOKEN_IDS = 2**20
MAX_TOKENIZED_CHARS = 2**20
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
MAX_JSON_SIZE = 2**20

Word = Annotated[str, Meta(max_length=64)]
Name = Annotated[str, Meta(max_length=1024)]
Text = Annotated[str, Meta(max_length=2**22)]
"""A prompt or a message. A longer text would not fit into any context."""
TokenizedText = Annotated[str, Meta(max_length=MAX_TOKENIZED_CHARS)]
"""A text for ``/tokenize``, whose tokens are sent back."""
TokenIds = Annotated[list[int], Meta(max_length=MAX_TOKEN_IDS)]
AllowedTokenIds = Annotated[list[int], Meta(max_length=2**15)]
PromptItems = Annotated[list[Text | int | TokenIds], Meta(max_length=MAX_TOKEN_IDS)]
"""Token ids, or prompts; there are fewer of these (``max_prompts``)."""
StopString = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
StopTokenIds = Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)]
LogitBias = Annotated[dict[int, float], Meta(max_length=MAX_LOGIT_BIAS)]
JsonMap = Annotated[dict[str, object], Meta(max_length=64)]
Words = Annotated[list[Word], Meta(max_length=16)]

MAX_JSON_VALUES = 2**21
"""Values in a body. The parser keeps the interpreter's lock; two million token ids take it 40 ms."""
MAX_JSON_CONTAINERS = 2**15
"""Lists and objects in a body. Each costs the parser as much as 20 numbers."""
MAX_JSON_ESCAPES = 2**22

_PIECE_BYTES = 2**18
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|(").*', re.DOTALL)
"""A string, or the beginning of one that continues after the piece. Possessive, so that its time is linear."""
_NO_BACKSLASH = re.compile(rb"[^\\]")


def check_body(body: bytes) -> None:
    """Raise InvalidInputError if parsing ``body`` would take long. It need not be valid JSON."""
    if len(body) <= MAX_JSON_CONTAINERS:
        return  # too short to exceed any of the bounds
    if body.count(b"\\") > MAX_JSON_ESCAPES:
        raise InvalidInputError(f"the body has more than {MAX_JSON_ESCAPES} escapes")
    # Characters in strings count here, so the count may be too high, but never too low.
    if _is_within(body.count(b","), body.count(b"[") + body.count(b"{")):
        return
    num_commas = num_containers = 0
    for piece in _outside_strings(body):
        num_commas += piece.count(b",")
        num_containers += piece.count(b"[") + piece.count(b"{")
        if not _is_within(num_commas, num_containers):
            raise InvalidInputError(
                f"the body has more than {MAX_JSON_VALUES} values or {MAX_JSON_CONTAINERS} lists and objects"
            )


def _is_within(num_commas: int, num_containers: int) -> bool:
    """Count values: each is the first of its container or follows a comma."""
    return num_commas + num_containers < MAX_JSON_VALUES and num_containers <= MAX_JSON_CONTAINERS


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """The body without its strings, in pieces: a search through all of it would hold the interpreter's lock."""
    start, is_in_string = 0, False
    while start < len(body):
        # Do not cut an escape in two.
        last = _NO_BACKSLASH.search(body, start + _PIECE_BYTES)
        end = last.end() if last is not None else len(body)
        piece = _STRING.sub(rb"\1", (b'"' if is_in_string else b"") + body[start:end])
        is_in_string = piece.endswith(b'"')
        yield piece
        start = end


def check_free_json(value: object, param: str) -> None:
    """Check the bounds of fields that may hold any JSON. Raises InvalidInputError."""
    size, open_values = 0, [value]
    while open_values:
        item = open_values.pop()
        size += 1
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, list):
            open_values += item
        elif isinstance(item, dict):
            open_values += item.keys()
            open_values += item.values()
        if size > MAX_JSON_SIZE:
            raise InvalidInputError(
                f"{param} is too large: more than {MAX_JSON_SIZE} characters and values", param=param
            )


def free_json_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """The names of a request's fields that may hold any JSON at some depth."""
    return tuple(field.name for field in msgspec.structs.fields(kind) if "object" in str(field.type))
