"""An HTTP server whose application echoes: for what belongs to HTTP alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrelay.http import Exchange, HttpLimits, HttpRequest, HttpServer, Response, open_listener


class EchoApp:
    """Answers with the body; ``/stream`` in two pieces, ``/slow`` when told to, ``/big`` 256 MiB at once, ``/endless``
    piece by piece until the client has gone."""

    def __init__(self) -> None:
        self.seen: list[HttpRequest] = []
        self.gone: list[str] = []
        self.release = asyncio.Event()
        self.num_pieces = 512
        self._tasks: set[asyncio.Task[None]] = set()

    def check_head(self, request: HttpRequest) -> Response | None:
        return Response(404, b"no") if request.path == "/none" else None

    def error_response(self, status: int, message: str, path: str) -> Response:
        return Response(status, message.encode(), b"text/plain", [(b"x-path", path[:64].encode())])

    def handle(self, exchange: Exchange) -> None:
        request = exchange.request
        self.seen.append(request)
        exchange.on_gone(lambda: self.gone.append(request.path))
        if request.path == "/slow":
            task = asyncio.get_running_loop().create_task(self._later(exchange))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif request.path == "/endless":
            exchange.start_stream(b"text/plain")
            self._go_on(exchange)
        elif request.path == "/stream":
            exchange.start_stream(b"text/plain")
            exchange.write(b"one,")
            exchange.write(b"two")
            exchange.finish()
        elif request.path == "/big":
            exchange.start_stream(b"text/plain")
            for _ in range(4096):
                exchange.write(b"x" * 65536)
                if exchange.is_gone:
                    break
        else:
            exchange.respond(Response(200, request.body, b"text/plain"))

    def _go_on(self, exchange: Exchange) -> None:
        if not exchange.is_gone and self.num_pieces > 0:
            self.num_pieces -= 1
            exchange.write(b"x" * 65536)
            asyncio.get_running_loop().call_soon(self._go_on, exchange)

    async def _later(self, exchange: Exchange) -> None:
        await self.release.wait()
        exchange.respond(Response(200, b"late", b"text/plain"))


@asynccontextmanager
async def serving(limits: HttpLimits | None = None) -> AsyncIterator[tuple[EchoApp, HttpServer]]:
    app = EchoApp()
    server = HttpServer(app, open_listener("127.0.0.1", 0), limits or HttpLimits())
    await server.start()
    try:
        yield app, server
    finally:
        await server.close(0.0)
