"""From bytes to requests, checked while they arrive.

    feed ──> httptools ──> head checked ──> body collected ──> listener.on_request
                               └── too large, malformed, refused ──> listener.on_refusal, and nothing more is read

It owns the parser and the limits on heads, trailers and bodies. It knows no sockets and no time.
"""

from __future__ import annotations

import re
from typing import Protocol

import httptools

from kvrelay.http.exchange import HttpApplication, HttpRequest, Response, parse_target
from kvrelay.http.limits import HttpLimits

SINGLE = frozenset({"host", "authorization", "x-api-key", "content-encoding"})
"""Of these headers, two would let one process see another request than the next: each may come once."""
HOST = re.compile(r"(\[[0-9a-zA-Z:.%~_-]+\]|[0-9a-zA-Z._~!$&'()*+,;=%-]*)(:[0-9]*)?")
"""RFC 3986, 3.2.2, with a port; it may be empty."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class RequestListener(Protocol):
    """Receives the results. Called within ``feed``."""

    def on_begin(self) -> None:
        """A request's first bytes have arrived."""

    def on_head(self, expects_continue: bool) -> None:
        """A head was accepted; its body follows."""

    def on_request(self, request: HttpRequest, keep_alive: bool) -> None: ...

    def on_refusal(self, response: Response) -> None:
        """The last response to this client."""


class RequestReader:
    """Reads the requests of one connection, one after the other. ``application`` checks their heads."""

    def __init__(self, limits: HttpLimits, application: HttpApplication, listener: RequestListener) -> None:
        self.is_refused = False
        self.was_head = False
        """Whether what was refused is a HEAD request, whose answer has no body."""
        self.is_in_message = False
        self.num_body_bytes = 0
        self._num_head_bytes = 0
        self._limits = limits
        self._application = application
        self._listener = listener
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._has_progressed = False
        self._num_silent_bytes = 0
        self._is_resumed = False
        self._request: HttpRequest | None = None
        self._max_body_bytes = limits.max_body_bytes
        self._max_head_bytes = limits.max_head_bytes
        self._begin()

    def close(self) -> None:
        """No more data arrives. Afterwards only ``feed`` and ``refuse`` may be called, which then do nothing.

        Parser, reader and listener hold references to each other: without this call, only the cycle collector frees
        them and the body of an aborted upload."""
        self.is_refused = True
        self._parser = None
        self._drop()
        del self._listener

    def feed(self, data: bytes) -> None:
        """The next bytes. Pieces of a few kB keep the limits exact to that."""
        rest: bytes | None = data
        while rest and not self.is_refused and self._parser is not None:
            rest = self._feed(self._parser, rest)

    def _feed(self, parser: httptools.HttpRequestParser, data: bytes) -> bytes | None:
        """What is left to be read after an ignored Upgrade; None: everything was read."""
        self._has_progressed = False
        num_counted = self._num_head_bytes
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            self._ignore_upgrade()
            return data[exc.args[0] :]
        except httptools.HttpParserError as exc:
            self._refuse(400, f"not a valid HTTP request: {exc}")
            return None
        # An endless header, trailer or chunk extension: the parser reports nothing before its end.
        if not self._has_progressed:
            self._num_silent_bytes += len(data)
        elif self.is_in_message and self._request is None:
            self._num_silent_bytes = max(0, len(data) - max(0, self._num_head_bytes - num_counted))
        else:
            self._num_silent_bytes = 0
        self._count_head(0)
        return None

    def error_response(self, status: int, message: str) -> Response:
        """The application's answer for an error of the request that is being read."""
        path, _ = parse_target(self._url.decode("latin-1"))
        return self._application.error_response(status, message, path)

    def refuse(self, response: Response) -> None:
        """Read nothing more; the listener tells the client why."""
        if not self.is_refused:
            self.is_refused = True
            # Without a URL the parser still has the method of the request before.
            self.was_head = bool(self._url) and self._parser is not None and self._parser.get_method() == b"HEAD"
            self._drop()
            self._listener.on_refusal(response)

    # -- httptools ----------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._has_progressed = True
        if not self._is_resumed:
            self.is_in_message = True
            self._listener.on_begin()

    def on_url(self, url: bytes) -> None:
        self._has_progressed = True
        if not self._is_resumed:
            self._url += url
            self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_progressed = True
        if self._is_resumed or self.is_refused:
            return
        self._num_silent_bytes = 0
        self._num_head_bytes += len(name) + len(value) + 4
        if self._num_head_bytes > self._max_head_bytes:
            self._count_head(0)
        if self._request is not None:
            # A trailer: counted, but ignored, because the head was checked without it.
            return
        key = name.decode("latin-1").lower()
        if key in self._headers:
            if key in SINGLE:
                self._repeated = key
            elif key == "transfer-encoding":
                value = self._headers[key].encode("latin-1") + b", " + value
        self._headers[key] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_progressed = True
        if self._is_resumed or self.is_refused or self._parser is None:
            return
        path, query = parse_target(self._url.decode("latin-1"))
        version = self._parser.get_http_version()
        request = self._request = HttpRequest(
            method=self._parser.get_method().decode("latin-1"),
            path=path,
            query=query,
            headers=self._headers,
            http_minor=0 if version == "1.0" else 1,
        )
        refusal = self._malformed(request, version) or self._application.check_head(request)
        if request.max_body_bytes is not None:
            self._max_body_bytes = min(request.max_body_bytes, self._max_body_bytes)
        length = self._headers.get("content-length", "0")
        if refusal is None and (len(length) > 18 or int(length) > self._max_body_bytes):
            refusal = self._too_large()
        if refusal is not None:
            self.refuse(refusal)
            return
        # HTTP/1.0 knows no interim answers (RFC 9110, 15.2).
        expects_continue = self._headers.get("expect", "").lower() == "100-continue" and version == "1.1"
        self._listener.on_head(expects_continue)

    def on_chunk_header(self) -> None:
        self._has_progressed = True

    def on_body(self, data: bytes) -> None:
        self._has_progressed = True
        if self.is_refused:
            return
        self.num_body_bytes += len(data)
        if self.num_body_bytes > self._max_body_bytes:
            self.refuse(self._too_large())
            return
        self._body += data

    def on_message_complete(self) -> None:
        self._has_progressed = True
        request, parser = self._request, self._parser
        if self.is_refused or request is None or parser is None:
            return
        if parser.should_upgrade() and self._has_body():
            # The parser assumes that another protocol begins, but this is the body: see _ignore_upgrade.
            return
        request.body = bytes(self._body)
        keep_alive = bool(parser.should_keep_alive())
        self._begin()
        self._listener.on_request(request, keep_alive)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Ready for the next request."""
        self._url = b""
        self._headers: dict[str, str] = {}
        self._repeated = ""
        """A header of SINGLE that came more than once."""
        self._num_head_bytes = 0
        self._max_body_bytes = self._limits.max_body_bytes
        self._is_resumed = False
        self._drop()

    def _drop(self) -> None:
        self._request = None
        # One piece of memory goes back to the operating system when freed; thousands of small ones would not.
        self._body = bytearray()
        self.num_body_bytes = 0
        self.is_in_message = False

    def _ignore_upgrade(self) -> None:
        """A server may ignore the Upgrade header (RFC 9110, 7.8); llhttp cannot. If the request has a body, a new
        parser reads it after a head that gives only the body's length."""
        request = self._request
        if request is not None and not self.is_refused:
            length, coding = (request.headers.get(name) for name in ("content-length", "transfer-encoding"))
            framing = f"content-length: {length}" if coding is None else f"transfer-encoding: {coding}"
            wants_close = "close" in request.headers.get("connection", "").lower()
            head = f"POST / HTTP/1.{request.http_minor}\r\nconnection: {'close' if wants_close else 'keep-alive'}\r\n"
            self._parser = httptools.HttpRequestParser(self)
            self._is_resumed = True
            self._parser.feed_data(f"{head}{framing}\r\n\r\n".encode("latin-1"))

    def _has_body(self) -> bool:
        return "transfer-encoding" in self._headers or int(self._headers.get("content-length", "0")) > 0

    def _malformed(self, request: HttpRequest, version: str) -> Response | None:
        """Refuse heads that llhttp accepts and RFC 9112 forbids."""
        error = self.error_response
        if version == "0.9":
            # The parser itself refuses a missing one.
            return error(400, "the request line has no HTTP version")
        if version not in ("1.0", "1.1"):
            return error(505, f"HTTP/{version} is not supported; use HTTP/1.1")
        if self._repeated:
            return error(400, f"the header {self._repeated} came more than once")
        if "host" not in request.headers and version == "1.1":
            return error(400, "an HTTP/1.1 request has one Host header")
        if not HOST.fullmatch(request.headers.get("host", "")):
            return error(400, "the Host header is malformed")
        if request.method == "CONNECT":
            return error(501, "this server is no proxy")
        coding = request.headers.get("transfer-encoding")
        if coding is None:
            return None
        if version == "1.0":
            return error(400, "HTTP/1.0 has no Transfer-Encoding")
        if coding.lower() != "chunked":
            return error(501, "the only supported Transfer-Encoding is chunked")
        return None

    def _count_head(self, num_bytes: int) -> None:
        """Bytes of the head, of trailers, or of neither's end."""
        self._num_head_bytes += num_bytes
        if self._num_head_bytes + self._num_silent_bytes > self._max_head_bytes:
            self._refuse(431, f"the request's head is above {self._max_head_bytes} bytes")

    def _too_large(self) -> Response:
        limit = self._max_body_bytes
        message = f"the request body is above {limit} bytes (max_body_bytes)" if limit else "this path takes no body"
        return self.error_response(413, message)

    def _refuse(self, status: int, message: str) -> None:
        if not self.is_refused:
            self.refuse(self.error_response(status, message))
