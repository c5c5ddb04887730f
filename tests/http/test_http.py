"""The HTTP server by itself, with an application that echoes."""

from __future__ import annotations

import asyncio
import socket

import pytest
from tests.contracts.waiting import eventually
from tests.frontend.echo import EchoApp, serving
from tests.frontend.raw_http import RawClient, request_bytes, send

from kvrelay.http import HttpLimits, HttpServer, open_listener


async def test_echo_and_keep_alive() -> None:
    async with serving() as (_, server):
        client = await RawClient.connect(server.port)
        for number in range(3):
            client.writer.write(request_bytes("POST", "/a", b"body %d" % number))
            answer = await client.read_answer()
            assert (answer.status, answer.body) == (200, b"body %d" % number)
            assert answer.headers["connection"] == "keep-alive"
        await client.close()


async def test_nodelay_is_set() -> None:
    async with serving() as (_, server):
        client = await RawClient.connect(server.port)
        client.writer.write(request_bytes("GET", "/a"))
        await client.read_answer()
        (connection,) = server.connections
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        await client.close()


async def test_connection_close_is_honoured() -> None:
    async with serving() as (_, server):
        client = await RawClient.connect(server.port)
        client.writer.write(request_bytes("POST", "/a", b"x", {"connection": "close"}))
        assert (await client.read_answer()).headers["connection"] == "close"
        assert await client.reader.read() == b""
        await client.close()


async def test_a_stream_is_chunked_or_ended_by_close() -> None:
    async with serving() as (_, server):
        assert (await send(server.port, "GET", "/stream")).body == b"one,two"
        client = await RawClient.connect(server.port)
        client.writer.write(b"GET /stream HTTP/1.0\r\nhost: x\r\n\r\n")
        answer = await client.read_answer()
        assert "transfer-encoding" not in answer.headers
        assert answer.body == b"one,two"
        await client.close()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as (app, server):
        client = await RawClient.connect(server.port)
        client.writer.write(
            request_bytes("GET", "/slow") + request_bytes("POST", "/a", b"1") + request_bytes("POST", "/a", b"2")
        )
        await eventually(lambda: bool(app.seen))
        await asyncio.sleep(0.05)
        assert [request.path for request in app.seen] == ["/slow"]
        app.release.set()
        assert [(await client.read_answer()).body for _ in range(3)] == [b"late", b"1", b"2"]
        await client.close()


async def test_byte_by_byte_and_chunked_bodies() -> None:
    async with serving() as (_, server):
        client = await RawClient.connect(server.port)
        for byte in request_bytes("POST", "/a", b"slow"):
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.read_answer()).body == b"slow"
        client.writer.write(
            b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        )
        assert (await client.read_answer()).body == b"abcde"
        await client.close()


async def test_expect_100_continue() -> None:
    async with serving() as (_, server):
        client = await RawClient.connect(server.port)
        client.writer.write(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(b"ok")
        assert (await client.read_answer()).body == b"ok"
        await client.close()


async def test_head_has_no_body() -> None:
    async with serving() as (_, server):
        client = await RawClient.connect(server.port)
        client.writer.write(request_bytes("HEAD", "/a", b"abc") + request_bytes("POST", "/a", b"next"))
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 3" in head
        assert (await client.read_answer()).body == b"next"
        await client.close()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"HEAD /a HTTP/1.1\r\n\r\n", b"400"),
        (b"HEAD /a HTTP/1.1\r\nhost: x\r\ncontent-length: 104857600\r\n\r\n", b"413"),
        (b"HEAD /a HTTP/1.1\r\nhost: x\r\na: " + b"b" * 100_000, b"431"),
    ],
)
async def test_a_refused_head_has_no_body(data: bytes, status: bytes) -> None:
    async with serving() as (_, server):
        client = await RawClient.connect(server.port)
        client.writer.write(data)
        answer = await client.reader.read()
        assert answer.split()[1] == status
        assert answer.endswith(b"\r\n\r\n")
        await client.close()


async def test_what_cannot_be_read_after_a_head_is_refused_with_a_body() -> None:
    async with serving() as (_, server):
        client = await RawClient.connect(server.port)
        client.writer.write(request_bytes("HEAD", "/a") + b"nonsense\r\n\r\n")
        await client.reader.readuntil(b"\r\n\r\n")
        answer = await client.read_answer()
        assert (answer.status, b"not a valid HTTP request" in answer.body) == (400, True)
        await client.close()


@pytest.mark.parametrize(
    "head",
    [
        b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 104857600\r\n\r\n",
        b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 1048576\r\nexpect: 100-continue\r\n\r\n",
        b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1000\r\n" + b"x" * 4096,
    ],
)
async def test_a_large_body_is_refused_before_it_is_read(head: bytes) -> None:
    async with serving(HttpLimits(max_body_bytes=1024)) as (app, server):
        client = await RawClient.connect(server.port)
        client.writer.write(head)
        answer = await client.read_answer()
        assert answer.status == 413
        assert not app.seen
        await client.close()


async def test_the_refusal_arrives_while_the_client_is_still_sending() -> None:
    async with serving(HttpLimits(max_body_bytes=1024)) as (_, server):
        client = await RawClient.connect(server.port)
        client.writer.write(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 8388608\r\n\r\n")
        for _ in range(128):
            client.writer.write(b"x" * 65536)
            await client.writer.drain()
        assert (await client.read_answer()).status == 413
        await client.close()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET / FOO/9.9\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"GET /none HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"GET /a HTTP/1.1\r\nx: " + b"y" * 70_000, 431),
        (b"GET /" + b"a" * 70_000, 431),
    ],
)
async def test_garbage_is_answered_and_ends_the_connection(data: bytes, status: int) -> None:
    async with serving() as (app, server):
        client = await RawClient.connect(server.port)
        client.writer.write(data)
        assert (await client.read_answer()).status == status
        assert await client.reader.read() == b""
        assert not app.seen
        await client.close()
        assert (await send(server.port, "POST", "/a", b"fine")).body == b"fine"


async def test_a_client_that_leaves_is_noticed() -> None:
    async with serving() as (app, server):
        client = await RawClient.connect(server.port)
        client.writer.write(request_bytes("GET", "/slow"))
        await eventually(lambda: bool(app.seen))
        await client.close()
        await eventually(lambda: app.gone == ["/slow"])
        app.release.set()
        await asyncio.sleep(0)


async def test_slow_senders_and_idle_clients_are_ended() -> None:
    limits = HttpLimits(head_timeout_s=10, body_timeout_s=20, idle_timeout_s=30)
    async with serving(limits) as (_, server):
        loop = asyncio.get_running_loop()
        clients = [await RawClient.connect(server.port) for _ in range(4)]
        clients[1].writer.write(b"POST /a HT")
        clients[2].writer.write(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nab")
        clients[3].writer.write(request_bytes("GET", "/a"))
        await clients[3].read_answer()
        await eventually(lambda: len(server.connections) == 4)
        await asyncio.sleep(0.02)

        def sweep(after_s: float) -> None:
            for connection in list(server.connections):
                connection.check_deadline(loop.time() + after_s)

        sweep(11)
        assert await clients[0].reader.read() == b""
        assert (await clients[1].read_answer()).status == 408
        sweep(21)
        slow = await clients[2].read_answer()
        assert (slow.status, slow.headers["x-path"]) == (408, "/a"), "the application knows what was asked for"
        assert not clients[3].reader.at_eof()
        sweep(31)
        assert await clients[3].reader.read() == b""
        for client in clients:
            await client.close()


async def test_close_lets_open_exchanges_end() -> None:
    app = EchoApp()
    server = HttpServer(app, open_listener("127.0.0.1", 0), HttpLimits())
    await server.start()
    busy, idle = await RawClient.connect(server.port), await RawClient.connect(server.port)
    busy.writer.write(request_bytes("GET", "/slow"))
    await eventually(lambda: bool(app.seen))
    closing = asyncio.create_task(server.close(5.0))
    assert await idle.reader.read() == b""
    app.release.set()
    assert (await busy.read_answer()).body == b"late"
    await closing
    assert len(server.connections) == 0
    await busy.close()
    await idle.close()
