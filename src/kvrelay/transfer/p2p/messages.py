"""What two workers say to each other on the control connection of the peer-to-peer transport, and the codec.

    initiator I (the worker that posts)                      responder R (the worker whose pool is touched)

    PeerHello     who I am, and whom I mean      ────────>
    Connect       make a communicator            ────────>
                                                 <────────   CommunicatorMade, or CommunicatorRefused
    Rendezvous    what gloo or NCCL exchange     <───────>   Rendezvous           (the first data message starts it)

    Put           tensor metadata, where it goes ────────>   reserve room, or wait for room
                                                 <────────   Accept
    [ data: one send and one receive on the pair's group ]
                                                 <────────   Landed               (copied into the blocks, or why not)

    Get           tensor metadata, what I want   ────────>
                                                 <────────   Sending, then [ data ], or Landed with an error
    Tell          a notification alone           ────────>
                                                 <────────   Landed
    Close         this communicator ends         <───────>   Close

A small Put carries its bytes as a second frame, and so does the Landed that answers a small Get: no communicator then.
Frames have a version byte. Everything is untrusted until it has been decoded and checked against the pool.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.window import RemoteKey
from kvrelay.errors import ProtocolError
from kvrelay.transfer.values import Int64Array

VERSION = 1
MAX_FRAME_BYTES = 4 << 20
MAX_PIECES = 1 << 16
"""In one message: 16 bytes of metadata each."""

Id = Annotated[str, msgspec.Meta(max_length=128)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
MAX_REASON = 512
Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
Offsets = Annotated[bytes, msgspec.Meta(max_length=8 * MAX_PIECES)]
Notify = Annotated[bytes, msgspec.Meta(max_length=(1 << 20) + (1 << 16))]


class PeerHello(msgspec.Struct, frozen=True, tag="Hello"):
    """First on every control connection. ``target``: an earlier incarnation at this address is not meant."""

    sender: Id
    target: Id


class Unknown(msgspec.Struct, frozen=True, tag=True):
    """The answer to anything on a connection that has not said PeerHello, or whose PeerHello was forgotten."""


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Make a two-rank group under this name: the sender is rank 0."""

    pair: Id


class CommunicatorMade(msgspec.Struct, frozen=True, tag="Connected"):
    pair: Id


class CommunicatorRefused(msgspec.Struct, frozen=True, tag="Refused"):
    """No communicator now: all that may exist are in use. Ask again."""

    pair: Id
    reason: Reason


class Rendezvous(msgspec.Struct, frozen=True, tag=True):
    """A key of the group's store, set by one rank for the other."""

    pair: Id
    key: Id
    value: Annotated[bytes, msgspec.Meta(max_length=1 << 16)]


class Close(msgspec.Struct, frozen=True, tag=True):
    pair: Id


class _OfPieces(msgspec.Struct, frozen=True):
    """``num_bytes`` of the responder's pool: pieces at ``offsets`` with ``lengths``, int64 little-endian, packed in
    order."""

    pair: Id
    message: Number
    num_bytes: Number
    offsets: Offsets
    lengths: Offsets
    key: RemoteKey | None = msgspec.field(default=None, name="grant")


class Put(_OfPieces, frozen=True, tag=True):
    """Bytes for these pieces. ``pair`` is empty if they are in the second frame. ``waits``: the initiator keeps them
    until the responder has room (GET); else the responder may refuse. ``notify`` is delivered once they have
    landed."""

    waits: bool = False
    notify: Notify | None = None


class Get(_OfPieces, frozen=True, tag=True):
    """The bytes of these pieces, please. ``pair`` is empty if they are to come with Landed."""


class Tell(msgspec.Struct, frozen=True, tag=True):
    message: Number
    notify: Notify


class Accept(msgspec.Struct, frozen=True, tag=True):
    """There is room: send the data of this Put."""

    message: Number


class Sending(msgspec.Struct, frozen=True, tag=True):
    """The data of this Get follows on the group."""

    message: Number


class Landed(msgspec.Struct, frozen=True, tag=True):
    """The end of a message. ``error`` None: all of it is in place. ``is_refused``: the connection is good, but there
    was no room, or no window."""

    message: Number
    error: Reason | None = None
    is_refused: bool = False


Message = (
    PeerHello
    | Unknown
    | Connect
    | CommunicatorMade
    | CommunicatorRefused
    | Rendezvous
    | Close
    | Put
    | Get
    | Tell
    | Accept
    | Sending
    | Landed
)

_PREFIX = bytes([VERSION])
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One frame."""
    return _PREFIX + _encoder.encode(message)


def decode(frame: bytes | memoryview) -> Message:
    """The message in ``frame``. Raises ProtocolError."""
    if len(frame) < 2 or frame[0] != VERSION:
        raise ProtocolError(f"a frame of {len(frame)} bytes has no version {VERSION} header")
    try:
        return _decoder.decode(memoryview(frame)[1:])
    except UNREADABLE as exc:
        raise ProtocolError(f"malformed message: {exc}") from exc


def pieces_of(message: Put | Get, pool_bytes: int) -> tuple[Int64Array, Int64Array]:
    """Offsets and lengths, all within a pool of ``pool_bytes``. Raises ProtocolError."""
    if len(message.offsets) != len(message.lengths) or len(message.offsets) % 8 or not message.offsets:
        raise ProtocolError("offsets and lengths do not pair")
    offsets = np.frombuffer(message.offsets, "<i8").astype(np.int64)
    lengths = np.frombuffer(message.lengths, "<i8").astype(np.int64)
    # The sum may overflow; each length is compared first.
    if int(lengths.min()) <= 0 or int(lengths.max()) > message.num_bytes or int(lengths.sum()) != message.num_bytes:
        raise ProtocolError(f"the lengths are not those of {message.num_bytes} bytes")
    if int(offsets.min()) < 0 or bool((offsets > pool_bytes - lengths).any()):
        raise ProtocolError("a piece lies outside our KV pool")
    return offsets, lengths


def pack(values: Int64Array) -> bytes:
    """As ``pieces_of`` reads them."""
    return values.astype("<i8").tobytes()
