"""The connecting end of the request plane: a ZMQ DEALER on the running event loop.

It owns one connection and detects its end: a broken TCP connection at once, a silent host when heartbeats stop. After
the loss the client is dead. It never reconnects by itself, because the messages in flight are lost.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable

import zmq

from kvrelay.core.zmq_keys import CurveKeys, new_curve_keys
from kvrelay.errors import ConfigError, ProtocolError, WorkerUnavailableError
from kvrelay.rpc.heartbeat import DEFAULT_HEARTBEAT, Heartbeat
from kvrelay.rpc.wire import Message, decode_message, encode_message
from kvrelay.rpc.zmq_socket import FAREWELL_FRAME, NOBLOCK, PROBE_FRAME, Context, Endpoint

_log = logging.getLogger(__name__)

NEVER_MS = 24 * 3600 * 1000
"""Time until ZMQ would reconnect; the owner has closed the client by then. ZMQ's value for never, -1, would also drop
messages that have arrived but are unread when the connection ends."""

_EVENTS = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.DISCONNECTED
    | zmq.Event.CLOSED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


class _State(enum.Enum):
    NEW = "new"
    CONNECTING = "connecting"
    CONNECTED = "connected"
    LOST = "lost"
    CLOSED = "closed"


class ZmqRpcClient:
    """RpcClient over ZMQ. ``server_key`` is the server's public CURVE key. Without ``curve_keys`` the client generates
    its own pair. Clients with the same ``context`` share its I/O thread."""

    def __init__(
        self,
        address: str,
        connect_timeout_s: float = 5.0,
        *,
        heartbeat: Heartbeat = DEFAULT_HEARTBEAT,
        server_key: bytes | None = None,
        curve_keys: CurveKeys | None = None,
        context: Context | None = None,
    ) -> None:
        self.address = address
        self._connect_timeout_s = connect_timeout_s
        self._heartbeat = heartbeat
        self._server_key = server_key
        self._curve_keys = curve_keys
        self._context = context
        self._state = _State.NEW
        self.endpoint: Endpoint | None = None
        """From ``start`` to ``close``."""
        self._handshake: asyncio.Future[bool] | None = None
        self.num_malformed = 0
        """Number of frames dropped because they did not decode."""
        self._on_message: Callable[[Message], None] | None = None
        self._on_disconnect: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"ZmqRpcClient({self.address}, {self._state.value})"

    @property
    def is_connected(self) -> bool:
        return self._state is _State.CONNECTED

    def on_message(self, handler: Callable[[Message], None]) -> None:
        """Messages that arrive before the handler is set wait for it."""
        self._on_message = handler
        if self.endpoint is not None:
            self.endpoint.reader.wake()

    def on_disconnect(self, handler: Callable[[], None]) -> None:
        """A handler that is set after the loss is called on the next turn of the loop."""
        if self._state is _State.LOST:
            asyncio.get_running_loop().call_soon(handler)
        else:
            self._on_disconnect.append(handler)

    async def start(self) -> None:
        """Connect. Raises WorkerUnavailableError: refused at once, or no answer within the connect timeout."""
        self.endpoint = Endpoint(zmq.DEALER, self._heartbeat, self._receive_one, _EVENTS, self._on_event, self._context)
        self._state = _State.CONNECTING
        self._handshake = asyncio.get_running_loop().create_future()
        try:
            self._connect(self.endpoint)
            async with asyncio.timeout(self._connect_timeout_s):
                is_accepted = await self._handshake
        except TimeoutError as exc:
            await self.close()
            raise WorkerUnavailableError(f"{self.address} did not answer in {self._connect_timeout_s:g} s") from exc
        except zmq.ZMQError as exc:
            await self.close()
            raise ConfigError(f"{self.address!r} is not the address of a worker: {exc}", param="address") from exc
        except asyncio.CancelledError:
            await self.close()
            raise
        if not is_accepted:
            await self.close()
            raise WorkerUnavailableError(f"{self.address} refused the connection")

    def send(self, message: Message) -> None:
        """Queue a message. Raises WorkerUnavailableError if the connection is gone or its queue is full, and
        PayloadTooLargeError for a message above the limit."""
        endpoint = self.endpoint
        if endpoint is None or self._state is not _State.CONNECTED:
            raise WorkerUnavailableError(f"no connection to {self.address}")
        frame = encode_message(message)
        endpoint.reader.wake()
        try:
            endpoint.socket.send(frame, NOBLOCK)
        except zmq.Again as exc:
            raise WorkerUnavailableError(f"the queue of messages to {self.address} is full") from exc
        except zmq.ZMQError as exc:
            raise WorkerUnavailableError(f"cannot send to {self.address}: {exc}") from exc

    async def close(self) -> None:
        """End the connection. Queued messages have a quarter of a second to leave. Idempotent."""
        endpoint, self.endpoint = self.endpoint, None
        if endpoint is None:
            return
        is_connected, self._state = self.is_connected, _State.CLOSED
        await endpoint.close(drop_queued=not is_connected)

    def _connect(self, endpoint: Endpoint) -> None:
        socket = endpoint.socket
        socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        socket.setsockopt(zmq.IPV6, int("[" in self.address))
        if self._server_key is not None:
            endpoint.use_curve(self._curve_keys or new_curve_keys(), self._server_key)
        socket.connect(self.address)

    def _receive_one(self) -> int | None:
        endpoint = self.endpoint
        if endpoint is None or self._on_message is None:
            return None  # received messages wait for a handler
        frames = endpoint.receive()
        if frames is None:
            return None
        frame = frames[0].buffer
        size = len(frame)
        if size <= len(FAREWELL_FRAME) and self._is_signal(frame):
            return size
        try:
            if len(frames) != 1:
                raise ProtocolError(f"a message of {len(frames)} frames instead of one")
            message = decode_message(frame)
        except ProtocolError as exc:
            self.num_malformed += 1
            _log.warning("dropped a frame from %s: %s (%d so far)", self.address, exc, self.num_malformed)
            return size
        self._on_message(message)
        return size

    def _is_signal(self, frame: memoryview) -> bool:
        """Take one of the frames that are no messages."""
        if frame == FAREWELL_FRAME and self._state is _State.CONNECTED:
            _log.warning("%s has ended the connection", self.address)
            self._lose()
        return frame in (FAREWELL_FRAME, PROBE_FRAME)

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
        if self.endpoint is not None:
            # Deliver the server's last messages before the notice that it is gone.
            self.endpoint.reader.drain()
        self._state = _State.LOST
        handlers, self._on_disconnect = self._on_disconnect, []
        for handler in handlers:
            handler()
