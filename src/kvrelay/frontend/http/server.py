"""Listening, the set of open connections, and an orderly end.

The socket is opened with SO_REUSEPORT, so that several frontend processes share one port and the kernel spreads new
connections over them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import Protocol

from kvrelay.errors import AddressInUseError, ConfigError
from kvrelay.frontend.http.connection import HttpConnection, HttpLimits
from kvrelay.frontend.http.exchange import Exchange
from kvrelay.frontend.http.messages import HttpRequest, Response

_log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 1.0
BACKLOG = 1024
MAX_CONNECTIONS = 16_384
TLS_HANDSHAKE_TIMEOUT_S = 10.0


class HttpApplication(Protocol):
    """What answers the requests."""

    def check_head(self, request: HttpRequest) -> Response | None:
        """Refuse a request before its body is read, or None."""

    def error_response(self, status: int, message: str) -> Response:
        """The body of an error that HTTP itself raised."""

    def handle(self, exchange: Exchange) -> None:
        """Answer, now or later. Must not block or raise."""


def open_listener(host: str, port: int, *, reuse_port: bool = True) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises AddressInUseError, ConfigError."""
    try:
        infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as exc:
        raise ConfigError(f"cannot listen on {host}: {exc.strerror or exc}", param="host") from exc
    family, kind, protocol, _, address = infos[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port and hasattr(socket, "SO_REUSEPORT"):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as exc:
        listener.close()
        raise AddressInUseError.at(host, port, exc) from exc
    return listener


class HttpServer:
    """Serves an application on a listening socket, which it owns from then on."""

    def __init__(
        self,
        application: HttpApplication,
        listener: socket.socket,
        limits: HttpLimits,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.limits = limits
        self.is_closing = False
        self._application = application
        self._listener = listener
        self._tls = tls
        self.port = int(listener.getsockname()[1])
        self._connections: set[HttpConnection] = set()
        self._server: asyncio.Server | None = None
        self._sweep: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"HttpServer(port={self.port}, connections={len(self._connections)})"

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: HttpConnection(self, loop.time),
            sock=self._listener,
            ssl=self._tls,
            ssl_handshake_timeout=TLS_HANDSHAKE_TIMEOUT_S if self._tls else None,
        )
        self._sweep = loop.call_later(SWEEP_INTERVAL_S, self._check_deadlines)

    async def close(self, timeout_s: float) -> None:
        """Accept nothing new, let open exchanges end for up to ``timeout_s``, then cut off what is left."""
        self.is_closing = True
        if self._server is not None:
            self._server.close()
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._connections):
            connection.close_if_idle()
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._connections and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        for connection in list(self._connections):
            connection.abort()
        # Aborted connections report their loss on the next turns of the loop.
        while self._connections:
            await asyncio.sleep(0)

    # -- ConnectionOwner ----------------------------------------------------------------------------------------------

    def check_head(self, request: HttpRequest) -> Response | None:
        return self._application.check_head(request)

    def error_response(self, status: int, message: str) -> Response:
        return self._application.error_response(status, message)

    def handle(self, exchange: Exchange) -> None:
        self._application.handle(exchange)

    def connected(self, connection: HttpConnection) -> None:
        self._connections.add(connection)
        if len(self._connections) > MAX_CONNECTIONS:
            _log.warning("more than %d connections: a new one is cut off", MAX_CONNECTIONS)
            connection.abort()

    def disconnected(self, connection: HttpConnection) -> None:
        self._connections.discard(connection)

    def _check_deadlines(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self._connections):
            connection.check_deadline(now)
        self._sweep = loop.call_later(SWEEP_INTERVAL_S, self._check_deadlines)
