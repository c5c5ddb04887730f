"""A request plane inside one process, without sockets: what ``kvrelay.LLM`` runs on, and simulations and tests.

Messages go through the real codec and arrive in order on the next turn of the event loop. Either side can break a
connection.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from kvrelay.errors import AddressInUseError, ProtocolError, WorkerUnavailableError
from kvrelay.rpc.base import Admit, Peer
from kvrelay.rpc.wire import Message, decode_message, encode_message


class LoopbackNetwork:
    """Addresses of one imaginary machine."""

    def __init__(self) -> None:
        self._servers: dict[str, LoopbackRpcServer] = {}
        self._ports = itertools.count(1)

    def server(self, port: int = 0) -> LoopbackRpcServer:
        """A server that is not started yet; port 0 takes a free port."""
        return LoopbackRpcServer(self, f"tcp://loopback:{port or next(self._ports) + 10_000}")

    def client(self, address: str, public_key: str = "") -> LoopbackRpcClient:
        """A client of ``address`` that is not started yet. It need not prove that it holds the key."""
        return LoopbackRpcClient(self, address, public_key)

    def listen(self, server: LoopbackRpcServer) -> None:
        if server.address in self._servers:
            raise AddressInUseError(f"{server.address} is in use")
        self._servers[server.address] = server

    def unlisten(self, server: LoopbackRpcServer) -> None:
        self._servers.pop(server.address, None)

    def find(self, address: str) -> LoopbackRpcServer | None:
        return self._servers.get(address)


class LoopbackRpcServer:
    """RpcServer in memory."""

    def __init__(self, network: LoopbackNetwork, address: str) -> None:
        self._network = network
        self.address = address
        self._clients: dict[Peer, LoopbackRpcClient] = {}
        self._peer_ids = itertools.count(1)
        self._admit: Admit | None = None
        self._identities: dict[Peer, str] = {}
        self._on_message: Callable[[Peer, Message], None] | None = None
        self._on_peer_gone: Callable[[Peer], None] | None = None
        self.num_malformed = 0

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The clients that are connected."""
        return tuple(self._clients)

    def admit_by(self, admit: Admit) -> None:
        self._admit = admit

    def identity(self, peer: Peer) -> str:
        return self._identities.get(peer, "")

    def on_message(self, handler: Callable[[Peer, Message], None]) -> None:
        self._on_message = handler

    def on_peer_gone(self, handler: Callable[[Peer], None]) -> None:
        self._on_peer_gone = handler

    def send(self, peer: Peer, message: Message) -> bool:
        frame = encode_message(message)
        client = self._clients.get(peer)
        if client is None:
            return False
        if client.is_full:
            self.disconnect(peer)
            return False
        client.accept(lambda: client.deliver(frame))
        return True

    async def start(self) -> None:
        self._network.listen(self)

    async def close(self) -> None:
        self._network.unlisten(self)
        clients, self._clients = self._clients, {}
        for client in clients.values():
            client.accept(client.lose)

    async def accept(self, client: LoopbackRpcClient) -> Peer | None:
        """The peer id of a new client; None if the server refuses it."""
        identity = "" if self._admit is None else await self._admit(client.public_key)
        if identity is None:
            return None
        peer = Peer(next(self._peer_ids).to_bytes(5, "big"))
        self._clients[peer] = client
        self._identities[peer] = identity
        return peer

    def deliver(self, peer: Peer, frame: bytes) -> None:
        """A frame from a client; malformed ones are counted and dropped."""
        try:
            message = decode_message(frame)
        except ProtocolError:
            self.num_malformed += 1
            return
        if self._on_message is not None and peer in self._clients:
            self._on_message(peer, message)

    def disconnect(self, peer: Peer) -> None:
        client = self._clients.pop(peer, None)
        self._identities.pop(peer, None)
        if client is None:
            return
        client.accept(client.lose)
        if self._on_peer_gone is not None:
            asyncio.get_running_loop().call_soon(self._on_peer_gone, peer)


class LoopbackRpcClient:
    """RpcClient in memory."""

    is_full = False
    """Whether so many messages wait for it that the server gives it up: never, since all of them are read at once."""

    def __init__(self, network: LoopbackNetwork, address: str, public_key: str) -> None:
        self._network = network
        self.address = address
        self.public_key = public_key
        self._server: LoopbackRpcServer | None = None
        self._peer = Peer(b"")
        self._is_lost = False
        self._on_message: Callable[[Message], None] | None = None
        self._on_disconnect: list[Callable[[], None]] = []

    @property
    def is_connected(self) -> bool:
        return self._server is not None

    def on_message(self, handler: Callable[[Message], None]) -> None:
        self._on_message = handler

    def on_disconnect(self, handler: Callable[[], None]) -> None:
        if self._is_lost:
            asyncio.get_running_loop().call_soon(handler)
        else:
            self._on_disconnect.append(handler)

    def send(self, message: Message) -> None:
        self.send_frame(encode_message(message))

    def send_frame(self, frame: bytes) -> None:
        """Send raw bytes, to test how the other end handles garbage."""
        if self._server is None:
            raise WorkerUnavailableError(f"no connection to {self.address}")
        asyncio.get_running_loop().call_soon(self._server.deliver, self._peer, frame)

    async def start(self) -> None:
        server = self._network.find(self.address)
        peer = None if server is None else await server.accept(self)
        if server is None or peer is None:
            raise WorkerUnavailableError(f"{self.address} refused the connection")
        self._server, self._peer = server, peer

    async def close(self) -> None:
        server, self._server = self._server, None
        self._on_disconnect = []
        if server is not None:
            # After the messages that were sent before, like a socket.
            asyncio.get_running_loop().call_soon(server.disconnect, self._peer)

    def accept(self, event: Callable[[], None]) -> None:
        """Deliver something from the server on the next turn of the loop."""
        asyncio.get_running_loop().call_soon(event)

    def deliver(self, frame: bytes) -> None:
        if self._on_message is not None and self._server is not None:
            self._on_message(decode_message(frame))

    def lose(self) -> None:
        """The connection is gone."""
        if self._server is None:
            return
        self._server, self._is_lost = None, True
        handlers, self._on_disconnect = self._on_disconnect, []
        for handler in handlers:
            handler()
