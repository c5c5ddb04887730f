"""The frames of the request plane: every message that travels between frontends and workers, and its codec.

One frame is one message: a version byte, then MessagePack. A frame that does not decode raises ProtocolError. Nothing
is pickled.
"""

from __future__ import annotations

import msgspec

from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    AdminReply,
    AdminRequest,
    GenerateRequest,
    OutputBatch,
    Ping,
    Pong,
    PrefillLost,
    RequestRefused,
    SessionPaused,
)
from kvrelay.errors import PayloadTooLargeError, ProtocolError
from kvrelay.handoff.messages import ToDecode, ToPrefill

Message = (
    GenerateRequest
    | PrefillLost
    | AbortRequest
    | SessionPaused
    | OutputBatch
    | RequestRefused
    | ToDecode
    | ToPrefill
    | Ping
    | Pong
    | AdminRequest
    | AdminReply
)

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""A sender refuses a larger message. A receiver that gets one ends the connection."""

_VERSION_PREFIX = bytes([PROTOCOL_VERSION])
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """One frame. Raises PayloadTooLargeError."""
    frame = _VERSION_PREFIX + _encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise PayloadTooLargeError(f"a {type(message).__name__} of {len(frame)} bytes is above {MAX_FRAME_BYTES}")
    return frame


def decode_message(frame: bytes | memoryview) -> Message:
    """The message in ``frame``. Raises ProtocolError for an unknown version or type, or a malformed body."""
    if len(frame) < 2 or frame[0] != PROTOCOL_VERSION:
        raise ProtocolError(f"a frame of {len(frame)} bytes has no version {PROTOCOL_VERSION} header")
    try:
        return _decoder.decode(memoryview(frame)[1:])
    except UNREADABLE as exc:
        raise ProtocolError(f"malformed message: {exc}") from exc
