"""How marks travel: as opaque bytes in an optional last field of messages that are sent anyway.

    field     [bytes of one process, bytes of another, ...]      the decode worker passes on what it does not read

A receiver that does not know the field ignores it, and a sender that has none leaves it out. Only who draws the
waterfall looks inside, so bytes that do not decode cost one waterfall and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvrelay.core.decoding import UNREADABLE
from kvrelay.marks.phases import Role

MAX_BYTES = 16 * 1024
"""Of what one message may bring; more is ignored."""


class ProcessMarks(msgspec.Struct, frozen=True, array_like=True):
    """What one process has marked of one request, as flat numbers (``recorder.marks_of``)."""

    name: str
    role: Role
    numbers: Sequence[float] = ()


_encode = msgspec.msgpack.Encoder().encode
_fields = msgspec.msgpack.Decoder(tuple[bytes, ...])
_processes = msgspec.msgpack.Decoder(ProcessMarks)


def encode(process: ProcessMarks, *others: bytes) -> bytes:
    """A message's field: a process's marks, and those of others, which came in such fields."""
    return _encode((_encode(process), *others))


def decode(field: bytes) -> Iterator[ProcessMarks]:
    """The processes of a field, also within others; none of what is too large or malformed."""
    if not 0 < len(field) <= MAX_BYTES:
        return
    try:
        parts = _fields.decode(field)
    except UNREADABLE:
        return
    for number, part in enumerate(parts):
        if number:
            yield from decode(part)
            continue
        try:
            yield _processes.decode(part)
        except UNREADABLE:
            continue
