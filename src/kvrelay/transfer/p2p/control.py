"""The control connections of the peer-to-peer transport, and the thread that owns them.

    other threads ── call(function) ──> pipe ──> [ poll: pipe, ROUTER, DEALERs, their monitors, ZAP ] ──> handlers

One thread runs every handler and every function handed to ``call``, one at a time, so what they share needs no lock. It
sleeps until something arrives or a timer is due. A ROUTER accepts peers; one DEALER per peer reaches out to it. With
keys both use CURVE, and only workers whose keys were learned get in: their frames then carry their worker id.

It does not know what messages mean. A frame that cannot be decoded, comes before its Hello, or claims another sender is
counted and dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from kvrelay.config.addresses import host_port
from kvrelay.core.zmq_keys import CurveKeys, bind_tcp, use_curve
from kvrelay.errors import FatalError, ProtocolError, TransferError
from kvrelay.transfer.p2p.messages import MAX_FRAME_BYTES, Message, PeerHello, Unknown, decode, encode
from kvrelay.transfer.values import worker_of

T = TypeVar("T")

HIGH_WATER_MARK = 10_000
MAX_CALLERS = 4096
"""Control connections that may be known at once; the oldest is forgotten."""
HEARTBEAT_S = 2.0
HEARTBEAT_TIMEOUT_S = 10.0
READ_BUDGET = 64
HANDSHAKE_MS = 2000
"""After so long a client that was not admitted tries again: discovery may tell of it late."""
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_KEY_FRAME, _NUM_ZAP_FRAMES, _KEY_BYTES = 8, 9, 32

_log = logging.getLogger(__name__)


class _Dialled(msgspec.Struct, eq=False):
    """A connection that we opened."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    was_up: bool = False


class ControlThread:
    """Handlers run on the thread: ``on_request(worker_id, message, payload)`` for what a peer's DEALER sends,
    ``on_reply`` for answers on our DEALERs, ``on_lost(worker_id)`` when a connection of ours has ended, and
    ``on_timer`` once the monotonic time that ``next_timer_s`` gives has come. A handler that raises is logged; the
    thread goes on."""

    def __init__(
        self,
        worker_id: str,
        host: str,
        port: int,
        keys: CurveKeys | None,
        *,
        on_request: Callable[[str, Message, memoryview], None],
        on_reply: Callable[[str, Message, memoryview], None],
        on_lost: Callable[[str], None],
        on_timer: Callable[[], None],
        next_timer_s: Callable[[], float | None],
    ) -> None:
        self._worker_id = worker_id
        self._host, self._port, self._keys = host, port, keys
        self._on_request, self._on_reply = on_request, on_reply
        self._on_lost, self._on_timer, self._next_timer_s = on_lost, on_timer, next_timer_s
        self._known_keys: dict[str, str] = {}
        self._callers: OrderedDict[bytes, str] = OrderedDict()
        self._routes: dict[str, bytes] = {}
        self._dialled: dict[str, _Dialled] = {}
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._is_closed = False
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._zap: zmq.Socket[bytes] | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller = zmq.Poller()
        self._thread = threading.Thread(target=self._run, name="p2p-control", daemon=True)
        self.address = ""
        self.num_dropped = 0
        """Frames that were malformed, or that their sender had no right to."""

    def __repr__(self) -> str:
        return f"ControlThread({self.address}, {len(self._callers)} callers, {len(self._dialled)} dialled)"

    # -- from any thread ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind and run. Raises FatalError."""
        try:
            self._bind()
        except zmq.ZMQError as exc:
            self._close_sockets()
            raise FatalError(f"transport p2p cannot listen on {host_port(self._host, self._port)}: {exc}") from exc
        self._thread.start()

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Run it on the thread, in order. Nothing once the thread is closed."""
        with self._lock:
            if self._is_closed:
                return
            self._calls.put(lambda: function(*arguments))
            # The pipe is full only if the thread has not read a thousand wakes.
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_write, b"\0")

    def ask(self, function: Callable[[], T], timeout_s: float = 30.0) -> T:
        """Run it on the thread and wait for its result. Raises what it raises, or TransferError."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as exc:  # noqa: BLE001 - it goes to the caller
                future.set_exception(exc)

        if not self._thread.is_alive():
            raise TransferError("the control thread is closed")
        self.call(run)
        try:
            return future.result(timeout_s)
        except TimeoutError as exc:
            raise TransferError("the control thread does not answer") from exc

    def close(self) -> None:
        """Stop the thread, close all connections. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_write, b"\0")
        if self._thread.ident is None:
            self._close_sockets()
        else:
            self._thread.join()

    # -- on the thread ------------------------------------------------------------------------------------------------

    def learn(self, worker_id: str, public_key: str) -> None:
        """From now on, this key admits that worker, and no earlier key of it does."""
        for key in [key for key, holder in self._known_keys.items() if holder == worker_id]:
            del self._known_keys[key]
        if public_key:
            self._known_keys[public_key] = worker_id

    def dial(self, worker_id: str, address: str, public_key: str) -> None:
        """Open a connection and say Hello. Raises TransferError for an impossible address or key."""
        self.hang_up(worker_id)
        socket = self._context.socket(zmq.DEALER)
        monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_EVENTS)
        try:
            self._configure(socket)
            if self._keys is not None and public_key:
                use_curve(socket, self._keys, public_key.encode())
            socket.setsockopt(zmq.IPV6, int("[" in address))
            socket.connect(address)
        except (zmq.ZMQError, ValueError, TypeError) as exc:
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)
            raise TransferError(f"cannot connect to worker {worker_id} at {address!r}: {exc}", peer=worker_id) from exc
        self._dialled[worker_id] = _Dialled(socket, monitor)
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        self.send(worker_id, PeerHello(self._worker_id, worker_id))

    def hang_up(self, worker_id: str) -> None:
        """Close the connection that we opened, if there is one."""
        dialled = self._dialled.pop(worker_id, None)
        if dialled is not None:
            self._poller.unregister(dialled.socket)
            self._poller.unregister(dialled.monitor)
            dialled.socket.disable_monitor()
            dialled.monitor.close(0)
            dialled.socket.close(100)

    def send(self, worker_id: str, message: Message, payload: Any = None) -> bool:
        """On the connection that we opened. False: there is none, or its queue is full."""
        dialled = self._dialled.get(worker_id)
        return dialled is not None and _send(dialled.socket, [encode(message)], payload)

    def answer(self, worker_id: str, message: Message, payload: Any = None) -> bool:
        """On the connection that the peer opened."""
        route = self._routes.get(worker_id)
        return route is not None and _send(self._router, [route, encode(message)], payload)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        socket.set_hwm(HIGH_WATER_MARK)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, round(HEARTBEAT_S * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(HEARTBEAT_TIMEOUT_S * 1000))
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.LINGER, 0)

    def _bind(self) -> None:
        router = self._router
        self._configure(router)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._keys is not None:
            use_curve(router, self._keys)
            router.setsockopt(zmq.ZAP_DOMAIN, b"kvrelay-p2p")
            router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            self._zap = self._context.socket(zmq.ROUTER)
            self._zap.bind(_ZAP_ADDRESS)
            self._poller.register(self._zap, zmq.POLLIN)
        self.address = bind_tcp(router, self._host, self._port)
        self._poller.register(router, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._turn()
        finally:
            self._close_sockets()

    def _turn(self) -> None:
        wait_ms, due_s = None, self._next_timer_s()
        if due_s is not None:
            wait_ms = max(0, int((due_s - time.monotonic()) * 1000) + 1)
        ready = dict(self._poller.poll(wait_ms))
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            self._run_calls()
        if self._zap is not None and self._zap in ready:
            self._guarded(self._admit_one)
        if self._router in ready:
            self._guarded(self._read, self._router, self._request)
        for worker_id, dialled in list(self._dialled.items()):
            if dialled.socket in ready:
                self._guarded(self._read, dialled.socket, partial(self._reply, worker_id))
            if dialled.monitor in ready:
                self._guarded(self._read_events, worker_id, dialled)
        if due_s is not None and time.monotonic() >= due_s:
            self._guarded(self._on_timer)

    def _run_calls(self) -> None:
        while True:
            try:
                function = self._calls.get_nowait()
            except queue.Empty:
                return
            self._guarded(function)

    def _guarded(self, function: Callable[..., object], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception:  # noqa: BLE001 - the outermost loop of this thread: one peer must not make us deaf to others
            _log.exception("a control message failed")

    def _read(self, socket: zmq.Socket[bytes], handle: Callable[[list[zmq.Frame]], object]) -> None:
        for _ in range(READ_BUDGET):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                handle(frames)
            except zmq.Again:
                return
            except ProtocolError as exc:
                self.num_dropped += 1
                _log.debug("dropped a control frame: %s (%d so far)", exc, self.num_dropped)
            if socket.closed:
                return

    def _request(self, frames: list[zmq.Frame]) -> None:
        """What a peer says on the connection that it opened. Raises ProtocolError."""
        if len(frames) not in (2, 3):
            raise ProtocolError(f"{len(frames)} frames")
        message = decode(frames[1].buffer)
        route = frames[0].bytes
        if isinstance(message, PeerHello):
            self._greeted(route, message, str(frames[1].get("User-Id")) if self._keys is not None else message.sender)
        worker_id = self._callers.get(route)
        if worker_id is None:
            # Perhaps one of too many, and forgotten: it has to begin anew.
            _send(self._router, [route, encode(Unknown())], None)
            raise ProtocolError(f"{type(message).__name__} from a connection that has not said Hello")
        if not isinstance(message, PeerHello):
            self._guarded(self._on_request, worker_id, message, _payload(frames[2:]))

    def _greeted(self, route: bytes, hello: PeerHello, identity: str) -> None:
        if worker_of(hello.sender) != worker_of(identity):
            raise ProtocolError(f"{identity} calls itself {hello.sender}")
        if hello.target != self._worker_id:
            raise ProtocolError(f"{hello.sender} means {hello.target}, not us")
        old = self._routes.pop(hello.sender, None)
        if old is not None:
            self._callers.pop(old, None)
        self._callers[route] = hello.sender
        self._routes[hello.sender] = route
        if len(self._callers) > MAX_CALLERS:
            _, gone = self._callers.popitem(last=False)
            self._routes.pop(gone, None)

    def _reply(self, worker_id: str, frames: list[zmq.Frame]) -> None:
        """What a peer says on the connection that we opened. Raises ProtocolError."""
        message = decode(frames[0].buffer)
        if isinstance(message, Unknown):
            self._ended(worker_id)
        else:
            self._guarded(self._on_reply, worker_id, message, _payload(frames[1:]))

    def _read_events(self, worker_id: str, dialled: _Dialled) -> None:
        while self._dialled.get(worker_id) is dialled:
            try:
                event = parse_monitor_message(dialled.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                dialled.was_up = True
            elif event == zmq.EVENT_DISCONNECTED and dialled.was_up:
                self._ended(worker_id)

    def _ended(self, worker_id: str) -> None:
        self.hang_up(worker_id)
        self._on_lost(worker_id)

    def _admit_one(self) -> None:
        """libzmq asks whether the holder of a key may connect (ZAP, ZeroMQ RFC 27). It asks again later after a no."""
        assert self._zap is not None
        frames = self._zap.recv_multipart(zmq.NOBLOCK)
        if len(frames) != _NUM_ZAP_FRAMES:
            return
        key = frames[_KEY_FRAME]
        worker_id = self._known_keys.get(z85.encode(key).decode()) if len(key) == _KEY_BYTES else None
        verdict = [b"300", b"unknown key", b""] if worker_id is None else [b"200", b"OK", worker_id.encode()]
        self._zap.send_multipart([frames[0], b"", b"1.0", frames[3], *verdict, b""])

    def _close_sockets(self) -> None:
        for worker_id in list(self._dialled):
            self.hang_up(worker_id)
        self._router.close(0)
        if self._zap is not None:
            self._zap.close(0)
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)


def _payload(frames: list[zmq.Frame]) -> memoryview:
    return frames[0].buffer if frames else memoryview(b"")


def _send(socket: zmq.Socket[bytes], frames: list[bytes], payload: Any) -> bool:
    try:
        socket.send_multipart(frames if payload is None else [*frames, payload], zmq.NOBLOCK)
    except zmq.ZMQError:
        return False  # its queue is full, or the peer is gone; whoever waits for an answer has a deadline
    return True
