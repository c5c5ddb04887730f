"""The request plane's contract: typed messages between two processes, in order, with notice when the other end is gone.

What it owns: connections, framing, backpressure, liveness. What it does not know: what a message means.
Client and server are asymmetric only in who connects; both ends send whenever they like.
All methods are to be called on the event loop that the object was started on; ``send`` never blocks and never waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NewType, Protocol

from kvrelay.core.messages import Message

Peer = NewType("Peer", bytes)
"""A connected client, as its server knows it (the ZMQ routing id)."""


class RpcServer(Protocol):
    """Accepts clients on one address."""

    @property
    def address(self) -> str:
        """``tcp://HOST:PORT`` that others connect to."""

    def on_message(self, handler: Callable[[Peer, Message], None]) -> None:
        """Called for every well-formed message; a malformed frame is logged, counted and dropped."""

    def on_peer_gone(self, handler: Callable[[Peer], None]) -> None:
        """Called once when a client's connection ends or its heartbeats stop."""

    def send(self, peer: Peer, message: Message) -> bool:
        """Queue a message. False when the peer is gone or its outgoing queue is full (then it is dropped)."""

    async def start(self) -> None:
        """Bind. Raises AddressInUseError."""

    async def close(self) -> None: ...


class RpcClient(Protocol):
    """One connection to one server."""

    @property
    def is_connected(self) -> bool: ...

    def on_message(self, handler: Callable[[Message], None]) -> None: ...

    def on_disconnect(self, handler: Callable[[], None]) -> None:
        """Called once, within 1 s of a broken connection, or when heartbeats stop (silent host). The client is then
        dead; make another one."""

    def send(self, message: Message) -> None:
        """Queue a message. Raises WorkerUnavailableError when the connection is gone or its queue is full."""

    async def start(self) -> None:
        """Connect. Raises WorkerUnavailableError when there is no answer within the connect timeout."""

    async def close(self) -> None: ...
