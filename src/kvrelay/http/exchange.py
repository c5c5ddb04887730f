"""One request and its answer, as the application sees them: values, and the bytes of a response.

An exchange is answered once: by ``respond``, or by ``start_stream``, any number of ``write`` and ``finish``. No call
waits: unread data is kept in the connection's buffer. A client that stops reading while much is buffered is cut off and
counts as gone. After the client has gone every call is a no-op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Protocol
from urllib.parse import unquote

import msgspec

REASONS = {int(status): status.phrase.encode() for status in HTTPStatus}
JSON = b"application/json"
CONTROL_BYTES = bytes((*range(9), *range(10, 32), 127))
"""Characters that a header's value must not contain: text of other processes must not become headers of ours."""


def parse_target(target: str) -> tuple[str, str]:
    """Path, decoded, and query of a request target, in origin form (``/a?b``) or absolute form (``http://host/a?b``);
    RFC 9112, 3.2."""
    scheme, colon, rest = target.partition("://")
    if colon and scheme.lower() in ("http", "https"):
        authority_end = min((at for at in (rest.find("/"), rest.find("?")) if at >= 0), default=len(rest))
        target = rest[authority_end:]
        if not target.startswith("/"):
            target = "/" + target
    path, _, query = target.partition("?")
    return unquote(path), query


class HttpRequest(msgspec.Struct):
    """A request. Header names are lower case; of repeated headers the last one counts; some may not be
    repeated (``reading.SINGLE``). ``body`` comes last.

    When it checks the head, the application sets ``client``, the sender's name, and ``max_body_bytes``, the largest
    body that this client may send. Its handler sets ``model``, the served model's name, for the metrics.
    """

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = {}
    http_minor: int = 1
    body: bytes = b""
    client: str = ""
    model: str = ""
    max_body_bytes: int | None = None


class Response(msgspec.Struct, frozen=True):
    """A whole answer. ``headers`` are added to content-type, content-length and connection."""

    status: int
    body: bytes = b""
    content_type: bytes = JSON
    headers: Sequence[tuple[bytes, bytes]] = ()


def encode_response(response: Response, keep_alive: bool, without_body: bool = False) -> bytes:
    """The bytes of a whole answer; ``without_body`` answers HEAD."""
    head = _head(response.status, response.content_type, response.headers, keep_alive)
    length = b"content-length: %d\r\n\r\n" % len(response.body)
    return head + length + (b"" if without_body else response.body)


def encode_stream_head(
    content_type: bytes, headers: Sequence[tuple[bytes, bytes]], keep_alive: bool, chunked: bool
) -> bytes:
    """The head of an answer of unknown length: chunked, or for HTTP/1.0 ended by the connection's end."""
    head = _head(200, content_type, headers, keep_alive)
    return head + (b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n" if chunked else b"\r\n")


def encode_chunk(data: bytes) -> bytes:
    """One chunk of a chunked body. ``data`` must not be empty: that would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"


def _head(status: int, content_type: bytes, headers: Sequence[tuple[bytes, bytes]], keep_alive: bool) -> bytes:
    lines = [b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\n" % (status, REASONS.get(status, b"Unknown"), content_type)]
    lines += [b"%b: %b\r\n" % (name, value.translate(None, CONTROL_BYTES)) for name, value in headers]
    lines.append(b"connection: keep-alive\r\n" if keep_alive else b"connection: close\r\n")
    return b"".join(lines)


class Outlet(Protocol):
    """The destination of the bytes: the connection."""

    def send(self, data: bytes) -> None: ...

    def body_changed(self) -> None: ...

    def exchange_done(self, keep_alive: bool) -> None: ...


class Exchange:
    """A request being answered."""

    def __init__(self, request: HttpRequest, outlet: Outlet, keep_alive: bool) -> None:
        self.request = request
        self.extra_headers: Sequence[tuple[bytes, bytes]] = ()
        """Of whatever answer there will be."""
        self.last_words: Callable[[int, str], bytes] | None = None
        """How a stream that has begun tells its client of an error, by status and message; set by whoever began it."""
        self.is_gone = False
        self.is_started = False
        self.is_done = False
        self._outlet = outlet
        self._keep_alive = keep_alive
        self._chunked = request.http_minor >= 1
        self._on_gone: Callable[[], None] | None = None

    def on_gone(self, callback: Callable[[], None]) -> None:
        """``callback`` runs once if the client goes away before the answer is complete."""
        self._on_gone = callback

    def drop_body(self) -> None:
        """The application has read the request's body: release it, so that it no longer counts as buffered."""
        if self.request.body:
            self.request.body = b""
            self._outlet.body_changed()

    def replace_body(self, body: bytes) -> None:
        """The application has decoded the request's body: from now on ``body`` counts as buffered in its place."""
        self.request.body = body
        self._outlet.body_changed()

    def respond(self, response: Response) -> None:
        """Answer with a whole response."""
        if self.is_started or self.is_done:
            raise RuntimeError("the exchange has been answered already")
        if not self.is_gone:
            if self.extra_headers:
                response = msgspec.structs.replace(response, headers=(*response.headers, *self.extra_headers))
            self._outlet.send(encode_response(response, self._keep_alive, self.request.method == "HEAD"))
        self._end(self._keep_alive)

    def start_stream(self, content_type: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Send the head of a streamed answer with status 200."""
        self.is_started = True
        if not self.is_gone:
            keep_alive = self._keep_alive and self._chunked
            headers = (*headers, *self.extra_headers)
            self._outlet.send(encode_stream_head(content_type, headers, keep_alive, self._chunked))

    def write(self, data: bytes) -> None:
        """Send a piece of a streamed answer."""
        if not self.is_gone:
            self._outlet.send(encode_chunk(data) if self._chunked else data)

    def finish(self) -> None:
        """The streamed answer is complete."""
        if not self.is_gone and self._chunked:
            self._outlet.send(LAST_CHUNK)
        self._end(self._keep_alive and self._chunked)

    def gone(self) -> None:
        """Called by the connection when the client goes away."""
        if self.is_done or self.is_gone:
            return
        self.is_gone = True
        if self._on_gone is not None:
            self._on_gone()

    def _end(self, keep_alive: bool) -> None:
        self.is_done = True
        self._on_gone = self.last_words = None
        self._outlet.exchange_done(keep_alive)


class HttpApplication(Protocol):
    """The application that answers requests."""

    def check_head(self, request: HttpRequest) -> Response | None:
        """Refuse a request before its body is read, or None."""

    def error_response(self, status: int, message: str, path: str) -> Response:
        """The response for an error of the HTTP layer itself. ``path``: of the request; empty if none has arrived."""

    def handle(self, exchange: Exchange) -> None:
        """Answer the request, now or later. Must not block or raise."""
