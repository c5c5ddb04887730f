"""The client library of NATS as we use it: faults fixed, closed for certain, errors as one line.

The only module that imports the library.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Coroutine, Iterable
from typing import Any

from kvrelay.control.nats.hidden_module import hidden_module
from kvrelay.core.tasks import end_tasks

# The library imports aiohttp, where it is installed, for websockets, which we do not offer. It would cost each process
# 0.2 s of its start.
with hidden_module("aiohttp"):
    from nats import errors as nats_errors
    from nats.aio.client import Client
    from nats.aio.transport import TcpTransport

__all__ = ["NatsClient", "leave", "nats_errors", "one_line"]

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 1.0
PING_TIMEOUT_S = 2.5
PERMISSIONS_ERROR = "permissions violation"
"""In an error after which the connection stands."""


class _Transport(TcpTransport):  # type: ignore[misc]  # the library is not typed
    """Sends nothing in the clear if the URL asks for TLS; the library would follow what the server says.

    It also tells asyncio that the stream has become TLS; otherwise asyncio warns when the server ends the connection.
    """

    def __init__(self, *, needs_tls: bool, silence_s: float) -> None:
        super().__init__()
        self._is_open = not needs_tls
        self._silence_s = silence_s
        self._silent = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def __bool__(self) -> bool:
        # True also before it is connected: the library replaces a transport that is false.
        return True

    async def connect_tls(self, *arguments: Any, **settings: Any) -> None:
        await super().connect_tls(*arguments, **settings)
        self._io_writer._protocol._over_ssl = True
        self._is_open = True

    async def read(self, buffer_size: int) -> bytes:
        data: bytes = await super().read(buffer_size)
        self._time_silence()
        return data

    async def silent(self) -> None:
        """Return once the server has sent nothing for ``silence_s`` from now. While it sends, no timer wakes us."""
        self._silent.clear()
        self._time_silence()
        await self._silent.wait()

    def _time_silence(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._silence_s, self._silent.set)

    def write(self, payload: bytes) -> None:
        self.writelines((payload,))

    def writelines(self, payload: Iterable[bytes]) -> None:
        self._check()
        try:
            super().writelines(payload)
        except RuntimeError as exc:
            # uvloop's, of a connection that was reset a moment ago; asyncio drops the data.
            raise ConnectionResetError(str(exc)) from exc

    def abort(self) -> None:
        """Close the socket without the farewell of TLS: for one that its server no longer sends, asyncio would wait
        half a minute, and the socket would outlive the event loop of a short command."""
        for writer in (self._io_writer, self._bare_io_writer):
            if writer is not None:
                writer.transport.abort()

    def _check(self) -> None:
        if not self._is_open:
            raise ssl.SSLError(1, "the server does not speak TLS: a control URL without TLS begins with nats://")


class NatsClient(Client):  # type: ignore[misc]
    """The library's client, with seven faults fixed."""

    _transport: Any

    async def _connect_to_server(self, server: Any) -> None:
        """Closes the socket of a failed attempt, which the library leaves open."""
        if self._transport:
            self._transport.abort()
        self._transport = _Transport(
            needs_tls=self.options.get("tls") is not None, silence_s=self.options["ping_interval"]
        )
        await super()._connect_to_server(server)

    async def _process_connect_init(self) -> None:
        """Anything that goes wrong with a login, e.g. a credentials file that is being written, fails this attempt; the
        library ends its attempts after an error that it does not expect."""
        try:
            await super()._process_connect_init()
        except (OSError, nats_errors.Error):
            raise
        except Exception as exc:
            raise nats_errors.Error(f"nats: the login failed: {exc!r}") from exc

    async def _process_err(self, err_msg: str) -> None:
        """After an error that ends the connection, e.g. an expired login, connect anew; the library would never."""
        if PERMISSIONS_ERROR in err_msg.lower():
            await super()._process_err(err_msg)
            return
        error = nats_errors.Error("nats: " + err_msg.strip("'"))
        await self._error_cb(error)
        await self._process_op_err(error)

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        """Send a ping after everything that is pending. The library's own ping overtakes pending data, so the answer to
        a flush would not prove that the server has seen that data, e.g. a subscription."""
        if self._pending:
            self._transport.writelines(self._pending)
            self._pending.clear()
            self._pending_data_size = 0
        await super()._send_ping(future)

    async def drain_subscription(self, subscription: Any) -> None:
        """A drain that gets no answer ends the subscription, too; the library would keep it, and renew it after each
        gap."""
        try:
            await subscription.drain()
        finally:
            subscription._stop_processing()
            self._remove_sub(subscription._id)

    async def _ping_interval(self) -> None:
        """Ping a server that is silent; the library pings at every interval, also while data arrives. An idle process
        hears from the server anyway: answers to keepalives, the lease keeper. Without an answer, connect anew."""
        try:
            while True:
                await self._transport.silent()
                answered = asyncio.get_running_loop().create_future()
                await self._send_ping(answered)
                async with asyncio.timeout(PING_TIMEOUT_S):
                    await answered
        except OSError:  # no answer in time, or the connection was reset a moment ago
            await self._process_op_err(nats_errors.StaleConnectionError())


async def leave(client: Any) -> None:
    """Close a client, whatever state it is in, together with its socket.

    Its own ``close`` may raise anything while it reconnects with pending data, leaves the socket of a cancelled attempt
    open, and does not wait for the server's side of a TLS session. An attempt to reconnect may miss that it is
    cancelled; the closed client would be connected again, and stay so.
    """
    if client._reconnection_task is not None:
        await end_tasks([client._reconnection_task])
    await _ended(client.close())
    if client._transport:
        client._transport.abort()
        # The event loop closes the socket in its next turn.
        await asyncio.sleep(0)


async def _ended(closing: Coroutine[Any, Any, None]) -> None:
    """Return when ``closing`` has ended, with or without an error, or after a time limit.

    ``closing`` runs in a task of its own: asyncio's streams raise the CancelledError of the abandoned attempt, which
    would here look as if this task were cancelled.
    """
    task = asyncio.ensure_future(closing)
    try:
        await asyncio.wait([task], timeout=CLOSE_TIMEOUT_S)
    finally:
        task.cancel()
    if task.done() and not task.cancelled() and (error := task.exception()) is not None:
        _log.debug("closing a connection to the control server failed: %s", one_line(error))


def one_line(error: BaseException | None) -> str:
    if error is None:
        return ""
    return " ".join(str(error).split()).removeprefix("nats: ") or type(error).__name__
