"""One process's connection to etcd: address, credentials, calls with a time limit, errors of our own.

It owns a gRPC channel that reconnects by itself, the authentication token, and the mapping of errors. It does not know
leases, watches, or what keys mean. Only the generated stubs of ``aetcd`` are used: its client neither keeps leases
alive nor reconnects a watch, and it has no TLS.
"""

from __future__ import annotations

import asyncio
import os
import urllib.parse
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from kvrelay.config.addresses import host_port
from kvrelay.control.tls import TLS_OPTIONS, TlsFiles
from kvrelay.errors import ConfigError, ControlUnavailableError, LeaseLostError

RETRY_S = 0.25
"""Pause between attempts while the server is away."""
REASON_TIMEOUT_S = 0.2
OLD_TOKEN = "revision of auth store is old"
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Only pings notice a cut cable. etcd refuses clients that ping more often than every 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
)


class EtcdAddress(msgspec.Struct, frozen=True):
    """``etcd://[USER:PASSWORD@]HOST[:2379]``, or ``etcds://...[?ca=FILE&cert=FILE&key=FILE]`` with TLS. ``repr`` and
    ``str`` hide the password."""

    host: str
    port: int
    tls: TlsFiles | None
    user: str | None
    password: str | None

    @classmethod
    def parse(cls, url: str) -> EtcdAddress:
        """Raises ConfigError."""
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port or 2379
        except ValueError as exc:
            raise ConfigError(f"{url!r} is not an etcd URL: {exc}", param="discovery") from exc
        options = dict(urllib.parse.parse_qsl(parts.query))
        is_known = parts.scheme in ("etcd", "etcds") and set(options) <= set(TLS_OPTIONS)
        if not is_known or not parts.hostname or parts.path.strip("/"):
            raise ConfigError(
                "discovery must look like etcd://[USER:PASSWORD@]HOST:PORT or etcds://...?ca=FILE&cert=FILE&key=FILE",
                param="discovery",
            )
        if (parts.username is None) != (parts.password is None):
            raise ConfigError("an etcd URL with a user needs a password too", param="discovery")
        user, password = (
            None if text is None else urllib.parse.unquote(text) for text in (parts.username, parts.password)
        )
        tls = TlsFiles.of_url("discovery", options, is_tls=parts.scheme == "etcds")
        return cls(parts.hostname, port, tls, user, password)

    @property
    def target(self) -> str:
        return host_port(self.host, self.port)

    def __str__(self) -> str:
        return f"{'etcds' if self.tls else 'etcd'}://{self.target}"

    __repr__ = __str__


class NoRevisionError(ControlUnavailableError):
    """The server does not have the revision that was asked for: it is compacted, or of the future."""


class EtcdChannel:
    """Calls to one etcd endpoint. Used from one event loop."""

    def __init__(self, address: EtcdAddress, timeout_s: float) -> None:
        # gRPC's core writes the errors that we report to stderr, too.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        try:
            from aetcd import rpc
            from grpc import ssl_channel_credentials
        except ImportError as exc:
            raise ConfigError(f"discovery on etcd needs the extra kvrelay[etcd]: {exc}", param="discovery") from exc
        self.rpc: Any = rpc
        self.address = address
        self.timeout_s = timeout_s
        self.closed = False
        self._closing = asyncio.Event()
        self._streams: set[Any] = set()
        if address.tls is not None:
            address.tls.context()  # checks the files: gRPC accepts any bytes and fails when it connects
            credentials = ssl_channel_credentials(*address.tls.pem())
            self._channel: Any = rpc.secure_channel(address.target, credentials, options=_CHANNEL_OPTIONS)
        else:
            self._channel = rpc.insecure_channel(address.target, options=_CHANNEL_OPTIONS)
        self.kv: Any = rpc.KVStub(self._channel)
        self.leases: Any = rpc.LeaseStub(self._channel)
        self.watches: Any = rpc.WatchStub(self._channel)
        self._auth: Any = rpc.AuthStub(self._channel)
        self.metadata: tuple[tuple[str, str], ...] = ()

    async def connect(self, timeout_s: float) -> None:
        """Wait until the server answers. Raises ControlUnavailableError, or ConfigError for bad credentials."""
        try:
            if self.address.user is not None:
                await self._authenticate(timeout_s)
            await self._probe(timeout_s, wait_for_ready=True)
        except self.rpc.AioRpcError as exc:
            raise self.mapped(await self._reason(exc), is_first=True) from exc

    async def _probe(self, timeout_s: float, *, wait_for_ready: bool) -> None:
        request = self.rpc.RangeRequest(key=b"kvrelay/", count_only=True)
        await self.kv.Range(request, timeout=timeout_s, metadata=self.metadata, wait_for_ready=wait_for_ready)

    async def _reason(self, error: Exception) -> Exception:
        """A call that waits for a connection does not say why there is none; a call that does not wait says so."""
        if self._code(error) == "DEADLINE_EXCEEDED":
            try:
                await self._probe(REASON_TIMEOUT_S, wait_for_ready=False)
            except self.rpc.AioRpcError as exc:
                return error if self._code(exc) == "DEADLINE_EXCEEDED" else exc
        return error

    async def call(self, method: Callable[..., Any], request: Any) -> Any:
        """One request, one answer, within ``timeout_s``. Raises the errors of ``mapped``."""
        for may_authenticate in (True, False):
            if self.closed:
                raise ControlUnavailableError(f"the connection to {self.address} is closed")
            try:
                return await method(request, timeout=self.timeout_s, metadata=self.metadata)
            except self.rpc.AioRpcError as exc:
                if not (may_authenticate and self.token_expired(exc)):
                    raise self.mapped(exc) from exc
            except asyncio.CancelledError:
                if self.closed_under_us():
                    raise ControlUnavailableError(f"the connection to {self.address} is closed") from None
                raise
            await self.authenticate()
        raise AssertionError("the second attempt returns or raises")

    @asynccontextmanager
    async def streaming(self, call: Any) -> AsyncIterator[None]:
        """Wraps the reads and writes of a stream; their failures are raised as the errors of ``mapped``. After an
        expired token the next stream has a new one. The stream ends with this context, or with ``close``."""
        self._streams.add(call)
        try:
            yield
        except self.rpc.AioRpcError as exc:
            if self.token_expired(exc):
                await self.authenticate()
            raise self.mapped(exc) from exc
        except asyncio.InvalidStateError as exc:
            raise ControlUnavailableError(f"{self.address} closed the stream") from exc
        finally:
            self._streams.discard(call)
            call.cancel()

    async def begin(self, call: Any, request: Any) -> None:
        """Send a stream's first message. Raises ControlUnavailableError if ``close`` comes first: gRPC never wakes a
        task that waits for a stream that was cancelled before it began."""
        writing = asyncio.ensure_future(call.write(request))
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait((writing, closing), return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                raise ControlUnavailableError(f"the connection to {self.address} is closed")
            await writing
        finally:
            writing.cancel()
            closing.cancel()

    def closed_under_us(self) -> bool:
        """gRPC ends the calls of a closed channel with CancelledError, although the task was not cancelled."""
        task = asyncio.current_task()
        return self.closed and (task is None or not task.cancelling())

    def token_expired(self, exc: Exception) -> bool:
        """A JWT also ends with any change of users or roles."""
        is_old = self._code(exc) == "UNAUTHENTICATED" or OLD_TOKEN in self._details(exc)
        return self.address.user is not None and is_old

    async def authenticate(self) -> None:
        """Get a new token; etcd forgets tokens after some minutes and when it restarts."""
        try:
            await self._authenticate(self.timeout_s)
        except self.rpc.AioRpcError as exc:
            raise self.mapped(exc) from exc

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._closing.set()
            # gRPC does not end a stream that has only just begun.
            for call in list(self._streams):
                call.cancel()
            await self._channel.close()

    def mapped(self, exc: Exception, *, is_first: bool = False) -> Exception:
        """A gRPC error as one of ours, chosen by what the caller can do. A refusal is a wrong setting if it comes
        first (``is_first``); later an operator has changed something, perhaps not for long."""
        code, details = self._code(exc), self._details(exc)
        if code == "NOT_FOUND" and "lease" in details:
            return LeaseLostError(f"{self.address}: {details}")
        if code == "OUT_OF_RANGE":
            return NoRevisionError(f"{self.address}: {details}")
        if code in ("UNAUTHENTICATED", "PERMISSION_DENIED", "INVALID_ARGUMENT", "FAILED_PRECONDITION"):
            refusal = f"{self.address} refuses: {details}"
            return ConfigError(refusal, param="discovery") if is_first else ControlUnavailableError(refusal)
        if code == "DEADLINE_EXCEEDED":
            return ControlUnavailableError(f"{self.address} does not answer")
        return ControlUnavailableError(f"{self.address} cannot be reached: {details}")

    async def _authenticate(self, timeout_s: float) -> None:
        request = self.rpc.AuthenticateRequest(name=self.address.user, password=self.address.password)
        answer = await self._auth.Authenticate(request, timeout=timeout_s, wait_for_ready=True)
        self.metadata = (("token", answer.token),)

    def _details(self, exc: Exception) -> str:
        return " ".join(str(getattr(exc, "details", lambda: exc)() or self._code(exc)).split())

    @staticmethod
    def _code(exc: Exception) -> str:
        code = getattr(exc, "code", None)
        return str(code().name) if callable(code) else ""
