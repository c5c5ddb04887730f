"""The messages between the ranks of a group and their coordinator, and their framing. Pure.

    rank -> coordinator     RegPart           here is rank r of n, and these are its facts
                            StartStep         see ``protocol``; not over sockets if the ranks share memory
                            RankReady         this rank is loaded, and can step
                            RankFailed        this rank's engine has failed, for this reason
                            Leave             this rank has no requests left and gets none
                            Beat              this rank lives; see ``beats``
                            StorePort         from a rank's process, which does not register: see ``rendezvous``
    coordinator -> ranks    CoordinatorHello  the port belongs to a coordinator
                            Formed            all ranks are there and agree
                            GroupRefused      the group cannot be formed, for this reason
                            AllReady          every rank has said RankReady: requests are allowed
                            StepsUntil        see ``protocol``
                            AllLeft           every rank has said Leave: run the remaining steps, then end
                            Ended             a rank is gone: the group ends, for this reason
                            Beat              the coordinator lives
                            StorePort         the answer, once it is known

A frame is the length of the rest (4 bytes, little-endian), the version (1 byte), and the message in msgpack.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from kvrelay.core.decoding import UNREADABLE
from kvrelay.dp.protocol import StartStep, StepsUntil
from kvrelay.errors import ProtocolError

VERSION = 1
MAX_FRAME_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")


class RankInfo(msgspec.Struct, frozen=True):
    """``facts`` must be equal on all ranks: name of the fact, value. ``place``: host and pid, for people."""

    rank: int
    size: int
    place: str
    facts: dict[str, str]


class RegPart(msgspec.Struct, frozen=True, tag=True):
    info: RankInfo


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """This rank is loaded, and can step."""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Leave(msgspec.Struct, frozen=True, tag=True):
    """This rank has no requests left and gets none."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The sender lives."""


class StorePort(msgspec.Struct, frozen=True, tag=True):
    """The port of the store by which the group's processes find each other; 0 from those that do not serve it."""

    port: int


class CoordinatorHello(msgspec.Struct, frozen=True, tag=True):
    """The port belongs to a coordinator."""


class Formed(msgspec.Struct, frozen=True, tag=True):
    """``group_id`` is new at every start. If ``num_fds`` is not 0, descriptors come with this frame: the shared memory,
    then a bell for each rank."""

    group_id: str
    num_fds: int = 0


class GroupRefused(msgspec.Struct, frozen=True, tag=True):
    reason: str


class AllReady(msgspec.Struct, frozen=True, tag=True):
    """Requests are allowed."""


class AllLeft(msgspec.Struct, frozen=True, tag=True):
    """Run the remaining steps, then end."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    reason: str


FromRank = RegPart | RankReady | StartStep | RankFailed | Leave | Beat | StorePort
FromCoordinator = CoordinatorHello | Formed | GroupRefused | AllReady | StepsUntil | AllLeft | Ended | Beat | StorePort

_encoder = msgspec.msgpack.Encoder()


def encode(message: FromRank | FromCoordinator) -> bytes:
    """The message as a frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body) + 1) + bytes((VERSION,)) + body


class FrameReader:
    """Takes bytes as they arrive and returns the complete messages. ``kind`` is the union of the expected types."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Raises ProtocolError for data that is no message; the connection is then useless."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if not 1 <= length <= MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes is no message of a data-parallel group")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            version, body = self._buffer[_LENGTH.size], bytes(self._buffer[_LENGTH.size + 1 : end])
            del self._buffer[:end]
            if version != VERSION:
                raise ProtocolError(f"a message of a data-parallel group has version {version}, expected {VERSION}")
            try:
                yield self._decoder.decode(body)
            except UNREADABLE as exc:
                raise ProtocolError(f"a message of a data-parallel group is malformed: {exc}") from exc
