"""Between the driver and one rank: short messages over a socket, and the step's description in shared memory.

    step memory (memfd)      [ progress table | StepMessage ......... free ]
    one socket per rank      "step 17: 412 bytes are there"  ->        <-  "done"

The description is written once for all ranks. A rank waits in ``recv`` and copies the description before it computes.
The driver writes the next one once all ranks have answered. The memory grows if a step needs more.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

from kvrelay.executors.torch.parallel.messages import RunStep
from kvrelay.executors.torch.parallel.rank_progress import Int64Array, progress_table

T = TypeVar("T")

HEADER_BYTES = mmap.PAGESIZE
FIRST_CAPACITY = 1 << 20

_LENGTH = struct.Struct("<I")


class ChannelClosedError(Exception):
    """The other end is gone, or does not read its messages."""


class Channel(Generic[T]):
    """Messages with a length prefix over a connected socket. ``kind`` is the type of received messages."""

    def __init__(self, connection: socket.socket, kind: Any) -> None:
        self._socket = connection
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()

    def fileno(self) -> int:
        return self._socket.fileno()

    def set_timeout(self, timeout_s: float | None) -> None:
        """The timeout for each piece of a message; None: wait for ever."""
        self._socket.settimeout(timeout_s)

    def send(self, message: object) -> None:
        """Raises ChannelClosedError."""
        body = self._encoder.encode(message)
        try:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as exc:
            raise ChannelClosedError(str(exc)) from exc

    def receive(self) -> T:
        """Raises ChannelClosedError."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        message: T = self._decoder.decode(self._read(length))
        return message

    def close(self) -> None:
        self._socket.close()

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        view, at = memoryview(data), 0
        while at < length:
            try:
                count = self._socket.recv_into(view[at:])
            except OSError as exc:
                raise ChannelClosedError(str(exc)) from exc
            if not count:
                raise ChannelClosedError("closed")
            at += count
        return data


class StepMemory:
    """The step memory as the driver or a rank has mapped it."""

    def __init__(self, fd: int, num_ranks: int) -> None:
        self.fd = fd
        self._header = mmap.mmap(fd, HEADER_BYTES)
        self.progress: Int64Array = progress_table(memoryview(self._header), num_ranks)
        self._body = mmap.mmap(fd, os.fstat(fd).st_size - HEADER_BYTES, offset=HEADER_BYTES)

    @classmethod
    def create(cls, num_ranks: int) -> StepMemory:
        fd = os.memfd_create("kvrelay-step")
        os.ftruncate(fd, HEADER_BYTES + FIRST_CAPACITY)
        return cls(fd, num_ranks)

    def write(self, frame: bytes) -> RunStep:
        """Write a description; returns the command for the ranks."""
        if len(frame) > len(self._body):
            capacity = 1 << len(frame).bit_length()
            os.ftruncate(self.fd, HEADER_BYTES + capacity)
            self._map(capacity)
        self._body[: len(frame)] = frame
        return RunStep(len(frame), len(self._body))

    def read(self, step: RunStep) -> bytes:
        """A copy of the description."""
        if step.capacity != len(self._body):
            self._map(step.capacity)
        return self._body[: step.num_bytes]

    def close(self) -> None:
        """Close the driver's mapping. The progress table is freed with its last reference."""
        self._body.close()
        os.close(self.fd)

    def _map(self, capacity: int) -> None:
        self._body.close()
        self._body = mmap.mmap(self.fd, capacity, offset=HEADER_BYTES)
