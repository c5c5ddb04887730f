"""The connecting end of the request plane: a ZMQ DEALER on the running event loop.

It owns one connection and notices its end: a broken TCP connection at once, a silent host when heartbeats stop. After
its first loss it is dead; it never reconnects behind its owner's back, because what was in flight is lost.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable

import zmq

from kvrelay.core.messages import Message, decode_message, encode_message
from kvrelay.errors import ConfigError, PayloadTooLargeError, ProtocolError, WorkerUnavailableError
from kvrelay.rpc.heartbeat import DEFAULT_HEARTBEAT, Heartbeat
from kvrelay.rpc.zmq_socket import (
    MAX_FRAME_BYTES,
    PROBE_FRAME,
    ConnectionMonitor,
    CurveKeys,
    SocketReader,
    close_socket,
    configure,
    new_curve_keys,
)

_log = logging.getLogger(__name__)

_EVENTS = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.DISCONNECTED
    | zmq.Event.CLOSED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
DRAIN_BUDGET = 50_000


class _State(enum.Enum):
    NEW = "new"
    CONNECTING = "connecting"
    CONNECTED = "connected"
    LOST = "lost"
    CLOSED = "closed"


class ZmqRpcClient:
    """RpcClient over ZMQ. ``server_key`` is the server's public CURVE key; without ``curve_keys`` the client's own pair
    is made on the spot. A context given by the caller is shared, otherwise the client has one of its own."""

    def __init__(
        self,
        address: str,
        connect_timeout_s: float = 5.0,
        *,
        heartbeat: Heartbeat = DEFAULT_HEARTBEAT,
        server_key: bytes | None = None,
        curve_keys: CurveKeys | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.address = address
        self._connect_timeout_s = connect_timeout_s
        self._heartbeat = heartbeat
        self._server_key = server_key
        self._curve_keys = curve_keys
        self._owns_context = context is None
        self._shared_context = context
        self._state = _State.NEW
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._reader: SocketReader | None = None
        self._monitor: ConnectionMonitor | None = None
        self._handshake: asyncio.Future[bool] | None = None
        self.num_malformed = 0
        """Frames that were dropped because they did not decode."""
        self._on_message: Callable[[Message], None] | None = None
        self._on_disconnect: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"ZmqRpcClient({self.address}, {self._state.value})"

    @property
    def is_connected(self) -> bool:
        return self._state is _State.CONNECTED

    def on_message(self, handler: Callable[[Message], None]) -> None:
        """Messages that arrive before there is a handler wait for it."""
        self._on_message = handler
        if self._reader is not None:
            self._reader.wake()

    def on_disconnect(self, handler: Callable[[], None]) -> None:
        """A handler that comes after the loss is called on the next turn of the loop."""
        if self._state is _State.LOST:
            asyncio.get_running_loop().call_soon(handler)
        else:
            self._on_disconnect.append(handler)

    async def start(self) -> None:
        """Connect. Raises WorkerUnavailableError: refused at once, or no answer within the connect timeout."""
        self._context = self._shared_context or zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._state = _State.CONNECTING
        self._handshake = asyncio.get_running_loop().create_future()
        try:
            self._connect(self._socket)
            async with asyncio.timeout(self._connect_timeout_s):
                is_accepted = await self._handshake
        except TimeoutError as exc:
            await self.close()
            raise WorkerUnavailableError(f"{self.address} did not answer in {self._connect_timeout_s:g} s") from exc
        except zmq.ZMQError as exc:
            await self.close()
            raise ConfigError(f"{self.address!r} is no address of a worker: {exc}", param="address") from exc
        except asyncio.CancelledError:
            await self.close()
            raise
        if not is_accepted:
            await self.close()
            raise WorkerUnavailableError(f"{self.address} refused the connection")

    def send(self, message: Message) -> None:
        """Queue a message. Raises WorkerUnavailableError when the connection is gone or its queue is full, and
        PayloadTooLargeError for a message above the limit."""
        socket, reader = self._socket, self._reader
        if socket is None or reader is None or self._state is not _State.CONNECTED:
            raise WorkerUnavailableError(f"no connection to {self.address}")
        frame = encode_message(message)
        if len(frame) > MAX_FRAME_BYTES:
            raise PayloadTooLargeError(f"a {type(message).__name__} of {len(frame)} bytes is above {MAX_FRAME_BYTES}")
        reader.wake()
        try:
            socket.send(frame, zmq.NOBLOCK)
        except zmq.Again as exc:
            raise WorkerUnavailableError(f"the queue of messages to {self.address} is full") from exc
        except zmq.ZMQError as exc:
            raise WorkerUnavailableError(f"cannot send to {self.address}: {exc}") from exc

    async def close(self) -> None:
        """End the connection. What is queued has a quarter of a second to leave. Idempotent."""
        socket, self._socket = self._socket, None
        if socket is None or self._context is None:
            return
        if self._state is not _State.CONNECTED:
            socket.setsockopt(zmq.LINGER, 0)
        self._state = _State.CLOSED
        if self._reader is not None:
            self._reader.close()
        if self._monitor is not None:
            self._monitor.close()
        await close_socket(socket, self._context, self._owns_context)

    def _connect(self, socket: zmq.Socket[bytes]) -> None:
        configure(socket, self._heartbeat)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.IPV6, int("[" in self.address))
        if self._server_key is not None:
            keys = self._curve_keys or new_curve_keys()
            socket.curve_serverkey = self._server_key
            socket.curve_publickey = keys.public
            socket.curve_secretkey = keys.secret
        self._monitor = ConnectionMonitor(socket, _EVENTS, self._on_event)
        self._reader = SocketReader(socket, self._receive_one)
        socket.connect(self.address)

    def _receive_one(self) -> bool:
        socket = self._socket
        if socket is None:
            return False
        if self._on_message is None:
            # What has arrived waits; but the descriptor has to be appeased, or it wakes the loop for ever.
            socket.getsockopt(zmq.EVENTS)
            return False
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        if frames == [PROBE_FRAME]:
            return True
        try:
            if len(frames) != 1:
                raise ProtocolError(f"a message of {len(frames)} frames instead of one")
            message = decode_message(frames[0])
        except ProtocolError as exc:
            self.num_malformed += 1
            _log.warning("dropped a frame from %s: %s (%d so far)", self.address, exc, self.num_malformed)
            return True
        self._on_message(message)
        return True

    def _on_event(self, event: zmq.Event) -> None:
        if event is zmq.Event.HANDSHAKE_SUCCEEDED:
            if self._state is _State.CONNECTING:
                self._state = _State.CONNECTED
                self._answer(True)
        elif self._state is _State.CONNECTING:
            self._answer(False)
        elif self._state is _State.CONNECTED:
            self._lose()

    def _answer(self, is_accepted: bool) -> None:
        if self._handshake is not None and not self._handshake.done():
            self._handshake.set_result(is_accepted)

    def _lose(self) -> None:
        if self._reader is not None:
            # What the server said before it left comes before the news that it left.
            self._reader.drain(DRAIN_BUDGET)
        self._state = _State.LOST
        handlers, self._on_disconnect = self._on_disconnect, []
        for handler in handlers:
            handler()
