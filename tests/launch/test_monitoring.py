"""The monitoring port of a worker: what it answers, whom, and when."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.frontend.raw_http import Answer, send

from kvrelay.config import MetricsConfig, WorkerRole
from kvrelay.core.events import LoadMetrics
from kvrelay.engine.stats import EngineStats
from kvrelay.errors import AddressInUseError, ConfigError
from kvrelay.handoff.prefill_state import PrefillCounters
from kvrelay.http import HttpServer, keys_file, open_listener
from kvrelay.http.api_keys import new_api_key
from kvrelay.launch import monitoring as monitoring_module
from kvrelay.launch.monitoring import LIMITS, MonitoringApp, monitoring
from kvrelay.transfer.stats import TransferStats
from kvrelay.worker.reporting.metrics import WorkerStats
from kvrelay.worker.reporting.stats import DecodeStats


class IdleWorker:
    """As much of a worker as is asked for."""

    def __init__(self, is_ready: bool, is_stalled: bool = False) -> None:
        self.is_ready = is_ready
        self.is_stalled = is_stalled

    def stats(self) -> WorkerStats:
        engine = EngineStats(LoadMetrics("w", 1, 8, 25, 100, 2, 0.25, 0.0))
        transfer = TransferStats((), 0, 0, 0)
        return WorkerStats(
            "w", "m", "mock", WorkerRole.DECODE, 0, self.is_ready, engine, DecodeStats(), PrefillCounters(), transfer
        )


@asynccontextmanager
async def served(app: MonitoringApp) -> AsyncIterator[int]:
    """The port that ``app`` answers on."""
    server = HttpServer(app, open_listener("127.0.0.1", 0), LIMITS)
    await server.start()
    try:
        yield server.port
    finally:
        await server.close(1.0)


async def get(port: int, path: str) -> Answer:
    return await send(port, "GET", path)


async def test_a_worker_that_starts_is_alive_only() -> None:
    async with served(MonitoringApp(MetricsConfig())) as port:
        assert (await get(port, "/live")).status == 200
        for path in ("/health", "/metrics"):
            answer = await get(port, path)
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert "start" in answer.error["message"] or "discovery" in answer.error["message"]


@pytest.mark.parametrize(("is_ready", "status"), [(True, 200), (False, 503)])
async def test_health_is_readiness(is_ready: bool, status: int) -> None:
    app = MonitoringApp(MetricsConfig())
    app.watch(IdleWorker(is_ready))
    async with served(app) as port:
        assert (await get(port, "/health")).status == status
        metrics = await get(port, "/metrics")
        assert metrics.status == 200
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert f'\nkvrelay_worker_ready{{model="m"}} {float(is_ready)}\n'.encode() in metrics.body
        assert b'\nkvrelay_worker_kv_usage_ratio{model="m"} 0.25\n' in metrics.body


async def test_other_paths_and_methods_are_refused() -> None:
    async with served(MonitoringApp(MetricsConfig())) as port:
        assert (await get(port, "/v1/models")).status == 404
        refused = await send(port, "POST", "/health")
        assert (refused.status, refused.headers["allow"]) == (405, "GET")
        assert (await send(port, "GET", "/health", b"body")).status == 413


async def test_metrics_need_a_key_beyond_loopback(tmp_path: Path) -> None:
    key, line = new_api_key("prometheus")
    (tmp_path / "keys").write_text(line)
    app = MonitoringApp(MetricsConfig(metrics_host="0.0.0.0", metrics_keys_file=str(tmp_path / "keys")))
    app.watch(IdleWorker(True))
    async with served(app) as port:
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer x"}, 401),
            ({"authorization": f"Bearer {key}"}, 200),
        ):
            assert (await send(port, "GET", "/metrics", headers=headers)).status == status
        assert (await get(port, "/health")).status == (await get(port, "/live")).status == 200


async def test_a_key_of_the_metrics_is_revoked_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_file, "POLL_INTERVAL_S", 0.002)
    path, (old, old_line), (new, new_line) = tmp_path / "keys", new_api_key("old"), new_api_key("new")
    path.write_text(old_line)
    listener = open_listener("127.0.0.1", 0)
    monkeypatch.setattr(monitoring_module, "open_listener", lambda *_, **__: listener)
    port = listener.getsockname()[1]

    async def status_for(key: str) -> int:
        return (await send(port, "GET", "/metrics", headers={"authorization": f"Bearer {key}"})).status

    async with monitoring(MetricsConfig(metrics_host="0.0.0.0", metrics_keys_file=str(path))) as app:
        app.watch(IdleWorker(True))
        assert [await status_for(key) for key in (old, new)] == [200, 401]
        path.write_text(new_line)
        async with asyncio.timeout(60):
            while await status_for(old) != 401:
                await asyncio.sleep(0.002)
        assert await status_for(new) == 200


async def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = MetricsConfig(metrics_port=taken.getsockname()[1])
        with pytest.raises(AddressInUseError):
            async with monitoring(config):
                pass


async def test_missing_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot read API keys"):
        MonitoringApp(MetricsConfig(metrics_keys_file="nowhere"))
