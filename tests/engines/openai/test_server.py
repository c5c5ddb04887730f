"""The HTTP side against a server that writes its bytes as it likes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.patience import PATIENCE_S, skip

from kvrelay.config import UpstreamConfig
from kvrelay.engines.hosted.backend import AnswerError, BackendRefusedError
from kvrelay.engines.openai import server as server_module
from kvrelay.engines.openai.server import UpstreamServer

EVENTS = (
    b'data: {"choices":[{"text":"a","token_ids":[1]}]}\n\n',
    b'data: {"choices":[{"text":"b","token_ids":[2],"finish_reason":"length"}]}\n\n',
    b"data: [DONE]\n\n",
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


class Raw:
    """What the server has seen. ``answer`` writes the answer to one request."""

    def __init__(self, answer: Callable[[Raw, asyncio.StreamWriter], Awaitable[None]]) -> None:
        self.answer = answer
        self.heads: list[bytes] = []
        self.num_connections = self.num_closed = self.num_bytes = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line[15:] for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")]
                self.num_bytes += len(await reader.readexactly(int(length[0]) if length else 0))
                self.heads.append(head)
                await self.answer(self, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.num_closed += 1
        finally:
            writer.close()


@asynccontextmanager
async def raw_server(
    answer: Callable[[Raw, asyncio.StreamWriter], Awaitable[None]], path: str = "", **settings: object
) -> AsyncIterator[tuple[Raw, UpstreamServer]]:
    raw = Raw(answer)
    listening = await asyncio.start_server(raw.serve, "127.0.0.1", 0)
    raw.port = listening.sockets[0].getsockname()[1]
    upstream = UpstreamServer(UpstreamConfig(upstream=f"http://127.0.0.1:{raw.port}{path}", **settings))
    try:
        yield raw, upstream
    finally:
        await upstream.close()
        async with asyncio.timeout(PATIENCE_S):
            while raw.num_closed < raw.num_connections:
                await asyncio.sleep(0.002)
        listening.close()
        await listening.wait_closed()


def chunk(data: bytes) -> bytes:
    return b"%x;name=value\r\n%s\r\n" % (len(data), data)


async def tokens_of(upstream: UpstreamServer, body: dict[str, object] | None = None) -> list[int]:
    async with asyncio.timeout(PATIENCE_S):
        return [token async for piece in upstream.stream(body or {}) for token in piece.token_ids or ()]


async def whole(raw: Raw, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"".join(map(chunk, EVENTS)) + END)


async def test_a_connection_is_kept_although_the_end_comes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "END_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(server_module, "KEPT_S", PATIENCE_S)

    async def answer(raw: Raw, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"".join(map(chunk, EVENTS)))
        await writer.drain()
        # The client reads the last event before the end is written.
        await asyncio.sleep(0.01)
        writer.write(END)

    async with raw_server(answer) as (raw, upstream):
        for _ in range(3):
            assert await tokens_of(upstream) == [1, 2]
        assert raw.num_connections == 1


async def test_a_server_that_does_not_end_its_answer_loses_only_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "END_TIMEOUT_S", 0.01)

    async def answer(raw: Raw, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"".join(map(chunk, EVENTS)))

    async with raw_server(answer) as (raw, upstream):
        assert await tokens_of(upstream) == [1, 2]
        assert await tokens_of(upstream) == [1, 2]
        assert raw.num_connections == 2


async def test_every_byte_by_itself_and_informational_answers_before() -> None:
    async def answer(raw: Raw, writer: asyncio.StreamWriter) -> None:
        answered = HEAD + b"".join(map(chunk, EVENTS)) + END
        for byte in b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + answered:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)

    async with raw_server(answer) as (_, upstream):
        assert await tokens_of(upstream) == [1, 2]


async def test_no_redirect_is_followed() -> None:
    async def answer(raw: Raw, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n")

    async with raw_server(answer) as (raw, upstream):
        with pytest.raises(BackendRefusedError) as caught:
            await tokens_of(upstream)
        assert "this one is to 'http://127.0.0.1:1/'" in caught.value.detail
        assert await upstream.is_healthy(), "it answers"
        assert len(raw.heads) == 2


async def test_the_users_netrc_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc, key = tmp_path / "netrc", tmp_path / "key"
    netrc.write_text("default login user password secret\n")
    key.write_text("ours\n")
    monkeypatch.setenv("NETRC", str(netrc))
    for settings in ({}, {"upstream_api_key_file": str(key)}):
        async with raw_server(whole, **settings) as (raw, upstream):
            assert await tokens_of(upstream) == [1, 2]
            sent = [line for line in raw.heads[0].split(b"\r\n") if line.startswith(b"Authorization")]
            assert sent == ([b"Authorization: Bearer ours"] if settings else [])


async def test_cookies_are_not_sent_back() -> None:
    async def answer(raw: Raw, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD.replace(b"\r\n", b"\r\nSet-Cookie: a=b\r\n", 1) + b"".join(map(chunk, EVENTS)) + END)

    async with raw_server(answer) as (raw, upstream):
        for _ in range(2):
            assert await tokens_of(upstream) == [1, 2]
        assert not any(b"cookie" in head.lower() for head in raw.heads)


async def test_a_large_prompt_is_sent_whole() -> None:
    async with raw_server(whole, path="/base/v1") as (raw, upstream):
        assert await tokens_of(upstream, {"prompt": [7] * 1_000_000}) == [1, 2]
        assert raw.num_bytes == len('{"prompt":[]}') + 2 * 1_000_000 - 1
        assert raw.heads[0].startswith(b"POST /base/v1/completions ")


@pytest.mark.parametrize("begun", [b"", HEAD, HEAD + chunk(EVENTS[0]), HEAD + b"".join(map(chunk, EVENTS))])
async def test_a_cancelled_answer_closes_its_connection(begun: bytes) -> None:
    async def answer(raw: Raw, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)

    async with raw_server(answer) as (raw, upstream), asyncio.timeout(PATIENCE_S):
        asking = asyncio.create_task(tokens_of(upstream))
        while not raw.heads:
            await asyncio.sleep(0.002)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        while not raw.num_closed:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        HEAD + b"zz\r\n",
        HEAD + chunk(EVENTS[0]),
        HEAD.replace(b"\r\n", b"\r\nContent-Encoding: gzip\r\n", 1) + chunk(b"no gzip") + END,
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n" + EVENTS[0],
        HEAD + chunk(EVENTS[0]) + END,
    ],
)
async def test_a_broken_answer_is_an_error_of_the_request(broken: bytes) -> None:
    async def answer(raw: Raw, writer: asyncio.StreamWriter) -> None:
        writer.write(broken)
        raise ConnectionError

    async with raw_server(answer) as (_, upstream):
        with pytest.raises(AnswerError):
            await tokens_of(upstream)


ENDLESS = (b": waiting\n\n", b"event: x\n", b"data: {}\n\n", b'data: {"choices":[{"text":"a","token_ids":[]}]}\n\n')


@pytest.mark.parametrize("begun", [b"", chunk(EVENTS[0])])
@pytest.mark.parametrize("sent", ENDLESS)
async def test_an_answer_without_progress_is_lost_although_bytes_come(
    begun: bytes, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + skipped_s)
    monkeypatch.setattr(server_module, "time", clock)

    async def answer(raw: Raw, writer: asyncio.StreamWriter) -> None:
        nonlocal skipped_s
        writer.write(HEAD + begun)
        for number in itertools.count():
            skipped_s = 2 * PATIENCE_S if number >= 10 else 0.0
            writer.write(chunk(sent))
            await writer.drain()
            await asyncio.sleep(0.002)

    async with raw_server(answer, upstream_timeout_s=PATIENCE_S) as (_, upstream):
        with pytest.raises(AnswerError, match="no token"):
            await tokens_of(upstream)


async def test_bytes_without_progress_are_bounded_between_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_QUIET_BYTES", 1000)
    padding = {"now": b": " + b"x" * 900 + b"\n\n"}

    async def answer(raw: Raw, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for _ in range(10):
            writer.write(chunk(padding["now"] + EVENTS[0]))
            await writer.drain()
        writer.write(b"".join(map(chunk, EVENTS[1:])) + END)

    async with raw_server(answer) as (_, upstream):
        assert await tokens_of(upstream) == [1] * 10 + [2]
        padding["now"] *= 2000
        with pytest.raises(AnswerError, match="no token"):
            await tokens_of(upstream)


async def test_nothing_after_the_last_token_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "END_TIMEOUT_S", 0.01)

    async def answer(raw: Raw, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"".join(map(chunk, EVENTS[:2])))
        while True:
            writer.write(chunk(b": more\n\n"))
            await writer.drain()
            await asyncio.sleep(0.002)

    async with raw_server(answer) as (_, upstream):
        assert await tokens_of(upstream) == [1, 2]


@pytest.mark.parametrize("status", [b"200 OK", b"429 Too Many Requests"])
@pytest.mark.parametrize("in_head", [True, False])
async def test_an_answer_that_drips_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch, status: bytes, in_head: bool
) -> None:
    monkeypatch.setattr(server_module, "HEALTH_TIMEOUT_S", 30.0)
    has_dripped = asyncio.Event()

    async def answer(raw: Raw, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 1000000\r\n" + (b"X: " if in_head else b"\r\n"))
        for number in itertools.count():
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.002)
            if number == 10:
                has_dripped.set()

    async with raw_server(answer, upstream_timeout_s=30.0) as (_, upstream):
        asking = asyncio.create_task(upstream.complete({}))
        await has_dripped.wait()
        skip(30.0)
        with pytest.raises((AnswerError, BackendRefusedError)) as caught:
            await asking
        assert isinstance(caught.value, BackendRefusedError) == (status.startswith(b"429") and not in_head)


@pytest.mark.parametrize(
    ("header", "wait_s"), [(b"7", 7.0), (b"1e308", 600.0), (b"nan", 1.0), (b"-5", 0.1), (b"Wed, 21 Oct 2026", 1.0)]
)
async def test_how_long_a_server_asks_us_to_wait(header: bytes, wait_s: float) -> None:
    async def answer(raw: Raw, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 429 X\r\nRetry-After: " + header + b"\r\nContent-Length: 0\r\n\r\n")

    async with raw_server(answer) as (_, upstream):
        with pytest.raises(BackendRefusedError) as caught:
            await tokens_of(upstream)
        assert caught.value.retry_after_s == wait_s
