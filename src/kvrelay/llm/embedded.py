"""A whole cluster inside one process and on one event loop: workers, discovery, queue, router.

The workers are those of ``kvrelay worker``, each with its own engine thread, and the frontend half is that of
``kvrelay frontend`` without HTTP. The planes between them are in memory. A request takes the same path as in a real
cluster, with the same hand-off protocol. This module does not know text, prompts or answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from kvrelay.config import RouterConfig, TransferConfig, WorkerConfig, WorkerRole, load_settings
from kvrelay.config.loading import nearest
from kvrelay.config.worker import WORKER_SECTIONS
from kvrelay.control.base import Keys
from kvrelay.control.memory import MemoryBroker
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.cores import threads_each
from kvrelay.core.workers import WorkerInfo
from kvrelay.engine.thread import EngineThread
from kvrelay.errors import ConfigError, EngineDeadError, WorkerUnavailableError
from kvrelay.executors.host_memory import HostMemory
from kvrelay.frontend.cluster.models import Model
from kvrelay.frontend.cluster.view import ClusterView
from kvrelay.frontend.tokens.tokenizer import Tokenizer, load_tokenizer
from kvrelay.launch.models import resolve_model
from kvrelay.launch.worker_process import load_engine
from kvrelay.router import ReplayRequester, Router, RouterStage
from kvrelay.rpc.base import RpcClient
from kvrelay.rpc.loopback import LoopbackNetwork
from kvrelay.transfer import build_transport
from kvrelay.transfer.base import Transport
from kvrelay.transfer.loopback import LoopbackFabric
from kvrelay.transfer.ranks.build import build_ranked_transport
from kvrelay.transfer.ranks.link import RankLinks
from kvrelay.worker.identity import WorkerIdentity, new_worker_id
from kvrelay.worker.roles import require_possible_role
from kvrelay.worker.worker import Worker

CONNECT_TIMEOUT_S = 60.0
CONTROL_TICK_S = 0.5
"""Each tick wakes the loop beside a step. Leases here last ten seconds, ack deadlines five."""
SECTIONS = {name: WORKER_SECTIONS[name] for name in ("engine", "runner", "disagg", "mock")}
"""Those that have a meaning in one process."""
PER_RANK = "kv_transfer_per_rank"
"""The one setting of transfers that has a meaning here."""
UNBOUNDED = 2**31 - 1
"""The caller holds all requests in memory anyway, so an embedded worker queues them instead of refusing some."""


class EmbeddedCluster:
    """Runs from ``start`` to ``close``, on the event loop of ``start``."""

    def __init__(self, config: WorkerConfig, prefill: int, decode: int, router: RouterConfig) -> None:
        """``prefill`` and ``decode`` are numbers of workers with this configuration; with ``prefill`` 0 each worker
        prefills its own requests."""
        engine = replace(config.engine, max_num_waiting=UNBOUNDED, kv_watermark=0.0)
        # No server shows the marks.
        self.config = replace(config, engine=engine, metrics=replace(config.metrics, request_marks=False))
        # A choice of one needs no index of prefixes.
        self._is_routed = decode > 1
        self._router = router if self._is_routed else replace(router, router="round-robin")
        self._roles = [WorkerRole.PREFILL] * prefill
        self._roles += [WorkerRole.DECODE if prefill else WorkerRole.BOTH] * decode
        self._broker = MemoryBroker(tick_s=CONTROL_TICK_S)
        self._network = LoopbackNetwork()
        self._fabric = LoopbackFabric()
        self._stack = AsyncExitStack()
        self._workers: dict[Worker, asyncio.Task[None]] = {}
        self._frontend: ClusterView | None = None
        self._failure: BaseException | None = None

    async def start(self) -> None:
        """Load the model into every worker, and connect to all of them.

        Raises CheckpointError, UnsupportedModelError or ConfigError, and then leaves nothing behind.
        """
        # First, because it is quick, and what is wrong with its files should be the error of this call.
        tokenizer = await asyncio.to_thread(load_tokenizer, self.config.model_path)
        try:
            for role in self._roles:
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
        config, worker_id = replace(self.config, role=role), new_worker_id()
        links = RankLinks()
        memory = HostMemory(offer_ranks=links.offer)
        engine = await asyncio.to_thread(load_engine, config, worker_id, memory)
        try:
            require_possible_role(role, engine.facts)
        except BaseException:
            engine.close()
            raise
        plane, server = self._broker.plane(), self._network.server()
        self._stack.push_async_callback(plane.close)
        identity = WorkerIdentity(worker_id)
        transport = self._transport(worker_id, engine, links)
        worker = Worker(config, identity, engine, transport, plane, server, self._connect, is_routed=self._is_routed)
        await worker.start()
        running = asyncio.get_running_loop().create_task(worker.run())
        self._workers[worker] = running
        running.add_done_callback(self._worker_ended)

    def _transport(self, worker_id: str, engine: EngineThread, links: RankLinks) -> Transport:
        """Of this process, or of the ranks that move their own KV: those are processes, and need a real one."""
        transfer = self.config.transfer
        if links.links and (engine.kv_region.device != "cpu" or transfer.kv_transfer_per_rank):
            between = replace(transfer, transport="nixl")
            return build_ranked_transport(between, worker_id, engine.facts.kv_layout, links, None)
        return build_transport(transfer, worker_id, self._fabric)

    def _worker_ended(self, running: asyncio.Task[None]) -> None:
        if not running.cancelled() and (error := running.exception()) is not None:
            self._failure = error

    async def _start_frontend(self, tokenizer: Tokenizer) -> None:
        plane = self._broker.plane()
        self._stack.push_async_callback(plane.close)
        clock = MonotonicClock()

        def router_of(block_size: int, request_replay: ReplayRequester, stage: RouterStage) -> Router:
            return Router(self._router, block_size, clock, stage, request_replay)

        frontend = ClusterView(
            plane, Keys(self.config.control.namespace), self._client_of, router_of, lambda _: tokenizer
        )
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


def embedded_cluster(
    model: str | Path | None, prefill: int, decode: int, engine_kind: str, settings: Mapping[str, object]
) -> EmbeddedCluster:
    """From keyword arguments. Without ``num_threads`` the engines share the cores evenly.

    Raises ConfigError and CheckpointError.
    """
    if prefill < 0:
        raise ConfigError(f"prefill must be at least 0, got {prefill}", param="prefill")
    if decode < 1:
        raise ConfigError(f"decode must be at least 1, got {decode}", param="decode")
    known = {item.name for cls in (*SECTIONS.values(), RouterConfig) for item in fields(cls)} | {PER_RANK}
    for name in settings:
        if name not in known:
            raise ConfigError(f"unknown setting {name}{nearest(name, known)}", param=name)
    # Nobody waits for the next token of a batch. By cost, steps would be kept short for the answers that run.
    settings = {"disagg_policy": "threshold", **settings}
    sections: dict[str, Any] = {name: load_settings(cls, flags=settings) for name, cls in SECTIONS.items()}
    runner = sections["runner"]
    sections["runner"] = replace(runner, num_threads=runner.num_threads or threads_each(prefill + decode))
    transfer = {"transport": "loopback", PER_RANK: settings.get(PER_RANK, False)}
    sections["transfer"] = load_settings(TransferConfig, environ={}, flags=transfer)
    path = resolve_model(str(model) if model is not None else None)
    config = WorkerConfig(model_path=path, model=path.name, engine_kind=engine_kind, **sections)
    return EmbeddedCluster(config, prefill, decode, load_settings(RouterConfig, flags=settings))
