"""Assembles one worker process from control plane, engine, data plane and request plane."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvrelay.config import MetricsConfig, WorkerConfig
from kvrelay.control import connect_control
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.garbage import spare_what_stays
from kvrelay.data.tokenizer_files import tokenizer_fingerprint
from kvrelay.dp.group import StepGroup
from kvrelay.engine.contract import EngineHost
from kvrelay.engine.core import EngineCore
from kvrelay.engine.recording import RecordedCore
from kvrelay.engine.thread import EngineThread
from kvrelay.engines.registry import HOSTS, build_executor, build_host
from kvrelay.errors import CheckpointError, ConfigError, EngineHungError, KvrelayError
from kvrelay.executors.host_memory import ANYWHERE, HostMemory
from kvrelay.launch.children import AFTER_CRASH
from kvrelay.launch.dp_group import join_group, together
from kvrelay.launch.process import SWITCH_INTERVAL_S, at_low_priority, ended_when_stuck, on_terminate
from kvrelay.launch.request_plane import connector, request_plane_keys, require_metrics_key, transfer_settings
from kvrelay.rpc import Heartbeat, ZmqRpcServer
from kvrelay.tiers.build import open_tiers
from kvrelay.transfer import pool_allocator, shared_memory
from kvrelay.transfer.p2p.address import P2pAddress
from kvrelay.transfer.ranks.build import build_ranked_transport
from kvrelay.transfer.ranks.link import RankLinks
from kvrelay.worker.identity import WorkerIdentity, new_worker_id
from kvrelay.worker.roles import require_possible_role
from kvrelay.worker.worker import Worker

_log = logging.getLogger(__name__)

RANKS_CHECK_INTERVAL_S = 0.5
"""How often an idle engine looks whether the processes that compute still live."""

IDLE_CHECK_INTERVAL_S = 60.0
"""The same when it computes by itself. Work wakes it at once."""

STUCK_MARGIN_S = 60.0
"""Seconds after --step-timeout-s that the watchdog has to end the process cleanly."""


async def run_worker(config: WorkerConfig, *, announces: bool = False) -> None:
    """Run until SIGTERM, a drain command, or a failed engine. A process whose engine hangs ends here. With
    ``announces`` a line on stdout says when the worker is ready."""
    try:
        await _run_worker(config, announces=announces)
    except EngineHungError as exc:
        # The engine thread may be in native code: then the interpreter cannot shut down cleanly.
        print(f"Error: {exc.message}", file=sys.stderr, flush=True)
        logging.shutdown()
        os._exit(exc.exit_code)


async def _run_worker(config: WorkerConfig, *, announces: bool) -> None:
    _require_possible(config)
    curve_keys = request_plane_keys(config.host, config.control)
    require_metrics_key(config.metrics, config.control)
    config = replace(config, transfer=transfer_settings(config.host, config.transfer))
    heartbeat = Heartbeat.for_lease(config.control.lease_ttl_s)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    async with AsyncExitStack() as stack:
        watch = await _start_monitoring(config.metrics, stack)
        group = await asyncio.to_thread(join_group, config)
        if group is not None:
            stack.callback(group.close)
        control = await connect_control(config.control)
        stack.push_async_callback(control.close)
        # Ranks are processes: they would keep the low priority of the thread that starts them.
        yields = config.runner.yield_while_starting and not config.computes_in_ranks
        shared = shared_memory(config.transfer)
        links = RankLinks()
        memory = HostMemory(
            pool_allocator(config.transfer, shared), None if shared is None else shared.reserve, links.offer
        )
        worker_id = new_worker_id()
        loading = at_low_priority if yields else asyncio.to_thread
        engine = await loading(partial(_load, config, memory, worker_id, group, loads_here=yields))
        require_possible_role(config.role, engine.facts)
        if engine.facts.moves_kv and config.transfer.kv_checksums:
            raise ConfigError(
                "--kv-checksums: the engines exchange the KV, kvrelay does not see it", param="kv_checksums"
            )
        identity = WorkerIdentity(
            worker_id,
            public_key=curve_keys.public.decode() if curve_keys else "",
            tokenizer_fingerprint=_tokenizer_fingerprint(config.model_path),
            dp_group=group.group_id if group is not None else "",
            after_crash=os.environ.get(AFTER_CRASH, ""),
        )
        if engine.kv_region.device == "cpu" and not config.transfer.kv_transfer_per_rank:
            links = RankLinks()  # this process has mapped all ranks' pools
        # Transport p2p listens where the request plane does, with the same keys.
        address = P2pAddress(config.host, curve_keys)
        server = ZmqRpcServer(config.host, config.port, heartbeat=heartbeat, curve_keys=curve_keys)
        worker = Worker(
            config,
            identity,
            engine,
            build_ranked_transport(config.transfer, worker_id, engine.facts.kv_layout, links, shared, address),
            control,
            server,
            connector(heartbeat, curve_keys),
        )
        watch(worker)
        on_terminate(worker.request_drain)
        await worker.start()
        spare_what_stays()
        _log.info("%s is ready (pid %d)", worker_id, os.getpid())
        if announces:
            print(ready_line(config, worker_id, server.address), flush=True)
        timeout_s = config.engine.step_timeout_s
        async with ended_when_stuck(timeout_s and timeout_s + STUCK_MARGIN_S):
            await worker.run()


def ready_line(config: WorkerConfig, worker_id: str, address: str) -> str:
    """What a person reads who has started this worker by hand."""
    group = f", rank {config.group.rank} of {config.group.dp}" if config.group.dp > 1 else ""
    what = f"kvrelay worker is ready: {config.model} ({config.role}{group}) at {address}, as {worker_id}"
    others = "kvrelay frontend" if config.role.takes_requests else "kvrelay worker --role decode, and kvrelay frontend"
    return f"{what}; next: {others}, with the same --control"


async def _start_monitoring(config: MetricsConfig, stack: AsyncExitStack) -> Callable[[Worker], None]:
    """Serve the monitoring port, if one is set, until ``stack`` ends. Returns a callback that attaches the worker.

    Raises ConfigError, AddressInUseError.
    """
    if not config.metrics_port:
        return lambda worker: None
    # Imported only with a port: the module imports the HTTP server, and with it the frontend.
    from kvrelay.launch.monitoring import monitoring

    return (await stack.enter_async_context(monitoring(config))).watch


def load_engine(
    config: WorkerConfig,
    worker_id: str,
    memory: HostMemory = ANYWHERE,
    *,
    group: StepGroup | None = None,
    loads_here: bool = False,
) -> EngineThread:
    """An engine over the executor that ``config`` names, loaded and warmed up: on the thread that will step it, or with
    ``loads_here`` on the caller's, which then should end. Raises what ``build_executor`` raises."""

    def build() -> EngineCore:
        executor = build_executor(config.engine_kind, config, memory)
        executor.warm_up()
        engine = replace(config.engine, num_blocks=executor.num_blocks)
        if group is not None:
            group.ready(together(config.group.ep, config.engine_kind, executor))
        seed = config.runner.seed
        if config.record_steps:
            path = Path(config.record_steps)
            return RecordedCore(executor, engine, path, worker_id=worker_id, model=config.model, seed=seed)
        core = EngineCore(executor, engine, MonotonicClock(), worker_id=worker_id, seed=seed, group=group)
        tiers = open_tiers(config.tiers, executor, config.model, lambda: core.scheduler.token_budget.costs.cost)
        if tiers is not None:
            core.attach(tiers)
        return core

    idle_wait_s = RANKS_CHECK_INTERVAL_S if config.computes_in_ranks else IDLE_CHECK_INTERVAL_S
    return EngineThread(build(), idle_wait_s) if loads_here else EngineThread.load(build, idle_wait_s)


def _require_possible(config: WorkerConfig) -> None:
    """Raises ConfigError for settings that exclude each other, before the engine is loaded."""
    if not config.control.control:
        raise ConfigError("a worker needs --control, e.g. --control nats://127.0.0.1:4222", param="control")
    _require_possible_role(config)
    if config.record_steps and config.engine_kind in HOSTS:
        raise ConfigError(
            f"--record-steps: engine {config.engine_kind} schedules elsewhere; use torch or mock", param="record_steps"
        )
    if config.tiers.is_on:
        _require_possible_tiers(config)


def _require_possible_role(config: WorkerConfig) -> None:
    """Raises ConfigError for a role that the engine cannot have, before it is loaded."""
    if config.engine_kind == "openai" and config.exchanges_kv and config.upstream.upstream_kv_transfer == "none":
        raise ConfigError(
            f"--role {config.role} with engine openai: its KV stays with the server; use --role both, or "
            "--upstream-kv-transfer if servers exchange KV",
            param="role",
        )


def _require_possible_tiers(config: WorkerConfig) -> None:
    """Raises ConfigError for tiers that no request could use."""
    if config.engine_kind in HOSTS:
        reason = f"engine {config.engine_kind} keeps its KV itself; use torch or mock"
    elif not config.engine.enable_prefix_caching:
        reason = "they keep prefixes, and --no-enable-prefix-caching reuses none"
    elif config.record_steps:
        reason = "--record-steps does not record what they answer"
    else:
        return
    raise ConfigError(f"--host-kv-cache, --disk-kv-cache: {reason}", param="host_kv_cache")


def _load(
    config: WorkerConfig, memory: HostMemory, worker_id: str, group: StepGroup | None, *, loads_here: bool
) -> EngineHost:
    """Returns when all ranks of the group are loaded. If this one cannot be, the others hear why."""
    try:
        host = build_host(config.engine_kind, config, worker_id, memory, group)
        if host is not None:
            return host
        return load_engine(config, worker_id, memory, group=group, loads_here=loads_here)
    except KvrelayError as exc:
        if group is not None:
            group.explain(exc)
        raise


def _tokenizer_fingerprint(path: Path) -> str:
    """Raises CheckpointError."""
    try:
        return tokenizer_fingerprint(path)
    except OSError as exc:
        raise CheckpointError(f"cannot read {exc.filename}: {exc.strerror}") from exc
