"""One client connection: bytes in, exchanges out, and the limits that keep a hostile client cheap.

    data_received ──> httptools ──> head checked ──> body collected ──> Exchange ──> application (one at a time)

It owns parsing, keep-alive, pipelining (later requests wait in order), refusal of what is too large before it is read,
deadlines for slow senders, and the bound on what a slow reader may leave unread. It does not know routes.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import unquote

import httptools

from kvrelay.frontend.http.exchange import Exchange
from kvrelay.frontend.http.messages import HttpRequest, Response, encode_response


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of one connection; sizes in bytes, times in seconds."""

    max_body_bytes: int = 16 * 1024 * 1024
    max_head_bytes: int = 64 * 1024
    max_unsent_bytes: int = 8 * 1024 * 1024
    max_pipelined: int = 64
    head_timeout_s: float = 15.0
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 120.0
    linger_s: float = 3.0


class ConnectionOwner(Protocol):
    """What a connection needs from its server."""

    @property
    def limits(self) -> HttpLimits: ...

    @property
    def is_closing(self) -> bool: ...

    def check_head(self, request: HttpRequest) -> Response | None:
        """Refuse a request by its head alone, or None."""

    def error_response(self, status: int, message: str) -> Response: ...

    def handle(self, exchange: Exchange) -> None: ...

    def connected(self, connection: HttpConnection) -> None: ...

    def disconnected(self, connection: HttpConnection) -> None: ...


class HttpConnection(asyncio.Protocol):
    """An accepted connection."""

    def __init__(self, owner: ConnectionOwner, now: Callable[[], float]) -> None:
        self._owner = owner
        self._now = now
        self._limits = owner.limits
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._waiting: deque[tuple[HttpRequest, bool]] = deque()
        self._is_discarding = False
        self._is_paused = False
        self._deadline_s: float | None = None
        self._request: HttpRequest | None = None
        self._begin()

    @property
    def is_idle(self) -> bool:
        return self._exchange is None

    def abort(self) -> None:
        """Cut the connection off."""
        if self._transport is not None:
            self._transport.abort()

    def close_if_idle(self) -> None:
        """For a server that shuts down: an idle connection ends now, a busy one after its answer."""
        if self.is_idle and self._transport is not None:
            self._transport.close()

    def check_deadline(self, now_s: float) -> None:
        """Called by the server's sweep: end a client that sends too slowly or says nothing."""
        if self._deadline_s is None or now_s < self._deadline_s or self._transport is None:
            return
        if self._is_in_message and not self._is_discarding:
            self._refuse(self._owner.error_response(408, "the request did not arrive in time"))
        else:
            self._transport.close()

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not isinstance: uvloop's transports are of no asyncio class.
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._deadline_s = self._now() + self._limits.head_timeout_s
        self._owner.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._waiting.clear()
        self._owner.disconnected(self)
        if self._exchange is not None:
            self._exchange.gone()

    def data_received(self, data: bytes) -> None:
        if self._is_discarding:
            return
        if not self._is_head_complete:
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # It was refused when its head was complete.
            return
        except httptools.HttpParserError as exc:
            self._refuse(self._owner.error_response(400, f"not a valid HTTP request: {exc}"))
        if not self._is_head_complete and self._num_head_bytes > self._limits.max_head_bytes:
            self._refuse(self._owner.error_response(431, "the request's head is too large"))

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False

    # -- Outlet -------------------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Queue bytes for the client; cut it off when it has left too many unread."""
        transport = self._transport
        if transport is None:
            return
        transport.write(data)
        if self._is_paused and transport.get_write_buffer_size() > self._limits.max_unsent_bytes:
            transport.abort()
            if self._exchange is not None:
                self._exchange.gone()

    def exchange_done(self, keep_alive: bool) -> None:
        """The application has answered: go on with the next request, or end."""
        self._exchange = None
        transport = self._transport
        if transport is None:
            return
        if not keep_alive or self._owner.is_closing:
            transport.close()
        elif self._waiting:
            # On another turn of the loop, so that pipelined requests do not nest.
            asyncio.get_running_loop().call_soon(self._next)
        else:
            self._deadline_s = self._now() + self._limits.idle_timeout_s

    # -- httptools ----------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._is_in_message = True
        if self._exchange is None:
            self._deadline_s = self._now() + self._limits.head_timeout_s

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._is_head_complete = True
        if self._is_discarding:
            return
        path, _, query = self._url.decode("latin-1").partition("?")
        request = self._request = HttpRequest(
            method=self._parser.get_method().decode("latin-1"),
            path=unquote(path),
            query=query,
            headers=self._headers,
            http_minor=0 if self._parser.get_http_version() == "1.0" else 1,
        )
        refusal = self._owner.check_head(request)
        self._max_body_bytes = min(request.max_body_bytes or sys.maxsize, self._limits.max_body_bytes)
        if refusal is None and self._parser.should_upgrade():
            refusal = self._owner.error_response(400, "protocol upgrades are not supported")
        length = self._headers.get("content-length", "0")
        if refusal is None and (len(length) > 18 or int(length) > self._max_body_bytes):
            refusal = self._too_large()
        if refusal is not None:
            self._refuse(refusal)
            return
        if self._exchange is None:
            self._deadline_s = self._now() + self._limits.body_timeout_s
        if self._headers.get("expect", "").lower() == "100-continue" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        if self._is_discarding:
            return
        self._num_body_bytes += len(data)
        if self._num_body_bytes > self._max_body_bytes:
            self._body.clear()
            self._refuse(self._too_large())
            return
        self._body.append(data)

    def on_message_complete(self) -> None:
        request = self._request
        self._is_in_message = False
        if self._is_discarding or request is None:
            return
        request.body = b"".join(self._body)
        keep_alive = bool(self._parser.should_keep_alive())
        self._begin()
        if self._exchange is None and not self._waiting:
            self._start(request, keep_alive)
            return
        self._waiting.append((request, keep_alive))
        if len(self._waiting) > self._limits.max_pipelined:
            self.abort()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Ready for the next request."""
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._request = None
        self._num_head_bytes = self._num_body_bytes = 0
        self._max_body_bytes = self._limits.max_body_bytes
        self._is_head_complete = self._is_in_message = False

    def _start(self, request: HttpRequest, keep_alive: bool) -> None:
        self._deadline_s = None
        self._exchange = Exchange(request, self, keep_alive)
        self._owner.handle(self._exchange)

    def _next(self) -> None:
        if self._exchange is None and self._waiting and self._transport is not None:
            self._start(*self._waiting.popleft())

    def _too_large(self) -> Response:
        return self._owner.error_response(
            413, f"the request body is above {self._max_body_bytes} bytes (max_body_bytes)"
        )

    def _refuse(self, response: Response) -> None:
        """Answer at once and read no further request.

        The client may still be sending. Closing with unread data would reset the connection and take the answer with
        it, so what comes is read and thrown away for a moment.
        """
        transport = self._transport
        if self._is_discarding or transport is None:
            return
        self._is_discarding = True
        if self._exchange is not None:
            # Garbage behind a request that is being answered: its answer has been promised first.
            self._exchange.gone()
            transport.abort()
            return
        self._deadline_s = self._now() + self._limits.linger_s
        transport.write(encode_response(response, keep_alive=False))
        if transport.can_write_eof():
            transport.write_eof()
