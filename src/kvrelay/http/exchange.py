"""One request and its answer, as the application sees it.

An exchange is answered once: by ``respond``, or by ``start_stream``, any number of ``write`` and ``finish``. No call
waits: unread data is kept in the connection's buffer. A client that stops reading while much is buffered is cut off and
counts as gone. After the client has gone every call is a no-op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from kvrelay.http.messages import LAST_CHUNK, HttpRequest, Response, encode_chunk, encode_response, encode_stream_head


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
                response = replace(response, headers=(*response.headers, *self.extra_headers))
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
        self._on_gone = None
        self._outlet.exchange_done(keep_alive)
