"""A client's connection: bytes in, exchanges out, and the limits that keep a hostile client cheap.

    data_received ──> RequestReader ──> Exchange ──> application (one at a time)

A connection owns keep-alive, pipelining (requests wait in order, unread beyond a few kB), deadlines for slow senders,
the end of slow readers, and half-closed connections. It does not know routes, or how requests are parsed.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import msgspec

from kvrelay.http.exchange import Exchange, HttpApplication, HttpRequest, Response, encode_response
from kvrelay.http.limits import ByteBudget, HttpLimits
from kvrelay.http.reading import CONTINUE, RequestReader

PIECE_BYTES = 8192
"""Bytes parsed at once: the most that is read ahead of a request that is being answered."""
PROBE_REPLY_S = 0.1
MAX_PIECES = 64
"""This many pieces are written at once. It keeps what has been computed from waiting long: a piece takes some 5 us to
make, and a system call more than that."""


class ConnectionOwner(Protocol):
    """The server, to its connections."""

    application: HttpApplication
    limits: HttpLimits
    is_closing: bool
    buffered: ByteBudget[HttpConnection]
    unsent: ByteBudget[HttpConnection]

    def connected(self, connection: HttpConnection) -> None: ...

    def disconnected(self, connection: HttpConnection) -> None: ...

    def write_soon(self, connection: HttpConnection) -> None:
        """The connection has begun to queue: its bytes go out at the end of this turn of the loop, or with those of
        others when many wait."""


class HttpConnection(asyncio.Protocol):
    """An accepted connection. Implements ``RequestListener`` and ``Outlet``."""

    def __init__(self, owner: ConnectionOwner, now: Callable[[], float]) -> None:
        self._owner = owner
        self._now = now
        self._limits = owner.limits
        self._reader = RequestReader(owner.limits, owner.application, self)
        self.transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._waiting: deque[tuple[HttpRequest, bool]] = deque()
        self._held = bytearray()
        self._refusal: Response | None = None
        self._owes_continue = False
        self._is_half_closed = False
        self._is_paused = False
        self._deadline_s: float | None = None
        self._unwritten: list[bytes] = []
        self._num_sent_bytes = 0
        self._num_taken_bytes = 0
        self._taken_at_s = now()

    @property
    def num_sheddable_bytes(self) -> int:
        """Bytes of an upload in progress."""
        return self._reader.num_body_bytes + len(self._held)

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes of requests that the application has not received, or not released yet."""
        num_bytes = self._reader.num_body_bytes + len(self._held)
        if self._exchange is not None:
            num_bytes += len(self._exchange.request.body)
        for request, _ in self._waiting:
            num_bytes += len(request.body)
        return num_bytes

    @property
    def num_unsent_bytes(self) -> int:
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    def abort(self) -> None:
        """Cut the connection off."""
        if self.transport is not None:
            self.transport.abort()
            if self._exchange is not None:
                self._exchange.gone()

    def close_if_idle(self) -> None:
        """The server shuts down: an idle connection ends now, a busy one after its answer."""
        if not self.is_busy and self.transport is not None:
            self._close(self.transport)

    def turn_away(self) -> None:
        """The server has too many connections: tell the client, and end."""
        self._reader.refuse(self._unavailable("there are too many connections"))

    def shed(self) -> None:
        """The server's clients upload too much at once, and this one holds the most."""
        self._held.clear()
        if self.is_busy:
            self.abort()
        else:
            self._reader.refuse(self._unavailable("too many request bytes are buffered (max_buffered_bytes)"))

    def check_deadline(self, now_s: float) -> None:
        """Called by the server's sweep: end a client that sends too slowly, reads nothing, or is idle."""
        transport = self.transport
        if transport is None:
            return
        self._check_peer()
        if self._is_stalled(transport, now_s):
            self.abort()
        elif self._deadline_s is None or now_s < self._deadline_s:
            return
        elif self._reader.is_in_message and not self._reader.is_refused:
            self._reader.refuse(self._reader.error_response(408, "the request did not arrive in time"))
        elif not self.num_unsent_bytes:
            self._close(transport)

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not isinstance: uvloop's transports are not instances of asyncio's classes.
        self.transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._deadline_s = self._now() + self._limits.head_timeout_s
        self._owner.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self._exchange = self._exchange, None
        self.transport = self._refusal = None
        self._unwritten.clear()
        self._waiting.clear()
        self._held.clear()
        self._reader.close()
        self._owner.disconnected(self)
        if exchange is not None:
            exchange.gone()

    def data_received(self, data: bytes) -> None:
        if self._reader.is_refused:
            return
        if self.is_busy:
            self._hold(data)
        else:
            self._feed(data)

    def eof_received(self) -> bool:
        """The client sends nothing more. It may still read, or be gone: TCP does not tell. A request in progress is
        answered; a probe finds out whether the client still reads. Over TLS the connection ends."""
        transport, exchange = self.transport, self._exchange
        if transport is None or not self.is_busy or transport.get_extra_info("ssl_object") is not None:
            return False
        self._is_half_closed = True
        if exchange is not None and not exchange.is_started and exchange.request.http_minor >= 1:
            # Any client must accept an interim response (RFC 9110, 15.2); a closed socket answers with a reset.
            self._write(CONTINUE)
            asyncio.get_running_loop().call_later(PROBE_REPLY_S, self._check_peer)
        return True

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._owner.unsent.forget(self)

    # -- Outlet -------------------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Queue bytes for the client. All of one turn of the loop are written at its end, in one system call:
        the chunks of a stream that is behind, or a stream's last chunk and its end."""
        pieces = self._unwritten
        pieces.append(data)
        if len(pieces) == 1:
            self._owner.write_soon(self)
        elif len(pieces) == MAX_PIECES:
            self.write_queued()

    def write_queued(self) -> None:
        """The turn of the loop ends."""
        pieces = self._unwritten
        if not pieces:
            return
        data = b"".join(pieces)
        pieces.clear()
        transport = self.transport
        if transport is None:
            return
        transport.write(data)
        self._num_sent_bytes += len(data)
        if self._is_paused:
            self._owner.unsent.update(self)

    def body_changed(self) -> None:
        """The application no longer needs the request's body, or has put another one in its place."""
        if self.transport is not None:
            self._owner.buffered.update(self)

    def exchange_done(self, keep_alive: bool) -> None:
        """The application has answered: continue with the next request, or end."""
        self._exchange = None
        transport = self.transport
        if transport is None:
            return
        if self._waiting or self._held:
            self._owner.buffered.update(self)
        else:
            self._owner.buffered.forget(self)
        if not keep_alive or self._owner.is_closing:
            self._close(transport)
        elif self._waiting or self._held or self._refusal is not None or self._owes_continue:
            # On another turn of the loop, so that pipelined requests do not nest.
            asyncio.get_running_loop().call_soon(self._go_on)
        elif self._is_half_closed:
            self._close(transport)
        else:
            self._await_client()

    # -- RequestListener ----------------------------------------------------------------------------------------------

    def on_begin(self) -> None:
        if not self.is_busy:
            self._deadline_s = self._now() + self._limits.head_timeout_s

    def on_head(self, expects_continue: bool) -> None:
        if not self.is_busy:
            self._deadline_s = self._now() + self._limits.body_timeout_s
        if expects_continue and self.is_busy:
            # Not in the middle of the answer before it.
            self._owes_continue = True
        elif expects_continue:
            self._write(CONTINUE)

    def on_request(self, request: HttpRequest, keep_alive: bool) -> None:
        self._owes_continue = False
        if self.is_busy:
            self._waiting.append((request, keep_alive))
        else:
            self._start(request, keep_alive)

    def on_refusal(self, response: Response) -> None:
        self._owes_continue = False
        self._owner.buffered.update(self)
        if self.is_busy:
            # Earlier requests are answered first.
            self._refusal = response
        else:
            self._send_refusal(response)

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered, or waits ahead of any data that arrives now."""
        return bool(self._exchange or self._waiting or self._held)

    def _feed(self, data: bytes) -> None:
        for at in range(0, len(data), PIECE_BYTES):
            if self._reader.is_refused or self.transport is None:
                return
            if self.is_busy:
                self._hold(data[at:])
                return
            self._reader.feed(data[at : at + PIECE_BYTES])
        if self._reader.num_body_bytes:
            self._owner.buffered.update(self)

    def _hold(self, data: bytes) -> None:
        """Keep data unparsed that arrives while a request is answered, and pause reading."""
        self._held += data
        if self.transport is not None:
            self.transport.pause_reading()
        self._owner.buffered.update(self)

    def _start(self, request: HttpRequest, keep_alive: bool) -> None:
        self._deadline_s = None
        self._exchange = Exchange(request, self, keep_alive)
        if request.body:
            self._owner.buffered.update(self)
        self._owner.application.handle(self._exchange)

    def _go_on(self) -> None:
        transport = self.transport
        if self._exchange is not None or transport is None:
            return
        if self._waiting:
            self._start(*self._waiting.popleft())
            return
        if self._refusal is not None:
            self._send_refusal(self._refusal)
            return
        if self._owes_continue:
            self._owes_continue = False
            self._write(CONTINUE)
        self._await_client()
        data = bytes(self._held)
        self._held.clear()
        if data:
            if not self._is_half_closed:
                transport.resume_reading()
            self._feed(data)
            self._owner.buffered.update(self)
        if self._is_half_closed and not self.is_busy and not self._reader.is_refused:
            self._close(transport)

    def _await_client(self) -> None:
        """It is the client's turn to send the rest of a request, or the next one."""
        is_in_message = self._reader.is_in_message
        self._deadline_s = self._now() + (self._limits.body_timeout_s if is_in_message else self._limits.idle_timeout_s)

    def _is_stalled(self, transport: asyncio.Transport, now_s: float) -> bool:
        """Whether the client has stopped reading, and so much is unsent that it matters."""
        num_unsent = transport.get_write_buffer_size()
        num_taken = self._num_sent_bytes - num_unsent
        if not num_unsent or num_taken != self._num_taken_bytes:
            self._num_taken_bytes, self._taken_at_s = num_taken, now_s
            return False
        stalled_s = now_s - self._taken_at_s
        if self._exchange is None and stalled_s >= self._limits.idle_timeout_s:
            return True
        return num_unsent > self._limits.max_unsent_bytes and stalled_s >= self._limits.stall_timeout_s

    def _check_peer(self) -> None:
        """Whether the probe of a half-closed connection was answered with a reset."""
        if self._is_half_closed and self.transport is not None:
            sock = self.transport.get_extra_info("socket")
            if sock is not None and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.abort()

    def _unavailable(self, message: str) -> Response:
        response = self._reader.error_response(503, message)
        return msgspec.structs.replace(response, headers=(*response.headers, (b"retry-after", b"1")))

    def _send_refusal(self, response: Response) -> None:
        """Answer at once and read no further request.

        The client may still be sending. Closing with unread data would reset the connection and lose the answer, so
        incoming data is read and discarded for a moment.
        """
        transport = self.transport
        self._refusal = None
        if transport is None:
            return
        self._deadline_s = self._now() + self._limits.linger_s
        self._write(encode_response(response, keep_alive=False, without_body=self._reader.was_head))
        if self._held:
            self._held.clear()
            transport.resume_reading()
        if transport.can_write_eof() and not self._is_half_closed:
            transport.write_eof()
        elif self._is_half_closed:
            self._close(transport)

    def _write(self, data: bytes) -> None:
        """What is no part of an answer goes out at once, after what is queued."""
        self.write_queued()
        if self.transport is not None:
            self.transport.write(data)

    def _close(self, transport: asyncio.Transport) -> None:
        """Close the connection once the client has read its answer; ``check_deadline`` bounds the wait."""
        self._deadline_s = None
        self.write_queued()
        transport.close()
