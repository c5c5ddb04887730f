"""Finished requests as OpenTelemetry spans, sent to a collector by OTLP (``--otlp-endpoint``).

    request ended ── add ──> waiting, bounded ──> task: waterfall, spans ── HTTP or gRPC ──> collector
                      └─ full: dropped                                       └─ fails: dropped

It owns a task of the event loop that sends; ``otlp_spans`` makes the spans. No request waits for either: what
a collector does not take in time is dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Protocol
from urllib.parse import urlsplit

from kvrelay.config.otlp import OtlpEndpoint, collector_of, without_password
from kvrelay.core.tasks import end_tasks
from kvrelay.errors import ConfigError
from kvrelay.marks.trace import Trace
from kvrelay.marks.waterfall import waterfall

_log = logging.getLogger(__name__)

MAX_WAITING = 1024
MAX_BATCH = 64
BATCH_S = 0.5
SEND_TIMEOUT_S = 5.0
CLOSE_S = 1.0
"""At its end the frontend gives the collector so long for what waits."""
PROTOBUF = {"content-type": "application/x-protobuf"}
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class Sender(Protocol):
    """To one collector."""

    async def send(self, data: bytes) -> None:
        """One ``ExportTraceServiceRequest``. Raises any error if the collector has not taken it."""

    async def close(self) -> None: ...


class HttpSender:
    """OTLP over HTTP, with protobuf."""

    def __init__(self, endpoint: OtlpEndpoint) -> None:
        import aiohttp

        self._url = endpoint.url
        self._client = aiohttp.ClientSession(
            headers={**endpoint.headers, **PROTOBUF},
            timeout=aiohttp.ClientTimeout(SEND_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def send(self, data: bytes) -> None:
        async with self._client.post(self._url, data=data, allow_redirects=False) as answer:
            if answer.status >= 300:
                raise ConnectionError(f"it answers {answer.status}")

    async def close(self) -> None:
        await self._client.close()


class GrpcSender:
    """OTLP over gRPC."""

    def __init__(self, endpoint: OtlpEndpoint) -> None:
        import grpc

        parts = urlsplit(endpoint.url)
        if parts.scheme == "grpcs":
            self._channel = grpc.aio.secure_channel(parts.netloc, grpc.ssl_channel_credentials())
        else:
            self._channel = grpc.aio.insecure_channel(parts.netloc)
        self._export = self._channel.unary_unary(EXPORT)
        self._metadata = tuple((name.lower(), value) for name, value in endpoint.headers.items())

    async def send(self, data: bytes) -> None:
        await self._export(data, timeout=SEND_TIMEOUT_S, metadata=self._metadata)

    async def close(self) -> None:
        await self._channel.close()


def open_exporter(configured: str, frontend: str) -> TraceExporter | None:
    """The exporter to the endpoint that ``--otlp-endpoint`` or the environment names; None without one, or if only the
    environment names one and the extra is not installed. Raises ConfigError."""
    endpoint = collector_of(configured)
    if endpoint is None:
        return None
    try:
        import opentelemetry.proto.collector.trace.v1.trace_service_pb2  # noqa: F401

        if endpoint.is_grpc:
            import grpc  # noqa: F401
    except ImportError as exc:
        if endpoint.is_required:
            raise ConfigError(f"--otlp-endpoint needs the extra kvrelay[otel]: {exc}", param="otlp_endpoint") from exc
        shown = without_password(endpoint.url)
        _log.warning("no traces are sent to %s: that needs the extra kvrelay[otel] (%s)", shown, exc)
        return None
    return TraceExporter(frontend, lambda: GrpcSender(endpoint) if endpoint.is_grpc else HttpSender(endpoint))


class TraceExporter:
    """Sends what ``add`` gets while ``running`` is open. ``num_sent`` and ``num_dropped`` count requests."""

    def __init__(self, frontend: str, open_sender: Callable[[], Sender]) -> None:
        self._frontend = frontend
        self._open_sender = open_sender
        self._waiting: deque[Trace] = deque()
        self._arrived = asyncio.Event()
        self._is_failing = False
        self.num_sent = self.num_dropped = 0

    def __repr__(self) -> str:
        return f"TraceExporter(waiting={len(self._waiting)}, sent={self.num_sent}, dropped={self.num_dropped})"

    def add(self, trace: Trace) -> None:
        """A request has ended. Returns at once."""
        if trace.context is None or not trace.context.is_sampled:
            return
        if len(self._waiting) >= MAX_WAITING:
            self.num_dropped += 1
            return
        self._waiting.append(trace)
        self._arrived.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """On leaving, what waits is sent for CLOSE_S; the rest is dropped."""
        sender = self._open_sender()
        task = asyncio.get_running_loop().create_task(self._send_forever(sender), name="otlp")
        try:
            yield
        finally:
            await end_tasks([task])
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    while self._waiting:
                        await self._send_batch(sender)
            self.num_dropped += len(self._waiting)
            self._waiting.clear()
            await sender.close()

    async def _send_forever(self, sender: Sender) -> None:
        while True:
            await self._arrived.wait()
            await asyncio.sleep(BATCH_S)
            self._arrived.clear()
            while self._waiting:
                await self._send_batch(sender)

    async def _send_batch(self, sender: Sender) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        from kvrelay.marks.otlp_spans import resource_spans

        request, num_requests = ExportTraceServiceRequest(), 0
        try:
            while self._waiting and num_requests < MAX_BATCH:
                num_requests += 1
                trace = self._waiting.popleft()
                assert trace.context is not None
                request.resource_spans.extend(resource_spans(waterfall(trace, self._frontend), trace.context))
                # One request at a time: the tokens of others come between.
                await asyncio.sleep(0)
            await sender.send(request.SerializeToString())
        except asyncio.CancelledError:
            self.num_dropped += num_requests
            raise
        except Exception as exc:  # noqa: BLE001 - whatever a collector or its library does, requests go on
            self.num_dropped += num_requests
            if not self._is_failing:
                _log.warning("the collector of traces does not take them (%s); they are dropped", _one_line(exc))
            self._is_failing = True
            return
        self.num_sent += num_requests
        self._is_failing = False


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
