"""The assembled frontend: cluster, application and HTTP server, from start to an orderly end.

Objects of other rooms come by constructor; ``launch`` chooses their implementations.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack

from kvrelay.config import DisaggConfig, FrontendConfig, MetricsConfig
from kvrelay.config.addresses import host_port
from kvrelay.control.base import ControlPlane, Keys
from kvrelay.errors import ConfigError
from kvrelay.frontend.api.app import FrontendApp
from kvrelay.frontend.api.requests_shown import ShownRequests
from kvrelay.frontend.cluster.figures import Figures
from kvrelay.frontend.cluster.frontends import Frontends
from kvrelay.frontend.cluster.metrics import FrontendMetrics
from kvrelay.frontend.cluster.view import ClusterView, RouterFactory, RpcClientFactory
from kvrelay.http import HttpLimits, HttpServer, open_listener, server_tls
from kvrelay.marks.otlp import open_exporter

_log = logging.getLogger(__name__)

SYNC_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 2.0
FLUSH_TIMEOUT_S = 1.0
"""How long clients may take to read the last errors."""


class Frontend:
    """One frontend process's parts. The listening socket is opened at once, so that a port in use is known early."""

    def __init__(
        self,
        config: FrontendConfig,
        control: ControlPlane,
        keys: Keys,
        connect: RpcClientFactory,
        build_router: RouterFactory,
        cluster: str = "",
        disagg: DisaggConfig | None = None,
        monitoring: MetricsConfig | None = None,
        name: str = "",
    ) -> None:
        """``cluster`` identifies the cluster: only frontends of one cluster share a port. ``name``: in discovery.

        Raises AddressInUseError, ConfigError."""
        monitoring = monitoring or MetricsConfig()
        self.metrics = FrontendMetrics(vllm_names=monitoring.vllm_metric_names, objectives=disagg)
        self.cluster = ClusterView(
            control, keys, connect, build_router, disagg=disagg, cold_start_wait_s=config.cold_start_wait_s
        )
        self.metrics.workers_of = self.cluster.count_workers
        self.metrics.loads_of = self.cluster.loads
        self.metrics.planners_of = self.cluster.planners
        self.metrics.fallbacks_of = self.cluster.count_fallbacks
        self.metrics.places_of = self.cluster.count_places
        self._config = config
        self._background = AsyncExitStack()
        shown = ShownRequests(monitoring, control, keys, name)
        self._exporter = self.metrics.exporter = open_exporter(config.otlp_endpoint, shown.name)
        if shown.kept is not None:
            shown.kept.exporter = self._exporter
        elif config.otlp_endpoint:
            raise ConfigError("traces are made of request_marks, which are off", param="otlp_endpoint")
        figures = Figures(self.metrics, self.cluster.links, self.cluster.cold_start)
        self._frontends = Frontends(control, keys, shown.name, figures)
        self._app = FrontendApp(config, self.cluster, self.metrics, shown, self._frontends)
        limits = HttpLimits(
            max_body_bytes=config.max_body_bytes,
            max_buffered_bytes=max(config.max_buffered_bytes, config.max_body_bytes),
        )
        tls = server_tls(config.tls_cert, config.tls_key)
        listener = open_listener(config.host, config.port, cluster)
        self.server = HttpServer(self._app, listener, limits, tls)

    def __repr__(self) -> str:
        return f"Frontend({self.url}, {self.server!r}, {self.cluster!r})"

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def num_open_requests(self) -> int:
        return self.server.num_busy

    @property
    def url(self) -> str:
        scheme = "https" if self._config.tls_cert else "http"
        return f"{scheme}://{host_port(self._config.host, self.port)}"

    async def start(self) -> None:
        """Connect to the workers, then accept requests. Raises ControlUnavailableError."""
        await self.cluster.start()
        if not await self.cluster.wait_synced(SYNC_TIMEOUT_S):
            _log.warning("discovery did not list the workers within %g s; serving without them", SYNC_TIMEOUT_S)
        # Another frontend may share the port: its clients must not be told here that there are no workers.
        if not await self.cluster.wait_connected(CONNECT_TIMEOUT_S):
            _log.warning("could not connect to all workers within %g s; serving without them", CONNECT_TIMEOUT_S)
        await self._background.enter_async_context(self._app.serving())
        await self._background.enter_async_context(self._frontends.serving())
        if self._exporter is not None:
            await self._background.enter_async_context(self._exporter.running())
        await self.server.start()

    async def close(self) -> None:
        """Refuse new requests, let open ones finish within ``shutdown_timeout_s``, and end the rest with an error."""
        await self.server.drain(self._config.shutdown_timeout_s)
        await self._app.close()
        await self._background.aclose()
        await self.server.close(FLUSH_TIMEOUT_S)
        await self.cluster.close()
