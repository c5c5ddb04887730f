"""HTTP requests and responses as values, and the bytes of a response's head. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import unquote

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


@dataclass(slots=True)
class HttpRequest:
    """A request. Header names are lower case; of repeated headers the last one counts; some may not be
    repeated (``reading.SINGLE``). ``body`` comes last.

    When it checks the head, the application sets ``client``, the sender's name, and ``max_body_bytes``, the largest
    body that this client may send. Its handler sets ``model``, the served model's name, for the metrics.
    """

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    http_minor: int = 1
    body: bytes = b""
    client: str = ""
    model: str = ""
    max_body_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Response:
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
