"""One connection to NATS: the only place that knows the client library's errors and quirks.

It owns connecting, reconnecting without end, authentication and TLS from the URL, and the mapping of foreign errors to
ControlUnavailableError. Without a connection every call fails at once; nothing is buffered. It does not know JetStream,
keys or queues.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvrelay.control.tls import TLS_OPTIONS, TlsFiles
from kvrelay.core.hidden_module import hidden_module
from kvrelay.errors import ConfigError, ControlUnavailableError, PayloadTooLargeError

# The library imports aiohttp, where it is installed, for websockets, which we do not offer. It would cost each process
# 0.2 s of its start.
with hidden_module("aiohttp"):
    from nats import errors as nats_errors
    from nats.aio.client import Client
    from nats.aio.transport import TcpTransport

_log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 2.0
RECONNECT_INTERVAL_S = 0.25
PING_INTERVAL_S = 2.0
MAX_SILENT_PINGS = 2
CLOSE_TIMEOUT_S = 1.0
SCHEMES = ("nats", "tls")
PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
DENIED_PUBLISH = re.compile(r'permissions violation for publish to "([^"]+)"')
URL_OPTIONS = (*TLS_OPTIONS, "creds")


class NoRespondersError(ControlUnavailableError):
    """The server is up, but no process listens on the subject."""


class RequestTimeoutError(ControlUnavailableError):
    """A request was sent, and no answer came in time."""


class ControlDeniedError(ControlUnavailableError):
    """The server's permissions forbid the operation to these credentials."""


class NatsMessage(Protocol):
    """The part of the library's message that is used."""

    subject: str
    reply: str
    data: bytes
    headers: dict[str, str] | None


class NatsSubscription(Protocol):
    """The part of the library's subscription that is used."""

    async def unsubscribe(self) -> None: ...

    async def drain(self) -> None: ...


class _Transport(TcpTransport):  # type: ignore[misc]  # the library is not typed
    """Sends nothing in the clear if the URL asks for TLS; the library would follow what the server says.

    It also tells asyncio that the stream has become TLS; otherwise asyncio warns when the server ends the connection.
    """

    def __init__(self, *, needs_tls: bool) -> None:
        super().__init__()
        self._is_open = not needs_tls

    def __bool__(self) -> bool:
        # True also before it is connected: the library replaces a transport that is false.
        return True

    async def connect_tls(self, *arguments: Any, **settings: Any) -> None:
        await super().connect_tls(*arguments, **settings)
        self._io_writer._protocol._over_ssl = True
        self._is_open = True

    def write(self, payload: bytes) -> None:
        self._check()
        super().write(payload)

    def writelines(self, payload: Iterable[bytes]) -> None:
        self._check()
        super().writelines(payload)

    def abort(self) -> None:
        """Close the socket without the farewell of TLS: for one that its server no longer sends, asyncio would wait
        half a minute, and the socket would outlive the event loop of a short command."""
        for writer in (self._io_writer, self._bare_io_writer):
            if writer is not None:
                writer.transport.abort()

    def _check(self) -> None:
        if not self._is_open:
            raise ssl.SSLError(1, "the server does not speak TLS: a control URL without TLS begins with nats://")


class _Client(Client):  # type: ignore[misc]
    """The library's client, with three faults fixed."""

    _transport: Any

    async def _connect_to_server(self, server: Any) -> None:
        """Closes the socket of a failed attempt, which the library leaves open."""
        if self._transport:
            self._transport.abort()
        self._transport = _Transport(needs_tls=self.options.get("tls") is not None)
        await super()._connect_to_server(server)

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        """Send a ping after everything that is pending. The library's own ping overtakes pending data, so the answer to
        a flush would not prove that the server has seen that data, e.g. a subscription."""
        if self._pending:
            self._transport.writelines(self._pending)
            self._pending.clear()
            self._pending_data_size = 0
        await super()._send_ping(future)


class NatsConnection:
    """A connection that reconnects. ``on_reconnected`` callbacks run on the event loop after each gap."""

    def __init__(self, client: Any, url: str) -> None:
        self._client = client
        self._url = url
        self._on_reconnected: list[Callable[[], None]] = []
        self._is_closing = False
        self._denied: set[str] = set()
        """Subjects on which the server refused our messages, in lower case."""
        self._asking: dict[str, set[asyncio.Timeout]] = {}
        """Requests in flight, by subject: the server answers a refused request with an error of the connection."""
        self.num_errors = 0

    @classmethod
    async def connect(cls, url: str, connect_timeout_s: float) -> NatsConnection:
        """Connect to ``nats://[USER:PASSWORD@|TOKEN@]HOST:PORT[,MORE]`` or ``tls://...[?ca=FILE&cert=FILE&key=FILE]``.

        ``?creds=FILE`` names a credentials file. Raises ConfigError for a malformed URL and ControlUnavailableError if
        no server accepts the connection within ``connect_timeout_s``.
        """
        servers = [_parse(part) for part in url.split(",")]
        shown = ",".join(f"{part.scheme}://{part.netloc.rpartition('@')[2]}" for part in servers)
        client = _Client()
        connection = cls(client, shown)
        attempts = _Attempts(connection)
        connecting = asyncio.create_task(
            client.connect(
                servers=[f"{part.scheme}://{part.netloc}" for part in servers],
                error_cb=attempts.on_error,
                reconnected_cb=connection._reconnected,
                disconnected_cb=connection._disconnected,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_INTERVAL_S,
                connect_timeout=connect_timeout_s,
                ping_interval=PING_INTERVAL_S,
                max_outstanding_pings=MAX_SILENT_PINGS,
                **_options(servers),
            )
        )
        refused = asyncio.create_task(attempts.refused.wait())
        await asyncio.wait({connecting, refused}, timeout=connect_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        refused.cancel()
        if connecting.done() and connecting.exception() is None:
            return connection
        connection._is_closing = True
        connecting.cancel()
        await asyncio.wait({connecting, refused})
        await _leave(client)
        failure = None if connecting.cancelled() else connecting.exception()
        reason = _one_line(failure or attempts.last_error) or f"no answer in {connect_timeout_s:g} s"
        if isinstance(failure or attempts.last_error, ConnectionResetError | BrokenPipeError):
            # The server closes the connection after its refusal, which is lost if the reset is read first.
            reason += " (this may also be a failed authorization)"
        raise ControlUnavailableError(f"cannot connect to the control server {shown}: {reason}")

    @property
    def url(self) -> str:
        """The server's address, without credentials."""
        return self._url

    @property
    def is_connected(self) -> bool:
        return bool(self._client.is_connected) and not self._is_closing

    @property
    def max_payload_bytes(self) -> int:
        return int(self._client.max_payload)

    def on_reconnected(self, callback: Callable[[], None]) -> None:
        self._on_reconnected.append(callback)

    def check_connected(self) -> None:
        """Raises ControlUnavailableError while there is no connection."""
        if not self.is_connected:
            raise ControlUnavailableError(f"no connection to the control server {self._url}")

    async def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        self._check(data)
        with self._mapped(subject):
            await self._client.publish(subject, data, reply=reply, headers=dict(headers) if headers else None)

    async def request(
        self,
        subject: str,
        data: bytes,
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
    ) -> NatsMessage:
        """One reply. Raises NoRespondersError, RequestTimeoutError, ControlDeniedError, ControlUnavailableError."""
        self._check(data)
        key = subject.lower()
        with self._mapped(subject):
            async with asyncio.timeout(None) as scope:
                asking = self._asking.setdefault(key, set())
                asking.add(scope)
                try:
                    message: NatsMessage = await self._client.request(
                        subject, data, timeout=timeout_s, headers=dict(headers) if headers else None
                    )
                finally:
                    asking.discard(scope)
                    if not asking:
                        self._asking.pop(key, None)
        return message

    async def subscribe(
        self, subject: str, handler: Callable[[NatsMessage], Awaitable[None]], *, queue: str = ""
    ) -> NatsSubscription:
        """The subscription is renewed after a gap."""
        self.check_connected()
        with self._mapped(subject):
            subscription: NatsSubscription = await self._client.subscribe(subject, queue=queue, cb=handler)
        return subscription

    async def unsubscribe(self, subscription: NatsSubscription) -> None:
        """May be called without a connection: the subscription is then not renewed."""
        with suppress(nats_errors.Error, OSError):
            await subscription.unsubscribe()

    async def drain(self, subscription: NatsSubscription) -> None:
        """Unsubscribe, and return once every message that the server sent before is handled."""
        with self._mapped("unsubscribe"):
            await subscription.drain()

    async def flush(self, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """Return once the server has seen everything sent so far."""
        self.check_connected()
        with self._mapped("flush"):
            await self._client.flush(timeout_s)

    def is_denied(self, subject: str) -> bool:
        """Whether the server has refused a message on ``subject`` from these credentials."""
        return subject.lower() in self._denied

    def new_inbox(self) -> str:
        return str(self._client.new_inbox())

    async def close(self) -> None:
        """End the connection. Published messages are flushed, for a limited time. Idempotent."""
        if self._is_closing:
            return
        if self.is_connected:
            with suppress(nats_errors.Error, OSError, TimeoutError):
                await self._client.flush(1)
        self._is_closing = True
        await _leave(self._client)

    def _check(self, data: bytes) -> None:
        self.check_connected()
        if len(data) > self.max_payload_bytes:
            raise PayloadTooLargeError(
                f"{len(data)} bytes are more than the control server accepts ({self.max_payload_bytes})"
            )

    @contextmanager
    def _mapped(self, subject: str) -> Iterator[None]:
        task = asyncio.current_task()
        num_cancelled = 0 if task is None else task.cancelling()
        try:
            yield
            if task is not None and task.cancelling() > num_cancelled:
                # The library waits with asyncio.wait_for, which in 3.11 swallows a cancellation that arrives together
                # with the result. The caller would never hear of it.
                raise asyncio.CancelledError
        except nats_errors.NoRespondersError as exc:
            raise NoRespondersError(f"no service answers {subject} at {self._url}") from exc
        except (nats_errors.TimeoutError, TimeoutError) as exc:
            if self.is_denied(subject):
                raise ControlDeniedError(f"these credentials may not publish {subject} at {self._url}") from exc
            raise RequestTimeoutError(f"no answer to {subject} from {self._url}") from exc
        except (nats_errors.Error, OSError) as exc:
            raise ControlUnavailableError(f"control server {self._url}: {_one_line(exc)}") from exc

    async def _reconnected(self) -> None:
        _log.info("reconnected to the control server %s", self._url)
        for callback in self._on_reconnected:
            callback()

    async def _disconnected(self) -> None:
        if not self._is_closing:
            _log.warning("lost the connection to the control server %s; reconnecting", self._url)

    def report(self, error: Exception) -> None:
        """An error that the library met in the background."""
        self.num_errors += 1
        denied = DENIED_PUBLISH.search(str(error).lower())
        if denied is not None:
            self._denied.add(denied[1])
            for scope in self._asking.get(denied[1], ()):
                scope.reschedule(asyncio.get_running_loop().time())
        _log.debug("control server %s: %s", self._url, _one_line(error))


class _Attempts:
    """Collects the errors of connecting; a refused login ends the attempts at once."""

    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection
        self.last_error: Exception | None = None
        self.refused = asyncio.Event()

    async def on_error(self, error: Exception) -> None:
        self.last_error = error
        self._connection.report(error)
        text = str(error).lower()
        if isinstance(error, ssl.SSLError) or "authorization" in text or "authentication" in text:
            self.refused.set()


async def _leave(client: Any) -> None:
    """Close a client, whatever state it is in, together with its socket.

    Its own ``close`` may raise anything while it reconnects with pending data, leaves the socket of a cancelled attempt
    open, and does not wait for the server's side of a TLS session.
    """
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
        _log.debug("closing a connection to the control server failed: %s", _one_line(error))


def _parse(url: str) -> SplitResult:
    try:
        parts = urlsplit(url.strip())
        is_valid = parts.scheme in SCHEMES and bool(parts.hostname) and (parts.port or 4222) > 0
    except ValueError:
        is_valid = False
    if not is_valid:
        shown = url.rpartition("@")[2]
        raise ConfigError(
            f"{shown!r} is not a control URL: expected nats://HOST:PORT or tls://HOST:PORT", param="control"
        )
    return parts


def _options(servers: list[SplitResult]) -> dict[str, Any]:
    """The login and the options of the URLs, as the library's keyword arguments.

    The first login that is given serves for all servers. Options may be in any of the URLs.
    """
    parts = next((server for server in servers if server.username is not None), servers[0])
    query = dict(pair for server in servers for pair in parse_qsl(server.query))
    unknown = sorted(set(query) - set(URL_OPTIONS))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]} in the control URL (known: {', '.join(URL_OPTIONS)})")
    options: dict[str, Any] = {}
    if "creds" in query:
        options["user_credentials"] = query["creds"]
    if parts.password is not None:
        user = options["user"] = unquote(parts.username or "")
        options["password"] = unquote(parts.password)
        if PLAIN_NAME.fullmatch(user):
            # A server's permissions can tell the users' inboxes apart, so that each user reads only its own answers.
            options["inbox_prefix"] = f"_INBOX_{user}"
    elif parts.username is not None:
        options["token"] = unquote(parts.username)
    files = TlsFiles.of_url("control", query, is_tls=any(server.scheme == "tls" for server in servers))
    if files is not None:
        options["tls"] = files.context()
    return options


def _one_line(error: BaseException | None) -> str:
    if error is None:
        return ""
    return " ".join(str(error).split()).removeprefix("nats: ") or type(error).__name__
