"""A server with known delays that speaks the OpenAI API, on a thread of its own: the double for the client's tests.

It notes when it wrote each piece, by the clock that the client stamps with, so that a test compares stamp with stamp
instead of hoping for an idle machine.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType

import pytest


@dataclass(frozen=True)
class Script:
    """How an answer comes: seconds before the first piece, between pieces, tokens per piece."""

    first_s: float = 0.0
    gap_s: float = 0.0
    tokens_per_piece: int = 1
    token_ids: bool = True
    usage: bool = True
    running_usage: bool = True
    tokenize: bool = True
    metrics: bytes = b""
    mode: str = "stream"


@dataclass
class Served:
    """What the server did for one request."""

    body: dict[str, object]
    path: str
    headers: str = ""
    received_ns: int = 0
    written_ns: list[int] = field(default_factory=list)


class ScriptedServer:
    """Use as a context manager; ``served`` lists the completions in the order of their arrival."""

    def __init__(self, script: Script, port: int = 0) -> None:
        self.script = script
        self.served: list[Served] = []
        self.connections = 0
        self._port = port
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", self._port)
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.sleep(0)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split(" ", 2)
                length = next(
                    (
                        int(line.split(":")[1])
                        for line in head.splitlines()
                        if line.lower().startswith("content-length")
                    ),
                    0,
                )
                body = await reader.readexactly(length)
                if not await self._answer(method, path, head, body, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, method: str, path: str, head: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        if path == "/health":
            writer.write(_plain(b"{}"))
        elif path == "/v1/models":
            writer.write(_plain(b'{"data": [{"id": "scripted"}]}'))
        elif path == "/tokenize" and self.script.tokenize:
            words = json.loads(body)["prompt"].split()
            writer.write(_plain(json.dumps({"count": len(words)}).encode()))
        elif path == "/metrics" and self.script.metrics:
            writer.write(_plain(self.script.metrics))
        elif path == "/detokenize":
            tokens = json.loads(body)["tokens"]
            writer.write(_plain(json.dumps({"prompt": " ".join(map(str, tokens))}).encode()))
        elif path.endswith("/completions"):
            return await self._complete(Served(json.loads(body), path, head, time.perf_counter_ns()), writer)
        else:
            writer.write(_plain(b'{"error": {"message": "no such page"}}', "404 Not Found"))
        await writer.drain()
        return True

    async def _complete(self, served: Served, writer: asyncio.StreamWriter) -> bool:
        self.served.append(served)
        mode = self.script.mode
        if mode == "refuse":
            writer.write(_plain(b'{"error": {"message": "too many\\nrequests"}}', "503 Service Unavailable"))
            return True
        if mode == "not-http":
            writer.write(b"SSH-2.0-garbage\r\n\r\n")
            return False
        if mode == "html":
            writer.write(_plain(b"<html>hello</html>", kind="text/html"))
            return True
        if mode == "drop":
            return False
        await self._stream(served, writer)
        return mode != "until-close"

    async def _stream(self, served: Served, writer: asyncio.StreamWriter) -> None:
        chunked = self.script.mode != "until-close"
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        writer.write(head + (b"transfer-encoding: chunked\r\n\r\n" if chunked else b"connection: close\r\n\r\n"))
        total = int(str(served.body["max_tokens"]))
        due = time.perf_counter() + self.script.first_s
        events = list(_events(self.script, total, chat="chat" in served.path))
        for index, (event, is_token) in enumerate(events):
            if is_token:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                due += self.script.gap_s
                served.written_ns.append(time.perf_counter_ns())
            if self.script.mode == "garbage" and index == 2:
                event = b"data: {this is no JSON}\n\n"
            if self.script.mode == "break" and index == 2:
                writer.transport.abort()
                return
            writer.write(b"%x\r\n%s\r\n" % (len(event), event) if chunked else event)
            await writer.drain()
        if chunked:
            writer.write(b"0\r\n\r\n")


def _events(script: Script, total: int, chat: bool) -> Iterator[tuple[bytes, bool]]:
    if chat:
        yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}), False
    made = 0
    while made < total:
        count = min(script.tokens_per_piece, total - made)
        made += count
        text = "".join(f" w{made - count + at}" for at in range(count))
        choice: dict[str, object] = {"index": 0, "finish_reason": "length" if made == total else None}
        choice |= {"delta": {"content": text}} if chat else {"text": text}
        if script.token_ids:
            choice["token_ids"] = list(range(made - count, made))
        chunk: dict[str, object] = {"object": "chunk", "choices": [choice]}
        if script.running_usage:
            chunk["usage"] = {"prompt_tokens": 7, "completion_tokens": made}
        yield _event(chunk), True
    if script.usage:
        usage = {"prompt_tokens": 7, "completion_tokens": total, "prompt_tokens_details": {"cached_tokens": 3}}
        yield _event({"choices": [], "usage": usage}), False
    yield b"data: [DONE]\n\n", False


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _plain(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.fixture
def scripted() -> Callable[..., ScriptedServer]:
    """Makes a server of the given script; enter it to start it."""
    return lambda **script: ScriptedServer(Script(**script))
