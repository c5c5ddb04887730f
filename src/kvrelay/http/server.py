"""The server: the set of open connections over a listening socket, with common limits and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl

from kvrelay.core.tasks import TaskSet
from kvrelay.http.connection import HttpConnection
from kvrelay.http.exchange import HttpApplication, Response, encode_response
from kvrelay.http.limits import ByteBudget, HttpLimits
from kvrelay.http.listening import SocketAcceptor, connections_within_limit

_log = logging.getLogger(__name__)


SWEEP_INTERVAL_S = 1.0
MAX_TURNED_AWAY = 64
"""This many connections above the limit are told why they end; further ones are cut off."""
MAX_UNWRITTEN = 64
"""Connections whose bytes wait for the end of the loop's turn. More would wait for long."""
TLS_HANDSHAKE_TIMEOUT_S = 10.0


class HttpServer:
    """Serves an application on a listening socket, which it then owns."""

    def __init__(
        self,
        application: HttpApplication,
        listener: socket.socket,
        limits: HttpLimits,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.limits = limits
        self.is_closing = False
        self.buffered = ByteBudget[HttpConnection](
            limits.max_buffered_bytes,
            lambda connection: connection.num_buffered_bytes,
            lambda connection: connection.num_sheddable_bytes,
            HttpConnection.shed,
        )
        self.unsent = ByteBudget[HttpConnection](
            limits.max_total_unsent_bytes,
            lambda connection: connection.num_unsent_bytes,
            lambda connection: connection.num_unsent_bytes,
            HttpConnection.abort,
        )
        self.application = application
        self._tls = tls
        self.port = int(listener.getsockname()[1])
        self._max_connections = connections_within_limit(limits.max_connections)
        self.connections: set[HttpConnection] = set()
        self._accepting = TaskSet()
        refusal = Response(503, headers=[(b"retry-after", b"1")])
        self._acceptor = SocketAcceptor(listener, self._accepted, encode_response(refusal, keep_alive=False))
        self._sweep: asyncio.TimerHandle | None = None
        self._unwritten: list[HttpConnection] = []

    def __repr__(self) -> str:
        return f"HttpServer(port={self.port}, connections={len(self.connections)}, buffered={self.buffered!r})"

    @property
    def num_busy(self) -> int:
        """Number of connections with a request that is being answered."""
        return sum(connection.is_busy for connection in self.connections)

    async def start(self) -> None:
        self._acceptor.start()
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_INTERVAL_S, self._check_deadlines)

    async def drain(self, timeout_s: float) -> None:
        """Accept no new connections, and wait up to ``timeout_s`` for open exchanges to end."""
        self.is_closing = True
        self._acceptor.close()
        self._accepting.cancel()
        for connection in list(self.connections):
            connection.close_if_idle()
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.connections and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)

    async def close(self, timeout_s: float) -> None:
        """Drain, then cut off the remaining connections."""
        await self.drain(timeout_s)
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self.connections):
            connection.abort()
        # Aborted connections report their loss on the next turns of the loop.
        while self.connections:
            await asyncio.sleep(0)

    # -- its connections ----------------------------------------------------------------------------------------------

    def write_soon(self, connection: HttpConnection) -> None:
        """See ``ConnectionOwner``."""
        unwritten = self._unwritten
        unwritten.append(connection)
        if len(unwritten) == 1:
            asyncio.get_running_loop().call_soon(self._write_queued)
        elif len(unwritten) == MAX_UNWRITTEN:
            self._write_queued()

    def connected(self, connection: HttpConnection) -> None:
        self.connections.add(connection)
        excess = len(self.connections) - self._max_connections
        if excess > 0:
            _log.warning("refused a connection: %d are open (max_connections)", self._max_connections)
            if excess > MAX_TURNED_AWAY:
                connection.abort()
            else:
                connection.turn_away()

    def disconnected(self, connection: HttpConnection) -> None:
        self.connections.discard(connection)
        self.buffered.forget(connection)
        self.unsent.forget(connection)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _write_queued(self) -> None:
        connections, self._unwritten = self._unwritten, []
        for connection in connections:
            connection.write_queued()

    def _accepted(self, accepted: socket.socket) -> None:
        self._accepting.spawn(self._connect(accepted))

    async def _connect(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = TLS_HANDSHAKE_TIMEOUT_S if self._tls else None
        try:
            await loop.connect_accepted_socket(
                lambda: HttpConnection(self, loop.time), accepted, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except (OSError, TimeoutError) as exc:
            _log.debug("a client's TLS handshake failed: %s", exc)

    def _check_deadlines(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self.connections):
            connection.check_deadline(now)
        self._sweep = loop.call_later(SWEEP_INTERVAL_S, self._check_deadlines)
