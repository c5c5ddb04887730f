"""The request plane's contract: typed messages between two processes, in order, with notice when the other end is gone.

It owns connections, framing, backpressure and liveness. It does not know what a message means. The client connects to
the server; apart from that the two are alike, and both ends send at any time. Call all methods on the event loop on
which the object was started. ``send`` never blocks and never waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NewType, Protocol

from kvrelay.rpc.wire import Message

Peer = NewType("Peer", bytes)
"""A connected client, as its server knows it (the ZMQ routing id)."""

Admit = Callable[[str], Awaitable[str | None]]
"""Returns the identity of the client with that public key (Z85 text), or None to refuse it, in bounded time."""


class RpcServer(Protocol):
    """Accepts clients on one address."""

    @property
    def address(self) -> str:
        """``tcp://HOST:PORT`` that others connect to."""

    def admit_by(self, admit: Admit) -> None:
        """Admit only clients whose proven key ``admit`` knows. Call this before ``start``, on a server that has keys.

        Without it, the server admits every client that can connect.
        """

    def identity(self, peer: Peer) -> str:
        """The identity that ``admit`` returned for the peer's connection; empty if the peer is gone or there is no
        ``admit``."""

    def on_message(self, handler: Callable[[Peer, Message], None]) -> None:
        """Called for every well-formed message; a malformed frame is logged, counted and dropped."""

    def on_peer_gone(self, handler: Callable[[Peer], None]) -> None:
        """Called once when a client's connection ends, its heartbeats stop, or this side ends the connection."""

    def send(self, peer: Peer, message: Message) -> bool:
        """Queue a message.

        False if the peer is gone, or if its queue is full because it does not read. In the second case the connection
        ends as with ``disconnect``, because no message may follow a lost one. Raises PayloadTooLargeError for a message
        above MAX_FRAME_BYTES; the connection stays.
        """

    def disconnect(self, peer: Peer) -> None:
        """End the connection for both sides.

        ``on_peer_gone`` follows on the next turn of the loop; later messages of the peer are dropped. The client first
        gets the messages queued before, then its ``on_disconnect``, once it reads. Unknown peers are ignored.
        """

    async def start(self) -> None:
        """Bind. Raises AddressInUseError."""

    async def close(self) -> None: ...


class RpcClient(Protocol):
    """One connection to one server."""

    @property
    def is_connected(self) -> bool: ...

    def on_message(self, handler: Callable[[Message], None]) -> None: ...

    def on_disconnect(self, handler: Callable[[], None]) -> None:
        """``handler`` is called once: within 1 s of a broken connection, or when heartbeats stop (silent host). The
        client is dead then; make another one."""

    def send(self, message: Message) -> None:
        """Queue a message. Raises WorkerUnavailableError if the connection is gone or its queue is full."""

    async def start(self) -> None:
        """Connect. Raises WorkerUnavailableError if there is no answer within the connect timeout."""

    async def close(self) -> None: ...
