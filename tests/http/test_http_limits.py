"""What many or hostile clients may take: memory, descriptors, time."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import os
import resource
import socket
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop
from tests import patience
from tests.frontend.echo import EchoApp, serving
from tests.frontend.raw_http import RawClient, request_bytes, send

from kvrelay.http import HttpLimits, HttpServer, Response, open_listener, raise_descriptor_limit
from kvrelay.http import listening as accepting_module
from kvrelay.http.connection import MAX_PIECES, HttpConnection
from kvrelay.http.limits import ByteBudget
from kvrelay.http.listening import SocketAcceptor, connections_within_limit

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
UPLOAD = b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"


def run(new_loop: Callable[[], asyncio.AbstractEventLoop], body: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(body)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


@LOOPS
def test_an_aborted_upload_is_freed_without_a_collection(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def body() -> None:
        async with serving() as (_, server):
            client = await RawClient.connect(server.port)
            client.writer.write(UPLOAD % 1_000_000 + b"x" * 500_000)
            await until(lambda: server.buffered.total > 200_000)
            connection = weakref.ref(next(iter(server.connections)))
            client.writer.transport.abort()
            await until(lambda: not server.connections)
            await until(lambda: connection() is None)
            assert server.buffered.total == 0

    gc.collect()
    gc.disable()
    try:
        run(new_loop, body())
    finally:
        gc.enable()


async def test_the_largest_upload_is_refused_when_too_much_is_buffered() -> None:
    async with serving(HttpLimits(max_buffered_bytes=1_000_000)) as (_, server):
        large, small = await RawClient.connect(server.port), await RawClient.connect(server.port)
        small.writer.write(UPLOAD % 300_000 + b"x" * 200_000)
        await until(lambda: server.buffered.total == 200_000)
        large.writer.write(UPLOAD % 2_000_000 + b"x" * 1_000_000)
        answer = await large.read_answer()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert server.buffered.total == 200_000
        small.writer.write(b"x" * 100_000)
        assert (await small.read_answer()).status == 200
        assert server.buffered.total == 0
        for client in (large, small):
            await client.close()


async def test_pipelined_bodies_are_not_read_ahead() -> None:
    async with serving() as (app, server):
        client = await RawClient.connect(server.port)
        client.writer.write(request_bytes("GET", "/slow"))
        await until(lambda: bool(app.seen))
        total = 0
        payload = request_bytes("POST", "/a", b"x" * 1_000_000)
        for _ in range(20):
            client.writer.write(payload)
        for _ in range(200):
            await asyncio.sleep(0.001)
            total = max(total, server.buffered.total)
        assert 0 < total < 1_000_000
        app.release.set()
        assert (await client.read_answer()).body == b"late"
        for _ in range(20):
            assert len((await client.read_answer()).body) == 1_000_000
        assert server.buffered.total == 0
        await client.close()


async def test_many_small_pipelined_requests_are_all_answered() -> None:
    async with serving() as (app, server):
        client = await RawClient.connect(server.port)
        client.writer.write(
            request_bytes("GET", "/slow")
            + b"".join(request_bytes("POST", "/a", b"%d" % number) for number in range(5000))
        )
        await until(lambda: bool(app.seen))
        app.release.set()
        assert (await client.read_answer()).body == b"late"
        assert [(await client.read_answer()).body for _ in range(5000)] == [b"%d" % number for number in range(5000)]
        await client.close()


async def test_garbage_behind_a_request_waits_for_its_answer() -> None:
    async with serving() as (app, server):
        client = await RawClient.connect(server.port)
        client.writer.write(request_bytes("GET", "/slow") + b"garbage\r\n\r\n")
        await until(lambda: bool(app.seen))
        app.release.set()
        assert [(await client.read_answer()).status for _ in range(2)] == [200, 400]
        assert await client.reader.read() == b""
        await client.close()


async def test_a_continue_does_not_come_amid_an_answer() -> None:
    async with serving() as (app, server):
        client = await RawClient.connect(server.port)
        head = b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n"
        client.writer.write(request_bytes("GET", "/slow") + head)
        await until(lambda: bool(app.seen))
        app.release.set()
        assert (await client.read_answer()).body == b"late"
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(b"ok")
        assert (await client.read_answer()).body == b"ok"
        await client.close()


class FakeTransport(asyncio.Transport):
    """A client that takes what it is told to take."""

    def __init__(self) -> None:
        super().__init__()
        self.unsent = 0
        self.writes: list[bytes] = []
        self.is_aborted = self.is_closed = False

    def get_extra_info(self, name: str, default: object = None) -> None:
        return None

    def write(self, data: Any) -> None:
        self.unsent += len(data)
        self.writes.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        self.is_closed = True


async def test_a_large_answer_is_sent_for_as_long_as_the_client_takes_it() -> None:
    limits = HttpLimits(max_unsent_bytes=1000, stall_timeout_s=10, idle_timeout_s=50)
    server = HttpServer(EchoApp(), open_listener("127.0.0.1", 0), limits)
    now_s = [0.0]
    connection, transport = HttpConnection(server, lambda: now_s[0]), FakeTransport()

    def later(seconds: float) -> bool:
        now_s[0] += seconds
        connection.check_deadline(now_s[0])
        return transport.is_aborted

    connection.connection_made(transport)
    connection.data_received(request_bytes("POST", "/a", b"x" * 100_000))
    connection.pause_writing()
    for _ in range(80):
        transport.unsent -= 1000
        assert not later(9)
    transport.unsent = 900
    assert not later(1)
    # Little is unread: only the idle timeout ends it.
    assert not later(49)
    assert later(1)
    transport.is_aborted, transport.unsent = False, 5000
    assert not later(1)
    assert not later(9)
    transport.unsent = 4000
    assert not later(1)
    assert not later(9)
    assert later(41)
    connection.connection_lost(None)
    await server.close(0)


async def test_what_one_turn_of_the_loop_answers_is_written_at_once() -> None:
    """Head, pieces and end of a stream; with an answer before it, and before the connection closes."""
    server = HttpServer(EchoApp(), open_listener("127.0.0.1", 0), HttpLimits())
    connection, transport = HttpConnection(server, lambda: 0.0), FakeTransport()
    connection.connection_made(transport)
    connection.data_received(request_bytes("GET", "/stream"))
    assert not transport.writes
    await asyncio.sleep(0)
    assert [data.count(b"\r\n\r\n") for data in transport.writes] == [2]
    assert transport.writes[0].endswith(b"4\r\none,\r\n3\r\ntwo\r\n0\r\n\r\n")
    connection.data_received(request_bytes("GET", "/stream", headers={"connection": "close"}))
    assert transport.is_closed
    assert transport.writes[1].endswith(b"0\r\n\r\n")
    await asyncio.sleep(0)
    assert len(transport.writes) == 2
    connection.connection_lost(None)
    await server.close(0)


async def test_many_pieces_do_not_wait_for_the_end_of_the_turn() -> None:
    server = HttpServer(EchoApp(), open_listener("127.0.0.1", 0), HttpLimits())
    connection, transport = HttpConnection(server, lambda: 0.0), FakeTransport()
    connection.connection_made(transport)
    for _ in range(2 * MAX_PIECES + 1):
        connection.send(b"x")
    assert [len(data) for data in transport.writes] == [MAX_PIECES] * 2
    await asyncio.sleep(0)
    assert transport.unsent == 2 * MAX_PIECES + 1
    connection.connection_lost(None)
    await server.close(0)


async def test_a_stream_that_nobody_reads_is_cut_off() -> None:
    limits = HttpLimits(max_unsent_bytes=1 << 20, stall_timeout_s=10)
    async with serving(limits) as (app, server):
        client = await RawClient.connect(server.port)
        client.writer.transport.pause_reading()
        client.writer.write(request_bytes("GET", "/endless"))
        await until(lambda: server.unsent.total > 8 << 20)
        loop = asyncio.get_running_loop()
        for after_s in (1, 9):
            for connection in list(server.connections):
                connection.check_deadline(loop.time() + after_s)
            await asyncio.sleep(0.01)
        # The kernel's buffers may have taken more meanwhile.
        for after_s in range(20, 200, 11):
            for connection in list(server.connections):
                connection.check_deadline(loop.time() + after_s)
            await asyncio.sleep(0.001)
        await until(lambda: app.gone == ["/endless"])
        assert server.unsent.total == 0
        await client.close()


async def test_the_largest_unread_answer_is_cut_off_when_all_are_too_much() -> None:
    async with serving(HttpLimits(max_total_unsent_bytes=1 << 20)) as (app, server):
        client = await RawClient.connect(server.port)
        client.writer.write(request_bytes("GET", "/big"))
        await until(lambda: app.gone == ["/big"])
        assert (await send(server.port, "POST", "/a", b"fine")).body == b"fine"
        await client.close()


@LOOPS
def test_a_half_closed_client_is_answered(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def body() -> None:
        async with serving() as (app, server):
            client = await RawClient.connect(server.port)
            client.writer.write(request_bytes("GET", "/slow") + request_bytes("POST", "/a", b"next"))
            client.writer.write_eof()
            await until(lambda: bool(app.seen))
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            for connection in server.connections:
                connection.check_deadline(asyncio.get_running_loop().time())
            app.release.set()
            assert [(await client.read_answer()).body for _ in range(2)] == [b"late", b"next"]
            assert await client.reader.read() == b""
            await client.close()
            await until(lambda: not server.connections)

    run(new_loop, body())


@LOOPS
def test_a_client_that_has_gone_is_told_from_a_half_closed_one(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def body() -> None:
        async with serving() as (app, server):
            client = await RawClient.connect(server.port)
            client.writer.write(request_bytes("GET", "/slow"))
            await until(lambda: bool(app.seen))
            await client.close()
            await until(lambda: app.gone == ["/slow"])
            await until(lambda: not server.connections)

    run(new_loop, body())


async def test_too_many_connections_are_told_so() -> None:
    async with serving(HttpLimits(max_connections=2)) as (_, server):
        clients = [await RawClient.connect(server.port) for _ in range(2)]
        await until(lambda: len(server.connections) == 2)
        late = await RawClient.connect(server.port)
        late.writer.write(request_bytes("GET", "/a"))
        answer = await late.read_answer()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        await late.close()
        await clients.pop().close()
        await until(lambda: len(server.connections) == 1)
        assert (await send(server.port, "GET", "/a")).status == 200
        await clients.pop().close()


class ShortListener(socket.socket):
    """Has no descriptor for the first client."""

    num_calls = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.num_calls += 1
        if self.num_calls == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def short_listener() -> ShortListener:
    listener = ShortListener()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    listener.setblocking(False)
    return listener


async def test_a_client_without_a_descriptor_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting_module, "PAUSE_S", 0.001)
    opens, open_now = itertools.count(), os.open

    def short_at_first(path: str, *flags: int) -> int:
        """The pause is over, and there is still none for the reserve."""
        if path == os.devnull and next(opens) == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return open_now(path, *flags)

    monkeypatch.setattr(os, "open", short_at_first)
    listener = short_listener()
    accepted: list[socket.socket] = []
    acceptor = SocketAcceptor(listener, accepted.append, b"refused")
    acceptor.start()
    port = listener.getsockname()[1]
    client = await RawClient.connect(port)
    assert await client.reader.read() == b"refused"
    other = await RawClient.connect(port)
    await until(lambda: len(accepted) == 1)
    acceptor.close()
    accepted[0].close()
    for one in (client, other):
        await one.close()


async def test_while_it_is_short_it_does_not_ask_again_and_its_end_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener, accepted = short_listener(), list[socket.socket]()
    acceptor = SocketAcceptor(listener, accepted.append, b"refused")
    acceptor.start()
    port = listener.getsockname()[1]
    clients = [await RawClient.connect(port)]
    assert await clients[0].reader.read() == b"refused"
    clients.append(await RawClient.connect(port))
    for _ in range(20):
        await asyncio.sleep(0)
    assert (listener.num_calls, accepted) == (2, []), "the shortage, and the client that was told"
    acceptor.close()
    reserved: list[object] = []
    monkeypatch.setattr(os, "open", lambda *given: reserved.append(given))
    await asyncio.sleep(1.5 * accepting_module.PAUSE_S)
    assert reserved == []
    for client in clients:
        await client.close()


async def test_the_reserved_descriptor_ends_with_the_acceptor() -> None:
    gc.collect()  # what earlier tests have left is not counted
    before = len(os.listdir("/proc/self/fd"))
    acceptor = SocketAcceptor(short_listener(), lambda _: None, b"")
    acceptor.start()
    acceptor.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def descriptor_limit() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_descriptor_limit_is_raised_and_a_reserve_kept(descriptor_limit: tuple[int, int]) -> None:
    hard = descriptor_limit[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    assert connections_within_limit(16_384) == 1024 - 256
    assert connections_within_limit(10) == 10
    raise_descriptor_limit()
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert soft == (65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536))


async def test_the_backlog_is_what_the_kernel_allows() -> None:
    """A frontend that is busy for a moment refuses nobody: connects wait."""
    async with serving() as (_, server):
        clients = [socket.socket() for _ in range(400)]
        for client in clients:
            client.setblocking(False)
            try:
                client.connect(("127.0.0.1", server.port))
            except BlockingIOError:
                pass
        # Nothing is accepted meanwhile: this coroutine does not let go of the loop.
        patience.until(
            lambda: {client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO) for client in clients} == {TCP_ESTABLISHED}
        )
        assert all(client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0 for client in clients)
        for client in clients:
            client.close()


TCP_ESTABLISHED = 1


def test_what_no_holder_can_shed_is_kept() -> None:
    """Requests that are being answered, for example."""
    shed: list[str] = []
    budget = ByteBudget[str](100, {"a": 80, "b": 70}.__getitem__, lambda _: 0, shed.append)
    for holder in "ab":
        budget.update(holder)
    assert (budget.total, shed) == (150, [])


def test_a_budget_sheds_the_largest_only() -> None:
    sizes = {"a": 10, "b": 70, "c": 30}
    shed: list[str] = []

    def drop(name: str) -> None:
        shed.append(name)
        sizes[name] = 0

    budget = ByteBudget[str](100, sizes.__getitem__, sizes.__getitem__, drop)
    for name in "abc":
        budget.update(name)
    assert (shed, budget.total) == (["b"], 40)
    sizes["c"] = 300
    budget.update("c")
    assert (shed, budget.total) == (["b", "c"], 10)
    budget.forget("a")
    assert budget.total == 0


async def test_a_body_that_was_decoded_counts_with_its_new_size() -> None:
    async with serving() as (app, server):
        client = await RawClient.connect(server.port)
        exchanges = []
        app.handle = exchanges.append  # type: ignore[method-assign]
        client.writer.write(UPLOAD % 1000 + b"x" * 1000)
        await until(lambda: exchanges)
        assert server.buffered.total == 1000
        exchanges[0].replace_body(b"y" * 500_000)
        assert server.buffered.total == 500_000
        exchanges[0].drop_body()
        assert server.buffered.total == 0
        exchanges[0].respond(Response(200, b"ok"))
        assert (await client.read_answer()).status == 200
        await client.close()
