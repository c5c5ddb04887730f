"""Bytes to requests, without a socket: what RFC 9112 asks for beyond the parser, and the limits."""

from __future__ import annotations

import pytest

from kvrelay.http import Exchange, HttpLimits, HttpRequest, Response
from kvrelay.http.exchange import encode_response, parse_target
from kvrelay.http.reading import RequestReader


class Listener:
    """Keeps what was read, and is the application that checks heads."""

    def __init__(self, max_body_bytes: int | None = None) -> None:
        self.requests: list[tuple[HttpRequest, bool]] = []
        self.refusals: list[Response] = []
        self.num_continues = 0
        self._max_body_bytes = max_body_bytes

    def check_head(self, request: HttpRequest) -> Response | None:
        request.max_body_bytes = self._max_body_bytes
        return None

    def error_response(self, status: int, message: str, path: str) -> Response:
        return Response(status, message.encode(), headers=[(b"x-path", path.encode())])

    def handle(self, exchange: Exchange) -> None:
        raise AssertionError("no server passes requests on")

    def on_begin(self) -> None:
        pass

    def on_head(self, expects_continue: bool) -> None:
        self.num_continues += expects_continue

    def on_request(self, request: HttpRequest, keep_alive: bool) -> None:
        self.requests.append((request, keep_alive))

    def on_refusal(self, response: Response) -> None:
        self.refusals.append(response)

    @property
    def status(self) -> int | None:
        return self.refusals[0].status if self.refusals else None

    @property
    def bodies(self) -> list[bytes]:
        return [request.body for request, _ in self.requests]


def read(
    data: bytes, *, piece: int = 0, limits: HttpLimits | None = None, listener: Listener | None = None
) -> Listener:
    """Feed ``data``, in pieces if told so."""
    listener = listener or Listener()
    reader = RequestReader(limits or HttpLimits(), listener, listener)
    piece = piece or len(data)
    for at in range(0, len(data), piece):
        reader.feed(data[at : at + piece])
    return listener


HOST = b"host: x\r\n"
CHUNKED = b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
PIECES = [0, 1, 7, 4096]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /a HTTP/1.1\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nhost: x\r\nauthorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nhost: x\r\nx-api-key: a\r\nx-api-key: a\r\n\r\n", 400),
        (
            b"GET /a HTTP/1.1\r\nhost: x\r\nauthorization: Bearer a\r\nx-api-key: a\r\naccept: a\r\naccept: b\r\n\r\n",
            None,
        ),
        (b"GET /a HTTP/1.0\r\n\r\n", None),
        (b"GET /a HTTP/2.0\r\nhost: x\r\n\r\n", 505),
        (b"GET /a HTTP/0.9\r\nhost: x\r\n\r\n", 400),
        (b"GET /a\r\nhost: x\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nhost: a b\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nhost: a/b\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nhost: u@a\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nhost: a:b\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nhost: \r\n\r\n", None),
        (b"GET /a HTTP/1.1\r\nhost: my_host-1.example:8000\r\n\r\n", None),
        (b"GET /a HTTP/1.1\r\nhost: [::1]:8000\r\n\r\n", None),
        (b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n", 501),
        (b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: Chunked\r\n\r\n0\r\n\r\n", None),
        (b"POST /a HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    ],
)
@pytest.mark.parametrize("piece", PIECES)
def test_heads_that_must_be_refused(head: bytes, status: int | None, piece: int) -> None:
    listener = read(head, piece=piece)
    assert listener.status == status
    assert len(listener.requests) == (status is None)


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize(
    "data",
    [
        b"GET /a HTTP/1.1\r\nhost: x\r\ny: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /a HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\r\n" * 50_000,
        CHUNKED + b"1;" + b"e" * 100_000 + b"\r\nx\r\n0\r\n\r\n",
        CHUNKED + b"0\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
        CHUNKED + b"0\r\nt: " + b"t" * 100_000 + b"\r\n\r\n",
    ],
    ids=["value", "headers", "target", "empty lines", "extension", "trailers", "trailer"],
)
def test_the_head_limit_holds_for_all_that_is_no_body(data: bytes, piece: int) -> None:
    # The connection feeds pieces of 8 kB at most.
    listener = read(data, piece=piece or 8192)
    assert listener.status == 431
    assert not listener.requests


@pytest.mark.parametrize(("version", "num_continues"), [("1.1", 1), ("1.0", 0)])
def test_only_a_client_of_http_1_1_is_told_to_continue(version: str, num_continues: int) -> None:
    """HTTP/1.0 knows no interim answers: its client would take one for the answer (RFC 9110, 15.2)."""
    head = f"POST /a HTTP/{version}\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\nok"
    listener = read(head.encode())
    assert (listener.num_continues, listener.bodies) == (num_continues, [b"ok"])


@pytest.mark.parametrize("piece", PIECES)
def test_what_is_below_the_head_limit_passes(piece: int) -> None:
    head = b"GET /" + b"a" * 25_000 + b" HTTP/1.1\r\nhost: x\r\ny: " + b"y" * 25_000 + b"\r\n\r\n"
    trailers = CHUNKED + b"2;ext=1\r\nab\r\n0\r\nt: " + b"t" * 30_000 + b"\r\nhost: evil\r\n\r\n"
    listener = read(head + trailers + head, piece=piece)
    assert listener.bodies == [b"", b"ab", b""]
    assert listener.requests[1][0].headers["host"] == "x", "a trailer must not become a header"


def test_small_chunks_do_not_count_as_head() -> None:
    assert read(CHUNKED + b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n", piece=8192).bodies == [b"x" * 50_000]


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize(
    "body",
    [b"content-length: 3\r\n\r\nabc", b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", b"\r\n"],
    ids=["length", "chunked", "none"],
)
def test_an_upgrade_is_ignored(body: bytes, piece: int) -> None:
    head = (
        b"POST /a HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"
    )
    listener = read((head + body) * 2 + b"GET /b HTTP/1.1\r\nhost: x\r\n\r\n", piece=piece)
    expected = b"abc" if b"abc" in body else b""
    assert [(request.path, request.body) for request, _ in listener.requests] == [
        ("/a", expected),
        ("/a", expected),
        ("/b", b""),
    ]
    assert all(keep_alive for _, keep_alive in listener.requests)
    assert not listener.refusals


def test_pipelined_upgrades_do_not_nest() -> None:
    head = b"POST /a HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 1\r\n\r\nx"
    assert len(read(head * 2000).requests) == 2000


def test_a_body_behind_an_upgrade_is_bounded() -> None:
    head = b"POST /a HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\ntransfer-encoding: chunked\r\n\r\n"
    assert read(head + b"10\r\n" + b"x" * 16 + b"\r\n", limits=HttpLimits(max_body_bytes=10)).status == 413
    assert read(head + b"0\r\nt: " + b"t" * 100_000, piece=8192).status == 431


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /a HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n", None),
        (b"GET /a HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nx", 413),
        (b"GET /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n", 413),
    ],
)
def test_a_path_without_a_body_takes_none(data: bytes, status: int | None) -> None:
    assert read(data, listener=Listener(max_body_bytes=0)).status == status


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/a?b=c", ("/a", "b=c")),
        ("http://host:80/a/b?c", ("/a/b", "c")),
        ("HTTPS://host/a%20b", ("/a b", "")),
        ("http://host", ("/", "")),
        ("http://host?q", ("/", "q")),
        ("*", ("*", "")),
        ("/a://b", ("/a://b", "")),
    ],
)
def test_request_targets_are_split_into_path_and_query(target: str, expected: tuple[str, str]) -> None:
    assert parse_target(target) == expected


def test_header_values_of_answers_hold_no_line_ends() -> None:
    response = Response(200, headers=[(b"x-worker", b"w\r\nset-cookie: a=b\x00\x7f")])
    assert b"x-worker: wset-cookie: a=b\r\n" in encode_response(response, keep_alive=True)
