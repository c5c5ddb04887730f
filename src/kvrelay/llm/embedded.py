"""A whole cluster inside one process and on one event loop: workers, discovery, queue, router.

The workers are those of ``kvrelay worker``, each with its own engine thread, and the frontend half is that of
``kvrelay frontend`` without HTTP. The planes between them are in memory. A request takes the same path as in a real
cluster, with the same hand-off protocol. This module does not know text, prompts or answers.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from kvrelay.config import (
    ControlConfig,
    DisaggConfig,
    EngineConfig,
    MockConfig,
    RouterConfig,
    RunnerConfig,
    TransferConfig,
)
from kvrelay.control.base import Keys
from kvrelay.control.memory import MemoryBroker
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.workers import WorkerInfo, WorkerRole
from kvrelay.engine.contract import EngineFacts
from kvrelay.engine.thread import EngineThread
from kvrelay.errors import EngineDeadError, WorkerUnavailableError
from kvrelay.executors.settings import ExecutorSettings
from kvrelay.frontend.cluster.cluster import Cluster
from kvrelay.frontend.cluster.models import Model
from kvrelay.frontend.tokens.tokenizer import Tokenizer, load_tokenizer
from kvrelay.launch.worker_process import load_engine
from kvrelay.router import ReplayRequester, Router, RouterStage
from kvrelay.rpc.base import RpcClient
from kvrelay.rpc.loopback import LoopbackNetwork
from kvrelay.transfer import build_transport
from kvrelay.transfer.loopback import LoopbackFabric
from kvrelay.worker.roles import require_possible_role
from kvrelay.worker.settings import WorkerSettings, new_worker_id
from kvrelay.worker.worker import Worker

CONNECT_TIMEOUT_S = 60.0
UNBOUNDED = 2**31 - 1
"""The caller holds all requests in memory anyway, so an embedded worker queues them instead of refusing some."""


@dataclass(frozen=True, slots=True)
class EmbeddedSettings:
    """``prefill`` and ``decode`` are numbers of workers; with ``prefill`` 0 each worker prefills its own requests."""

    model_path: Path
    prefill: int
    decode: int
    engine_kind: str
    engine: EngineConfig
    runner: RunnerConfig
    disagg: DisaggConfig
    router: RouterConfig
    mock: MockConfig


class EmbeddedCluster:
    """Runs from ``start`` to ``close``, on the event loop of ``start``."""

    def __init__(self, settings: EmbeddedSettings) -> None:
        engine = replace(settings.engine, max_num_waiting=UNBOUNDED, kv_watermark=0.0)
        self._settings = replace(settings, engine=engine)
        self._broker = MemoryBroker()
        self._network = LoopbackNetwork()
        self._fabric = LoopbackFabric()
        self._stack = AsyncExitStack()
        self._workers: dict[Worker, asyncio.Task[None]] = {}
        self._frontend: Cluster | None = None
        self._failure: BaseException | None = None

    async def start(self) -> None:
        """Load the model into every worker, and connect to all of them.

        Raises CheckpointError, UnsupportedModelError or ConfigError, and then leaves nothing behind.
        """
        settings = self._settings
        roles = [WorkerRole.PREFILL] * settings.prefill
        roles += [WorkerRole.DECODE if settings.prefill else WorkerRole.BOTH] * settings.decode
        # First, because it is quick, and what is wrong with its files should be the error of this call.
        tokenizer = await asyncio.to_thread(load_tokenizer, settings.model_path)
        try:
            for role in roles:
                await self._start_worker(role)
            await self._start_frontend(tokenizer)
        except BaseException:
            await self.close()
            raise

    @property
    def model(self) -> Model:
        """The served model. Raises EngineDeadError if a worker has failed."""
        if self._failure is not None:
            raise EngineDeadError(f"an embedded worker has failed: {self._failure}") from self._failure
        assert self._frontend is not None
        try:
            return self._frontend.model(None)
        except WorkerUnavailableError as exc:
            raise EngineDeadError("no embedded worker is left") from exc

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers)

    async def close(self) -> None:
        """Drain the workers and free everything. Idempotent."""
        for worker in self._workers:
            worker.request_drain()
        await asyncio.gather(*self._workers.values(), return_exceptions=True)
        self._workers.clear()
        await self._stack.aclose()

    async def _start_worker(self, role: WorkerRole) -> None:
        settings = self._settings
        worker_id = new_worker_id(role)
        engine = await asyncio.to_thread(_load, settings, worker_id)
        try:
            worker_settings = _worker_settings(settings, role, worker_id, engine.facts)
            require_possible_role(role, engine.facts)
        except BaseException:
            engine.close()
            raise
        plane = self._broker.plane()
        self._stack.push_async_callback(plane.close)
        transport = build_transport(worker_settings.transfer, worker_id, self._fabric)
        worker = Worker(worker_settings, engine, transport, plane, self._network.server(), self._connect)
        await worker.start()
        running = asyncio.get_running_loop().create_task(worker.run())
        self._workers[worker] = running
        running.add_done_callback(self._worker_ended)

    def _worker_ended(self, running: asyncio.Task[None]) -> None:
        if not running.cancelled() and (error := running.exception()) is not None:
            self._failure = error

    async def _start_frontend(self, tokenizer: Tokenizer) -> None:
        plane = self._broker.plane()
        self._stack.push_async_callback(plane.close)
        clock = MonotonicClock()

        def router_of(block_size: int, request_replay: ReplayRequester, stage: RouterStage) -> Router:
            return Router(self._settings.router, block_size, clock, stage, request_replay)

        frontend = Cluster(plane, Keys(ControlConfig().namespace), self._client_of, router_of, lambda _: tokenizer)
        self._stack.push_async_callback(frontend.close)
        await frontend.start()
        self._frontend = frontend
        if not (await frontend.wait_synced(CONNECT_TIMEOUT_S) and await frontend.wait_connected(CONNECT_TIMEOUT_S)):
            raise WorkerUnavailableError(f"the embedded workers were not ready within {CONNECT_TIMEOUT_S:g} s")

    def _client_of(self, info: WorkerInfo) -> RpcClient:
        return self._network.client(info.address)

    async def _connect(self, address: str, public_key: str) -> RpcClient:
        client = self._network.client(address)
        await client.start()
        return client


def available_threads(num_workers: int) -> int:
    """Compute threads per worker: the cores that this process may use, divided by ``num_workers``."""
    return max(1, len(os.sched_getaffinity(0)) // num_workers)


def _load(settings: EmbeddedSettings, worker_id: str) -> EngineThread:
    built = ExecutorSettings(settings.model_path, settings.engine, settings.runner, settings.mock)
    return load_engine(settings.engine_kind, built, worker_id, seed=settings.runner.seed)


def _worker_settings(
    settings: EmbeddedSettings, role: WorkerRole, worker_id: str, facts: EngineFacts
) -> WorkerSettings:
    return WorkerSettings(
        model=settings.model_path.name,
        model_path=str(settings.model_path),
        role=role,
        engine_kind=settings.engine_kind,
        engine=replace(settings.engine, num_blocks=facts.num_blocks, max_model_len=facts.max_model_len),
        transfer=TransferConfig(transport="loopback"),
        control=ControlConfig(),
        disagg=settings.disagg,
        worker_id=worker_id,
    )
