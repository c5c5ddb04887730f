"""Who may connect to a CURVE server: answers libzmq's questions (ZAP, ZeroMQ RFC 27) on the running event loop.

A client proves in the handshake that it holds the secret half of its key. libzmq then asks this module, and delivers no
message before the answer. This module does not know which keys are good: ``base.Admit`` decides, and returns the
identity that every message of the connection then carries.
"""

from __future__ import annotations

import logging

import zmq
from zmq.utils import z85

from kvrelay.core.tasks import TaskSet
from kvrelay.rpc.base import Admit
from kvrelay.rpc.zmq_socket import SocketReader

_log = logging.getLogger(__name__)

ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"kvrelay"
VERSION = b"1.0"
IDENTITY = "User-Id"
"""The property of a received frame in which libzmq keeps the identity that ``Admit`` returned."""
MAX_UNDECIDED = 256
"""Maximum number of handshakes that wait for an answer; further ones are refused at once."""
KEY_BYTES = 32
NUM_REQUEST_FRAMES = 9


class ZapHandler:
    """Guards a server socket that has CURVE keys and is not bound yet. Close it before its context ends."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], guarded: zmq.Socket[bytes], admit: Admit) -> None:
        self._admit = admit
        self._undecided = TaskSet()
        guarded.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        # Without this handler, libzmq then refuses all clients instead of admitting all.
        guarded.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._socket = context.socket(zmq.ROUTER)
        self._socket.bind(ADDRESS)
        self._reader = SocketReader(self._socket, self._receive_one)

    def close(self) -> None:
        """Answer nothing more."""
        self._undecided.cancel()
        self._reader.close()
        self._socket.close(linger=0)

    def _receive_one(self) -> int | None:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        size = sum(map(len, frames))
        if len(frames) != NUM_REQUEST_FRAMES or frames[2] != VERSION:
            _log.error("libzmq asked for admission in %d frames of an unknown version", len(frames))
            return size
        mechanism, key = frames[7], frames[8]
        if mechanism != b"CURVE" or len(key) != KEY_BYTES or len(self._undecided) >= MAX_UNDECIDED:
            self._answer(frames, None)
            return size
        self._undecided.spawn(self._decide(frames, z85.encode(key).decode()))
        return size

    async def _decide(self, frames: list[bytes], public_key: str) -> None:
        identity = None
        try:
            identity = await self._admit(public_key)
        finally:
            # Without an answer the client would wait for its whole timeout.
            self._answer(frames, identity)
        if identity is None:
            _log.warning("refused a connection from %s: its key is not known", frames[5].decode(errors="replace"))

    def _answer(self, frames: list[bytes], identity: str | None) -> None:
        if self._socket.closed:
            return
        verdict = [b"400", b"unknown key", b""] if identity is None else [b"200", b"OK", identity.encode()]
        self._socket.send_multipart([frames[0], b"", VERSION, frames[3], *verdict, b""], zmq.NOBLOCK)
        self._reader.wake()
