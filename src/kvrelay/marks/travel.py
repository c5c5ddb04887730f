"""How marks travel: as opaque bytes in an optional last field of messages that are sent anyway.

A receiver that does not know the field ignores it, and a sender that has none leaves it out. Only who draws the
waterfall looks inside, so bytes that do not decode cost one waterfall and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvrelay.core.decoding import UNREADABLE
from kvrelay.marks.phases import Role

MAX_BYTES = 8192
"""Of what one message may bring; more is ignored."""


class ProcessMarks(msgspec.Struct, frozen=True, array_like=True):
    """What one process has marked of one request. ``marks`` is packed (``ring.unpack``), empty if it makes none."""

    name: str
    role: Role
    marks: bytes = b""


_decoder = msgspec.msgpack.Decoder(tuple[ProcessMarks, ...])
_encoder = msgspec.msgpack.Encoder()


def encode(processes: Sequence[ProcessMarks]) -> bytes:
    """For a message's field."""
    return _encoder.encode(processes)


def decode(field: bytes) -> tuple[ProcessMarks, ...]:
    """None for a field that is empty, too large or malformed."""
    if not field or len(field) > MAX_BYTES:
        return ()
    try:
        return _decoder.decode(field)
    except UNREADABLE:
        return ()
