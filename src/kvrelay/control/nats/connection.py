"""One connection to NATS: the only place that knows the client library's errors; ``client`` mends its faults.

It owns connecting, reconnecting without end, and the mapping of foreign errors to ControlUnavailableError. Without a
connection every call fails at once; nothing is buffered. It does not know JetStream, keys or queues.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

from kvrelay.control.nats.client import NatsClient, leave, nats_errors, one_line
from kvrelay.control.nats.urls import client_options, parse_url
from kvrelay.errors import ControlUnavailableError, PayloadTooLargeError

_log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 2.0
RECONNECT_INTERVAL_S = 0.25
PING_INTERVAL_S = 4.5
"""The client pings a server that was silent for so long. It is longer than the interval of keepalives of the default
lease: their answers take the place of pings."""
DENIED_PUBLISH = re.compile(r'permissions violation for publish to "([^"]+)"')


class NoRespondersError(ControlUnavailableError):
    """The server is up, but no process listens on the subject."""


class RequestTimeoutError(ControlUnavailableError):
    """A request was sent, and no answer came in time."""


class ControlDeniedError(ControlUnavailableError):
    """The server's permissions forbid the operation to these credentials."""


T = TypeVar("T")


async def ask_again(ask: Callable[[], Awaitable[T]], within_s: float) -> T:
    """The answer to a request that may be repeated. A server that pauses, e.g. for its disk, is asked again for
    ``within_s`` seconds. Raises what ``ask`` raises."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + within_s
    while True:
        try:
            return await ask()
        except RequestTimeoutError:
            if loop.time() >= deadline_s:
                raise


class NatsMessage(Protocol):
    """The part of the library's message that is used."""

    subject: str
    reply: str
    data: bytes
    headers: dict[str, str] | None


class NatsSubscription(Protocol):
    """The part of the library's subscription that is used."""

    async def unsubscribe(self) -> None: ...


class NatsConnection:
    """A connection that reconnects. ``on_reconnected`` callbacks run on the event loop after each gap."""

    def __init__(self, client: Any, url: str) -> None:
        self.client = client
        """The library's."""
        self.url = url
        """The server's address, without credentials."""
        self._on_reconnected: list[Callable[[], None]] = []
        self._is_closing = False
        self.denied: set[str] = set()
        """Subjects on which the server refused our last message, in lower case."""
        self._asking: dict[str, set[asyncio.Timeout]] = {}
        """Requests in flight, by subject: the server answers a refused request with an error of the connection,
        and what was asked on a lost connection not at all."""
        self._last_error: Exception | None = None
        self._refused = asyncio.Event()
        """A refused login ends the attempts to connect at once."""

    @classmethod
    async def connect(cls, url: str, connect_timeout_s: float) -> NatsConnection:
        """Connect to ``nats://[USER:PASSWORD@|TOKEN@]HOST:PORT[,MORE]`` or ``tls://...[?ca=FILE&cert=FILE&key=FILE]``.

        ``?creds=FILE`` names a credentials file. Raises ConfigError for a malformed URL and ControlUnavailableError if
        no server accepts the connection within ``connect_timeout_s``.
        """
        servers = [parse_url(part) for part in url.split(",")]
        shown = ",".join(f"{part.scheme}://{part.netloc.rpartition('@')[2]}" for part in servers)
        client = NatsClient()
        connection = cls(client, shown)
        connecting = asyncio.create_task(
            client.connect(
                servers=[f"{part.scheme}://{part.netloc}" for part in servers],
                error_cb=connection._on_error,
                reconnected_cb=connection._reconnected,
                disconnected_cb=connection._disconnected,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_INTERVAL_S,
                connect_timeout=connect_timeout_s,
                ping_interval=PING_INTERVAL_S,
                **client_options(servers),
            )
        )
        refused = asyncio.create_task(connection._refused.wait())
        await asyncio.wait({connecting, refused}, timeout=connect_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        refused.cancel()
        if connecting.done() and connecting.exception() is None:
            return connection
        connection._is_closing = True
        connecting.cancel()
        await asyncio.wait({connecting, refused})
        await leave(client)
        failure = None if connecting.cancelled() else connecting.exception()
        reason = one_line(failure or connection._last_error) or f"no answer in {connect_timeout_s:g} s"
        if isinstance(failure or connection._last_error, ConnectionResetError | BrokenPipeError):
            # The server closes the connection after its refusal, which is lost if the reset is read first.
            reason += " (this may also be a failed authorization)"
        raise ControlUnavailableError(f"cannot connect to the control server {shown}: {reason}")

    @property
    def is_connected(self) -> bool:
        return bool(self.client.is_connected) and not self._is_closing

    @property
    def max_payload_bytes(self) -> int:
        return int(self.client.max_payload)

    def on_reconnected(self, callback: Callable[[], None]) -> None:
        self._on_reconnected.append(callback)

    def check_connected(self) -> None:
        """Raises ControlUnavailableError while there is no connection."""
        if not self.is_connected:
            raise ControlUnavailableError(f"no connection to the control server {self.url}")

    async def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        self._check(subject, data)
        with self._mapped(subject):
            await self.client.publish(subject, data, reply=reply, headers=dict(headers) if headers else None)

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float | None = None, headers: Mapping[str, str] | None = None
    ) -> NatsMessage:
        """One reply, within REQUEST_TIMEOUT_S by default. Raises NoRespondersError, RequestTimeoutError,
        ControlDeniedError, ControlUnavailableError, the latter also as soon as the connection is lost."""
        self._check(subject, data)
        key = subject.lower()
        with self._mapped(subject):
            async with asyncio.timeout(None) as scope:
                asking = self._asking.setdefault(key, set())
                asking.add(scope)
                try:
                    message: NatsMessage = await self.client.request(
                        subject,
                        data,
                        timeout=REQUEST_TIMEOUT_S if timeout_s is None else timeout_s,
                        headers=dict(headers) if headers else None,
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
            subscription: NatsSubscription = await self.client.subscribe(subject, queue=queue, cb=handler)
        return subscription

    async def unsubscribe(self, subscription: NatsSubscription) -> None:
        """May be called without a connection: the subscription is then not renewed."""
        with suppress(nats_errors.Error, OSError):
            await subscription.unsubscribe()

    async def drain(self, subscription: NatsSubscription) -> None:
        """Unsubscribe, and return once every message that the server sent before is handled."""
        with self._mapped("unsubscribe"):
            await self.client.drain_subscription(subscription)

    async def flush(self, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """Return once the server has seen everything sent so far."""
        self.check_connected()
        with self._mapped("flush"):
            await self.client.flush(timeout_s)

    def is_denied(self, subject: str) -> bool:
        """Whether the server has refused the last message on ``subject`` from these credentials."""
        return subject.lower() in self.denied

    def new_inbox(self) -> str:
        return str(self.client.new_inbox())

    async def close(self) -> None:
        """End the connection. Published messages are flushed, for a limited time. Idempotent."""
        if self._is_closing:
            return
        if self.is_connected:
            with suppress(nats_errors.Error, OSError, TimeoutError):
                await self.client.flush(1)
        self._is_closing = True
        await leave(self.client)

    def _check(self, subject: str, data: bytes) -> None:
        """Before a message is sent: the server's permissions may have changed since the last one."""
        self.check_connected()
        if self.denied:
            self.denied.discard(subject.lower())
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
            raise NoRespondersError(f"no service answers {subject} at {self.url}") from exc
        except (nats_errors.TimeoutError, TimeoutError) as exc:
            if self.is_denied(subject):
                raise ControlDeniedError(f"these credentials may not publish {subject} at {self.url}") from exc
            self.check_connected()
            raise RequestTimeoutError(f"no answer to {subject} from {self.url}") from exc
        except (nats_errors.Error, OSError) as exc:
            raise ControlUnavailableError(f"control server {self.url}: {one_line(exc)}") from exc

    async def _reconnected(self) -> None:
        _log.info("reconnected to the control server %s", self.url)
        for callback in self._on_reconnected:
            callback()

    async def _disconnected(self) -> None:
        if not self._is_closing:
            _log.warning("lost the connection to the control server %s; reconnecting", self.url)
        for subject in list(self._asking):
            self._give_up(subject)  # the answer was for the connection that is lost

    async def _on_error(self, error: Exception) -> None:
        self._last_error = error
        self.report(error)
        text = str(error).lower()
        if isinstance(error, ssl.SSLError) or "authorization" in text or "authentication" in text:
            self._refused.set()

    def report(self, error: Exception) -> None:
        """An error that the library met in the background."""
        denied = DENIED_PUBLISH.search(str(error).lower())
        if denied is not None:
            self.denied.add(denied[1])
            self._give_up(denied[1])
        _log.debug("control server %s: %s", self.url, one_line(error))

    def _give_up(self, subject: str) -> None:
        """No answer will come to what was asked there."""
        for scope in self._asking.get(subject, ()):
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())
