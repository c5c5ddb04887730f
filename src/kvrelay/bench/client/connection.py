"""A server's address, and HTTP/1.1 on raw asyncio transports: one request at a time per connection.

Each read is timestamped before it is parsed, and its body bytes go directly to the request's sink. So a slow consumer
can shift another request's timestamps only by its own work. Parsing is httptools (C). TCP_NODELAY is set by asyncio on
every connection.
"""

from __future__ import annotations

import asyncio
import ssl
import time
import weakref
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from kvrelay.bench.errors import BadResponseError, ServerDownError
from kvrelay.config.addresses import host_port
from kvrelay.errors import InvalidInputError


class Target(msgspec.Struct, frozen=True):
    """Host, port, prefix of all paths (without a slash at the end), key for the Authorization header; ``order`` for
    the header x-kvrelay-order."""

    host: str
    port: int
    prefix: str = ""
    tls: bool = False
    api_key: str | None = None
    order: str | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{host_port(self.host, self.port)}{self.prefix}"

    def head(self, method: str, path: str, content_length: int) -> bytes:
        """The head of a request with a JSON body."""
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {host_port(self.host, self.port)}",
            "Accept: */*",
            "Content-Type: application/json",
            f"Content-Length: {content_length}",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if self.order:
            lines.append(f"x-kvrelay-order: {self.order}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")


def parse_target(url: str, api_key: str | None = None, order: str | None = None) -> Target:
    """Read ``http://host:port[/prefix]``; an OpenAI-style ``/v1`` at the end is removed. Raises InvalidInputError."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as exc:
        raise InvalidInputError(f"{url!r} is not a URL: {exc}", param="base_url") from exc
    if parts.scheme not in ("http", "https") or not parts.hostname or not parts.hostname.isprintable():
        raise InvalidInputError(f"{url!r} is not an http URL", param="base_url")
    if api_key is not None and not api_key.isprintable():
        raise InvalidInputError("the API key has characters that no header may have", param="api_key")
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    tls = parts.scheme == "https"
    return Target(parts.hostname, port or (443 if tls else 80), prefix, tls, api_key, order)


Sink = Callable[[int, bytes], None]
MAX_ERROR_BODY = 64 * 1024
MAX_BODY = 256 * 1024 * 1024
_CLOSE_S = 2.0


class HttpAnswer(msgspec.Struct, frozen=True):
    """A finished answer. ``body`` is kept only without a sink. ``done_ns`` is the timestamp of its last byte;
    ``retry_after`` and ``worker`` are headers."""

    status: int
    content_type: str
    body: bytes
    done_ns: int
    retry_after: str | None = None
    worker: str = ""


class _AnswerParser:
    """The answer being received: httptools calls the ``on_*`` methods while it parses."""

    def __init__(self, sink: Sink | None, done: asyncio.Future[HttpAnswer]) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.now_ns = 0
        self.started = False
        self.keep_alive = False
        self._sink = sink
        self._done = done
        self._content_type = ""
        self._retry_after: str | None = None
        self._worker = ""
        self._delimited = False
        self._head_complete = False
        self._streaming = False
        self._body = bytearray()

    def on_message_begin(self) -> None:
        self.started = True

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._delimited = True
        elif name == b"content-type":
            self._content_type = value.decode("latin-1").partition(";")[0].strip().lower()
        elif name == b"retry-after":
            self._retry_after = value.decode("latin-1")
        elif name == b"x-kvrelay-worker":
            self._worker = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._head_complete = True
        is_stream = self.parser.get_status_code() == 200 and self._content_type == "text/event-stream"
        self._streaming = is_stream and self._sink is not None

    def on_body(self, body: bytes) -> None:
        if self._streaming and self._sink is not None:
            self._sink(self.now_ns, body)
        elif self._sink is None and len(self._body) + len(body) > MAX_BODY:
            raise BadResponseError("the server's answer does not end")
        elif len(self._body) < MAX_ERROR_BODY or self._sink is None:
            self._body += body

    def on_message_complete(self) -> None:
        self.keep_alive = bool(self.parser.should_keep_alive())
        if not self._done.done():
            status = int(self.parser.get_status_code())
            self._done.set_result(
                HttpAnswer(status, self._content_type, bytes(self._body), self.now_ns, self._retry_after, self._worker)
            )

    def closed(self) -> None:
        """The connection ended: the normal end of an answer without length or chunks, else a failure."""
        if self._head_complete and not self._delimited:
            self.on_message_complete()
            self.keep_alive = False
        elif self.started:
            self.fail(ServerDownError("the server closed the connection in the middle of an answer"))
        else:
            self.fail(StaleConnectionError("the server closed the connection without an answer"))

    def fail(self, error: Exception) -> None:
        if not self._done.done():
            self._done.set_exception(error)


class Connection(asyncio.Protocol):
    """One TCP connection. ``exchange`` may be awaited once at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._exchange: _AnswerParser | None = None
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing() and self._exchange is None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the transport has closed the connection."""
        await self._lost

    async def exchange(self, request: bytes, sink: Sink | None) -> HttpAnswer:
        """Send and wait for the whole answer. Raises ServerDownError, BadResponseError."""
        assert self._transport is not None
        assert self._exchange is None
        done: asyncio.Future[HttpAnswer] = asyncio.get_running_loop().create_future()
        exchange = self._exchange = _AnswerParser(sink, done)
        self._transport.write(request)
        try:
            answer = await done
        except BaseException:
            self.close()
            raise
        finally:
            self._exchange = None
        if not exchange.keep_alive:
            self.close()
        return answer

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # isinstance would fail: uvloop's transports derive from no asyncio class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self.close()
            return
        exchange.now_ns = time.perf_counter_ns()
        try:
            exchange.parser.feed_data(data)
        except httptools.HttpParserCallbackError as exc:
            exchange.fail(exc.__context__ if isinstance(exc.__context__, BadResponseError) else _not_http(exc))
        except httptools.HttpParserError as exc:
            exchange.fail(_not_http(exc))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._lost.done():
            self._lost.set_result(None)
        if self._exchange is not None:
            self._exchange.closed()


class StaleConnectionError(ServerDownError):
    """The connection was closed before any byte of the answer: normal for an idle connection."""


class ConnectionPool:
    """Connections to one server, as many as there are requests in flight; without ``reuse`` one for each request. An
    async context manager, which closes them.

    ``reconnects`` counts requests that were sent again because their idle connection had been closed.
    """

    def __init__(self, target: Target, connect_timeout_s: float = 10.0, *, reuse: bool = True) -> None:
        self.target = target
        self._timeout_s = connect_timeout_s
        self._reuse = reuse
        self.reconnects = 0
        self._idle: list[Connection] = []
        self._open: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._ssl = ssl.create_default_context() if target.tls else None

    def __repr__(self) -> str:
        return f"ConnectionPool({self.target.url}, {len(self._idle)} idle)"

    async def __aenter__(self) -> ConnectionPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def warm(self, count: int) -> None:
        """Open connections beforehand, so that no request pays for the handshake."""
        self._idle += [await self._connect() for _ in range(count - len(self._idle))]

    async def send(
        self, request: bytes, sink: Sink | None = None, on_written: Callable[[int], None] = lambda now_ns: None
    ) -> HttpAnswer:
        """Send over an idle connection or a new one; ``on_written`` gets the time when the request is written to it. If
        the idle connection had been closed, retry once over a new one."""
        connection, reused = self._take(), True
        if connection is None:
            connection, reused = await self._connect(), False
        on_written(time.perf_counter_ns())
        try:
            answer = await connection.exchange(request, sink)
        except StaleConnectionError:
            if not reused:
                raise
            self.reconnects += 1
            connection = await self._connect()
            answer = await connection.exchange(request, sink)
        if self._reuse and connection.usable:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    async def close(self) -> None:
        """Close every connection and wait until they are gone: a loop that ends before them may never end."""
        self._idle.clear()
        still_open = list(self._open)
        for connection in still_open:
            connection.close()
        if still_open:
            waits = [asyncio.ensure_future(connection.wait_closed()) for connection in still_open]
            _, late = await asyncio.wait(waits, timeout=_CLOSE_S)
            for wait in late:
                wait.cancel()

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        target = self.target
        try:
            async with asyncio.timeout(self._timeout_s):
                _, connection = await loop.create_connection(Connection, target.host, target.port, ssl=self._ssl)
        except (OSError, TimeoutError) as exc:
            raise ServerDownError(f"no connection to {target.url}: {exc or 'timed out'}") from exc
        self._open.add(connection)
        return connection


def _not_http(exc: Exception) -> BadResponseError:
    return BadResponseError(f"the server's answer is not HTTP: {exc}")
