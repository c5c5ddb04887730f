"""The request plane's contract: typed messages between two processes, in order, with notice when the other end is gone.

What it owns: connections, framing, backpressure, liveness. What it does not know: what a message means.
Client and server are asymmetric only in who connects; both ends send whenever they like.
All methods are to be called on the event loop that the object was started on; ``send`` never blocks and never waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NewType, Protocol

from kvrelay.core.messages import Message

Peer = NewType("Peer", bytes)
"""A connected client, as its server knows it (the ZMQ routing id)."""

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""A larger message is refused by its sender, and ends the connection that it arrives on."""


Admit = Callable[[str], Awaitable[str | None]]
"""Gives the identity of the client with that public key (Z85 text), or None to refuse it. Must end in bounded time."""


class RpcServer(Protocol):
    """Accepts clients on one address."""

    @property
    def address(self) -> str:
        """``tcp://HOST:PORT`` that others connect to."""

    def admit_by(self, admit: Admit) -> None:
        """Let in only clients that ``admit`` knows by the key whose possession they have proved. To be called before
        ``start``, of a server that has keys. Without it every client is let in that can connect."""

    def identity(self, peer: Peer) -> str:
        """What ``admit`` has answered for the peer's connection; empty for a peer that is gone or was not asked for."""

    def on_message(self, handler: Callable[[Peer, Message], None]) -> None:
        """Called for every well-formed message; a malformed frame is logged, counted and dropped."""

    def on_peer_gone(self, handler: Callable[[Peer], None]) -> None:
        """Called once when a client's connection ends, its heartbeats stop, or this side ends the connection."""

    def send(self, peer: Peer, message: Message) -> bool:
        """Queue a message.

        False when the peer is gone, or does not read, so that its queue is full: then the connection ends, as
        ``disconnect`` does it, because nothing may follow a message that was lost. Raises PayloadTooLargeError for a
        message above MAX_FRAME_BYTES; the connection stays.
        """

    def disconnect(self, peer: Peer) -> None:
        """End the connection for both sides. ``on_peer_gone`` follows on the next turn of the loop, and nothing that
        the peer says is heard any more. The client gets what was queued before, then its ``on_disconnect``; if it does
        not read, as soon as it does. Unknown peers are ignored."""

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
