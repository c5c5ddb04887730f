"""Our HTTP server beside uvicorn and granian, on the same path of tokens to the client.

    python tools/http_servers.py            # needs uvicorn and granian, which kvrelay does not depend on

One application answers behind all three: a ticker gives every open stream one server-sent event per tick, as the
workers' messages do in the frontend. Behind ASGI the events take the way that ASGI prescribes: a queue, the request's
coroutine, ``await send``. The servers run in turn, each in a process of its own on uvloop, and are loaded by this one.
CPU time of the server's processes is told, not only rates, because a shared machine changes the rates.

The whole frontend behind an ASGI server, for ``python -m benchmarks frontend --url NAME=URL``:

    KVRELAY_HTTP_CONTROL=nats://... python tools/http_servers.py --serve uvicorn --port 9001
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import psutil
import uvloop

from kvrelay.config import ControlConfig, FrontendConfig, RouterConfig
from kvrelay.control import connect_control
from kvrelay.control.base import Keys
from kvrelay.core.clock import MonotonicClock
from kvrelay.frontend import Frontend
from kvrelay.http import Exchange, HttpLimits, HttpRequest, HttpServer, Response, open_listener
from kvrelay.launch.request_plane import client_of
from kvrelay.router import Router

SERVERS = ("own", "uvicorn", "granian")
LOADS = ((8, 64, 4000), (64, 64, 800), (0, 64, 20000))
"""Events per stream (0: one whole answer), streams at once, requests per turn."""
EVENT = (
    b"data: "
    + json.dumps(
        {
            "id": "cmpl-0123456789abcdef0123456789abcdef",
            "object": "text_completion",
            "created": 1790000000,
            "model": "tiny",
            "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
        }
    ).encode()
)
TICK_S = 0.002
CONTROL_VARIABLE = "KVRELAY_HTTP_CONTROL"
END = b"data: [DONE]\n\n"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Ticker:
    """One event for each open stream per tick, each event unlike the other, as tokens are."""

    def __init__(self) -> None:
        self._streams: dict[Exchange, int] = {}
        self._is_running = False
        self._next_s = 0.0
        self._count = 0

    def add(self, stream: Exchange, num_events: int) -> None:
        self._streams[stream] = num_events
        if not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_soon(self._tick)

    def _tick(self) -> None:
        ended = []
        for stream, left in self._streams.items():
            self._count += 1
            stream.write(EVENT + b"%d\n\n" % self._count)
            self._streams[stream] = left - 1
            if left == 1:
                ended.append(stream)
        for stream in ended:
            del self._streams[stream]
            stream.write(END)
            stream.finish()
        self._is_running = bool(self._streams)
        if self._is_running:
            # At a pace that does not depend on the server, as workers have it.
            loop = asyncio.get_running_loop()
            self._next_s = max(self._next_s + TICK_S, loop.time())
            loop.call_at(self._next_s, self._tick)


class TickerApp:
    """Implements ``HttpApplication``."""

    def __init__(self) -> None:
        self._ticker = Ticker()

    def check_head(self, request: HttpRequest) -> Response | None:
        return None

    def error_response(self, status: int, message: str) -> Response:
        return Response(status, message.encode())

    def handle(self, exchange: Exchange) -> None:
        num_events = json.loads(exchange.request.body)["max_tokens"]
        if num_events:
            exchange.start_stream(b"text/event-stream", [(b"x-request-id", b"cmpl-1")])
            self._ticker.add(exchange, num_events)
        else:
            exchange.respond(Response(200, EVENT))


class AsgiExchange:
    """``Exchange`` for an ASGI server: from the application's calls to the coroutine that may ``send``."""

    def __init__(self, request: HttpRequest) -> None:
        self.request = request
        self.is_gone = self.is_started = self.is_done = False
        self._messages: list[MutableMapping[str, Any]] = []
        self._pieces: list[bytes] = []
        self._wake = asyncio.Event()
        self._on_gone: Callable[[], None] = lambda: None

    def on_gone(self, callback: Callable[[], None]) -> None:
        self._on_gone = callback

    def respond(self, response: Response) -> None:
        headers = [(b"content-type", response.content_type), (b"content-length", b"%d" % len(response.body))]
        headers += response.headers
        self._messages.append({"type": "http.response.start", "status": response.status, "headers": headers})
        self._pieces.append(response.body)
        self.finish()

    def start_stream(self, content_type: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self.is_started = True
        headers = [(b"content-type", content_type), *headers]
        self._messages.append({"type": "http.response.start", "status": 200, "headers": headers})

    def write(self, data: bytes) -> None:
        self._pieces.append(data)
        self._wake.set()

    def finish(self) -> None:
        self.is_done = True
        self._wake.set()

    async def pump(self, receive: Receive, send: Send) -> None:
        """Send what has come in one piece, until the answer ends."""
        await self._wake.wait()
        # A client that leaves during a stream must be noticed, so that its request can be cancelled.
        watch = None if self.is_done else asyncio.ensure_future(self._watch(receive))
        while True:
            await self._wake.wait()
            self._wake.clear()
            messages, self._messages = self._messages, []
            data, self._pieces = b"".join(self._pieces), []
            is_done = self.is_done
            for message in messages:
                await send(message)
            await send({"type": "http.response.body", "body": data, "more_body": not is_done})
            if is_done:
                break
        if watch is not None:
            watch.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self.is_done:
            self.is_gone = True
            self._on_gone()


class AsgiApp:
    """Any ``HttpApplication`` behind ASGI; ``KVRELAY_HTTP_CONTROL`` makes it the frontend of that control plane."""

    def __init__(self) -> None:
        self._application: Any = TickerApp()
        self._frontend: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request = HttpRequest(scope["method"], scope["path"], scope["query_string"].decode(), headers)
        exchange = AsgiExchange(request)
        refusal = self._application.check_head(request)
        if refusal is not None:
            exchange.respond(refusal)
        else:
            pieces = []
            while True:
                message = await receive()
                pieces.append(message.get("body", b""))
                if not message.get("more_body", False):
                    break
            request.body = b"".join(pieces)
            self._application.handle(exchange)
        await exchange.pump(receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        control_url = os.environ.get(CONTROL_VARIABLE)
        if control_url:
            control = await connect_control(ControlConfig(control=control_url))
            clock = MonotonicClock()
            self._frontend = Frontend(
                FrontendConfig(port=0),
                control,
                Keys(ControlConfig().namespace),
                client_of,
                lambda size, replay, stage: Router(RouterConfig(), size, clock, stage, replay),
            )
            await self._frontend.cluster.start()
            await self._frontend.cluster.wait_synced(5.0)
            await self._frontend.cluster.wait_connected(5.0)
            self._application = self._frontend._app
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})


asgi_app = AsgiApp()


def run_server(name: str, port: int) -> None:
    """Serve until killed."""
    if name == "own":
        uvloop.run(_run_own(port))
    elif name == "uvicorn":
        import uvicorn

        uvicorn.run(asgi_app, port=port, loop="uvloop", http="httptools", access_log=False, log_level="warning")
    else:
        import granian
        from granian.constants import Interfaces, Loops

        server = granian.Granian(
            "http_servers:asgi_app",
            port=port,
            interface=Interfaces.ASGI,
            loop=Loops.uvloop,
            workers=1,
            log_enabled=False,
        )
        server.serve()


async def _run_own(port: int) -> None:
    server = HttpServer(TickerApp(), open_listener("127.0.0.1", port), HttpLimits())
    await server.start()
    await asyncio.Event().wait()


async def load(port: int, num_events: int, at_once: int, count: int) -> None:
    """``count`` requests over ``at_once`` kept-alive connections; every answer is checked for its end."""
    body = json.dumps({"prompt": "x" * 100, "max_tokens": num_events}).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    left = count

    async def client() -> None:
        nonlocal left
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while left > 0:
            left -= 1
            writer.write(request)
            if num_events:
                await reader.readuntil(END)
                await reader.readuntil(b"\r\n0\r\n\r\n")
            else:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(len(EVENT))
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(client() for _ in range(at_once)))


def cpu_s(process: psutil.Process) -> float:
    """Of the process and its children."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def measure(name: str, loads: tuple[tuple[int, int, int], ...]) -> list[dict[str, float]]:
    """One turn of one server: for each load rates and CPU time per request."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    child = subprocess.Popen([sys.executable, __file__, "--serve", name, "--port", str(port)])
    process = psutil.Process(child.pid)
    try:
        _wait_listening(port)
        figures = []
        for num_events, at_once, count in loads:
            uvloop.run(load(port, num_events, at_once, at_once))
            before_cpu_s, before_s = cpu_s(process), time.perf_counter()
            uvloop.run(load(port, num_events, at_once, count))
            used_s, took_s = cpu_s(process) - before_cpu_s, time.perf_counter() - before_s
            figures.append(
                {
                    "requests_per_s": count / took_s,
                    "chunks_per_s": count * num_events / took_s,
                    "cpu_ms_per_request": used_s / count * 1e3,
                    "chunks_per_cpu_s": count * num_events / used_s,
                }
            )
        return figures
    finally:
        child.terminate()
        child.wait()


def _wait_listening(port: int) -> None:
    for _ in range(500):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.02)
    raise SystemExit("the server did not start")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--serve", choices=SERVERS)
    arguments.add_argument("--port", type=int)
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    if options.serve:
        run_server(options.serve, options.port)
        return
    turns: dict[str, list[list[dict[str, float]]]] = {name: [] for name in SERVERS}
    for _ in range(options.rounds):
        for name in SERVERS:
            turns[name].append(measure(name, LOADS))
    for number, (num_events, at_once, _) in enumerate(LOADS):
        print(f"{num_events} events per answer, {at_once} at once")
        for name in SERVERS:
            figures = [turn[number] for turn in turns[name]]
            line = {key: statistics.median(one[key] for one in figures) for key in figures[0]}
            print(f"  {name:8}", ", ".join(f"{key} {value:,.3f}" for key, value in line.items()))


if __name__ == "__main__":
    main()
