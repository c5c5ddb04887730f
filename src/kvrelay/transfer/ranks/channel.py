"""Messages with a length prefix between a worker and its rank processes, over a connected socket. Arrays of int64 in
them travel as their bytes."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

T = TypeVar("T")

_LENGTH = struct.Struct("<I")


class ChannelClosedError(Exception):
    """The other end is gone, or does not read its messages."""


class Channel(Generic[T]):
    """``kind`` is the type of received messages."""

    def __init__(self, connection: socket.socket, kind: Any) -> None:
        self._socket = connection
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=_integers)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_bytes)

    def fileno(self) -> int:
        return self._socket.fileno()

    def set_timeout(self, timeout_s: float | None) -> None:
        """The timeout for each piece of a message; None: wait for ever."""
        self._socket.settimeout(timeout_s)

    def frame(self, message: object) -> bytes:
        """The message as it is sent."""
        body = self._encoder.encode(message)
        return _LENGTH.pack(len(body)) + body

    def send(self, message: object) -> None:
        """Raises ChannelClosedError."""
        try:
            self._socket.sendall(self.frame(message))
        except OSError as exc:
            raise ChannelClosedError(str(exc)) from exc

    def send_some(self, data: memoryview) -> int:
        """As much of a frame as fits now, without waiting: with a timeout the descriptor does not block. Raises
        ChannelClosedError."""
        try:
            return os.write(self.fileno(), data)
        except BlockingIOError:
            return 0
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


def _bytes(array: npt.NDArray[np.int64]) -> bytes:
    return np.ascontiguousarray(array, dtype=np.int64).tobytes()


def _integers(kind: Any, data: bytes) -> npt.NDArray[np.int64]:
    """Copied, because compiled kernels take writable arrays."""
    return np.frombuffer(data, dtype=np.int64).copy()
