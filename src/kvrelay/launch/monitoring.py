"""A worker's HTTP port for monitoring: ``/metrics`` for Prometheus, ``/health`` and ``/live`` for an orchestrator.

The port answers from the start of the process, so a worker that loads its weights is alive but not healthy. This module
only connects the frontend's HTTP server with the worker's numbers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from kvrelay.config import MetricsConfig
from kvrelay.config.addresses import is_loopback
from kvrelay.http import Exchange, HttpLimits, HttpRequest, HttpServer, Response, open_listener
from kvrelay.http.api_keys import ApiKeys
from kvrelay.http.errors import Failure, openai_error
from kvrelay.http.keys_file import following
from kvrelay.worker.reporting.metrics import WorkerMetrics
from kvrelay.worker.worker import Worker

METRICS_PATH = "/metrics"
TEXT_FORMAT = b"text/plain; version=0.0.4; charset=utf-8"
OK = Response(200, b'{"status":"ok"}')
LIMITS = HttpLimits(max_body_bytes=0, max_connections=256)
CLOSE_TIMEOUT_S = 1.0


class MonitoringApp:
    """Implements ``HttpApplication`` for one worker, which ``watch`` attaches."""

    def __init__(self, config: MetricsConfig) -> None:
        """Raises ConfigError if the API keys cannot be read."""
        self._keys = ApiKeys.load("", config.metrics_keys_file)
        self._keys_file = config.metrics_keys_file
        self._vllm_names = config.vllm_metric_names
        self._needs_key = not is_loopback(config.metrics_host)
        self._worker: Worker | None = None
        self._metrics: WorkerMetrics | None = None
        self._routes: dict[str, Callable[[], Response]] = {
            METRICS_PATH: self._render_metrics,
            "/health": self._health,
            "/live": lambda: OK,
        }

    def following_keys(self) -> AbstractAsyncContextManager[None]:
        """While this context is open, a changed file of API keys takes effect."""
        return following(self._keys_file, self._keys)

    def watch(self, worker: Worker) -> None:
        """Attach the worker to report on."""
        self._worker = worker
        self._metrics = WorkerMetrics(worker.stats, vllm_names=self._vllm_names)

    # -- HttpApplication ----------------------------------------------------------------------------------------------

    def check_head(self, request: HttpRequest) -> Response | None:
        if request.path not in self._routes:
            return self.error_response(404, f"there is nothing at {request.path[:200]}", request.path)
        if request.method not in ("GET", "HEAD"):
            return Response(405, openai_error(Failure(405, f"{request.path} takes GET")), headers=[(b"allow", b"GET")])
        if request.path == METRICS_PATH and self._needs_key and not self._is_admitted(request):
            body = openai_error(Failure(401, "a valid API key is needed", code="invalid_api_key"))
            return Response(401, body, headers=[(b"www-authenticate", b"Bearer")])
        return None

    def error_response(self, status: int, message: str, path: str) -> Response:
        return Response(status, openai_error(Failure(status, message)))

    def handle(self, exchange: Exchange) -> None:
        exchange.respond(self._routes[exchange.request.path]())

    # -- inside -------------------------------------------------------------------------------------------------------

    def _is_admitted(self, request: HttpRequest) -> bool:
        return self._keys.name_of(request.headers.get("authorization", "")) is not None

    def _health(self) -> Response:
        """Ready: the worker is in discovery and not leaving, and its engine makes progress."""
        if self._worker is not None and self._worker.is_ready:
            return OK
        if self._worker is not None and self._worker.is_stalled:
            return self._unready("the engine has been at one step for too long")
        return self._unready("the worker is not in discovery")

    def _render_metrics(self) -> Response:
        if self._metrics is None:
            return self._unready("the worker is starting")
        return Response(200, self._metrics.render(), TEXT_FORMAT)

    def _unready(self, reason: str) -> Response:
        return Response(503, openai_error(Failure(503, reason)), headers=[(b"retry-after", b"1")])


@asynccontextmanager
async def monitoring(config: MetricsConfig) -> AsyncIterator[MonitoringApp]:
    """Serve a worker's monitoring port. Raises ConfigError, AddressInUseError."""
    app = MonitoringApp(config)
    listener = open_listener(config.metrics_host, config.metrics_port)
    server = HttpServer(app, listener, LIMITS)
    await server.start()
    try:
        async with app.following_keys():
            yield app
    finally:
        await server.close(CLOSE_TIMEOUT_S)
