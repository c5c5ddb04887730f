"""Assembles one worker process from control plane, engine, data plane and request plane."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from kvrelay.config import (
    ControlConfig,
    DisaggConfig,
    EngineConfig,
    GroupConfig,
    MetricsConfig,
    MockConfig,
    RunnerConfig,
    TransferConfig,
    UpstreamConfig,
    VllmConfig,
)
from kvrelay.control import connect_control
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.workers import WorkerRole
from kvrelay.data.tokenizer_files import tokenizer_fingerprint
from kvrelay.dp.group import StepGroup
from kvrelay.engine.contract import EngineFacts, EngineHost
from kvrelay.engine.core import EngineCore
from kvrelay.engine.thread import EngineThread
from kvrelay.engines.registry import build_executor, build_host
from kvrelay.errors import CheckpointError, ConfigError, EngineHungError, KvrelayError
from kvrelay.executors.settings import ExecutorSettings
from kvrelay.launch.cycle_collector import spare_what_stays
from kvrelay.launch.group_rank import join_group, together
from kvrelay.launch.low_priority import at_low_priority
from kvrelay.launch.request_plane import connector
from kvrelay.launch.security import request_plane_keys, require_metrics_key, transfer_settings
from kvrelay.launch.signals import on_terminate
from kvrelay.launch.stuck import ended_when_stuck
from kvrelay.rpc import CurveKeys, Heartbeat, ZmqRpcServer
from kvrelay.transfer import build_transport, pool_allocator, shared_memory
from kvrelay.transfer.p2p.control import ControlKeys, P2pAddress
from kvrelay.transfer.shm.memory import SharedPoolMemory
from kvrelay.worker.roles import require_possible_role
from kvrelay.worker.settings import WorkerSettings, new_worker_id
from kvrelay.worker.worker import Worker

_log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""Longest time for which the engine thread may hold the interpreter; Python's 5 ms would be the time of a token."""

RANKS_CHECK_INTERVAL_S = 0.5
"""How often an idle engine looks whether the processes that compute still live."""

IDLE_CHECK_INTERVAL_S = 10.0
"""The same when it computes by itself. Work wakes it at once."""

STUCK_MARGIN_S = 60.0
"""Seconds after --step-timeout-s that the watchdog has to end the process cleanly."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of ``kvrelay worker``."""

    model_path: Path
    model_name: str
    role: WorkerRole
    engine_kind: str
    host: str
    port: int
    engine: EngineConfig
    runner: RunnerConfig
    transfer: TransferConfig
    control: ControlConfig
    disagg: DisaggConfig
    mock: MockConfig
    metrics: MetricsConfig
    upstream: UpstreamConfig = field(default_factory=UpstreamConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    group: GroupConfig = field(default_factory=GroupConfig)
    """With ``dp`` above 1, ``dp_rank`` is one rank."""

    @property
    def yields_while_loading(self) -> bool:
        """Not with ranks: they are processes, and would keep the low priority of the thread that starts them."""
        return self.runner.yield_while_starting and not _has_ranks(self.runner, self.group)


async def run_worker(options: WorkerOptions) -> None:
    """Run until SIGTERM, a drain command, or a failed engine. A process whose engine hangs ends here."""
    try:
        await _run_worker(options)
    except EngineHungError as exc:
        # The engine thread may be in native code: then the interpreter cannot shut down cleanly.
        print(f"Error: {exc.message}", file=sys.stderr, flush=True)
        logging.shutdown()
        os._exit(exc.exit_code)


async def _run_worker(options: WorkerOptions) -> None:
    if not options.control.control:
        raise ConfigError("a worker needs --control, e.g. --control nats://127.0.0.1:4222", param="control")
    _require_possible_role(options)
    curve_keys = request_plane_keys(options.host, options.control)
    require_metrics_key(options.metrics, options.control)
    heartbeat = Heartbeat.for_lease(options.control.lease_ttl_s)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    async with AsyncExitStack() as stack:
        watch = await _start_monitoring(options.metrics, stack)
        group = await asyncio.to_thread(join_group, options)
        if group is not None:
            stack.callback(group.close)
        control = await connect_control(options.control)
        stack.push_async_callback(control.close)
        loading = at_low_priority if options.yields_while_loading else asyncio.to_thread
        memory = shared_memory(options.transfer)
        worker_id = new_worker_id(options.role)
        engine = await loading(partial(_load_in_group, options, worker_id, memory, group))
        require_possible_role(options.role, engine.facts)
        if engine.facts.moves_kv and options.transfer.kv_checksums:
            raise ConfigError(
                "--kv-checksums: the engines exchange the KV, kvrelay does not see it", param="kv_checksums"
            )
        settings = _settings(options, engine.facts, worker_id, curve_keys.public.decode() if curve_keys else "")
        if group is not None:
            settings = replace(
                settings, dp_group=group.group_id, dp_rank=options.group.dp_rank, dp_size=options.group.dp
            )
        worker = Worker(
            settings,
            engine,
            build_transport(
                settings.transfer, settings.worker_id, memory=memory, address=_p2p_address(options, curve_keys)
            ),
            control,
            ZmqRpcServer(options.host, options.port, heartbeat=heartbeat, curve_keys=curve_keys),
            connector(heartbeat, curve_keys),
        )
        watch(worker)
        await worker.start()
        on_terminate(worker.request_drain)
        spare_what_stays()
        _log.info("%s is ready (pid %d)", settings.worker_id, os.getpid())
        timeout_s = options.engine.step_timeout_s
        async with ended_when_stuck(timeout_s and timeout_s + STUCK_MARGIN_S):
            await worker.run()


def _p2p_address(options: WorkerOptions, keys: CurveKeys | None) -> P2pAddress:
    """Transport p2p listens where the request plane does, with the same keys."""
    return P2pAddress(options.host, None if keys is None else ControlKeys(keys.public, keys.secret))


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
    name: str,
    settings: ExecutorSettings,
    worker_id: str,
    *,
    seed: int,
    group: StepGroup | None = None,
    loads_here: bool = False,
) -> EngineThread:
    """An engine over executor ``name``, loaded and warmed up: on the thread that will step it, or with ``loads_here``
    on the caller's, which then should end. Raises what ``build_executor`` raises."""

    def build() -> EngineCore:
        executor = build_executor(name, settings)
        executor.warm_up()
        config = replace(settings.engine, num_blocks=executor.num_blocks, max_model_len=executor.max_model_len)
        if group is not None:
            group.ready(together(settings.group.ep, name, executor))
        return EngineCore(executor, config, MonotonicClock(), worker_id=worker_id, seed=seed, group=group)

    idle_wait_s = RANKS_CHECK_INTERVAL_S if _has_ranks(settings.runner, settings.group) else IDLE_CHECK_INTERVAL_S
    return EngineThread(build(), idle_wait_s) if loads_here else EngineThread.load(build, idle_wait_s)


def _has_ranks(runner: RunnerConfig, group: GroupConfig) -> bool:
    return runner.num_ranks > 1 or group.ep


def _require_possible_role(options: WorkerOptions) -> None:
    """Raises ConfigError for a role that the engine cannot have, before it is loaded."""
    has_role = options.role is not WorkerRole.BOTH
    if options.engine_kind == "openai" and has_role and options.upstream.upstream_kv_transfer == "none":
        raise ConfigError(
            f"--role {options.role} with engine openai: its KV stays with the server; use --role both, or "
            "--upstream-kv-transfer if servers exchange KV",
            param="role",
        )


def _load_in_group(
    options: WorkerOptions, worker_id: str, memory: SharedPoolMemory | None, group: StepGroup | None
) -> EngineHost:
    """Returns when all ranks of the group are loaded. If this one cannot be, the others hear why."""
    try:
        return _load(options, worker_id, memory, group)
    except KvrelayError as exc:
        if group is not None:
            group.explain(exc)
        raise


def _load(
    options: WorkerOptions, worker_id: str, memory: SharedPoolMemory | None, group: StepGroup | None
) -> EngineHost:
    settings = ExecutorSettings(
        options.model_path,
        options.engine,
        options.runner,
        options.mock,
        pool_allocator(options.transfer, memory),
        options.upstream,
        None if memory is None else memory.reserve,
        options.group,
        options.vllm,
        options.host,
        options.role is not WorkerRole.BOTH,
    )
    host = build_host(options.engine_kind, settings, worker_id)
    if host is not None:
        return host
    return load_engine(
        options.engine_kind,
        settings,
        worker_id,
        seed=options.runner.seed,
        group=group,
        loads_here=options.yields_while_loading,
    )


def _settings(options: WorkerOptions, facts: EngineFacts, worker_id: str, public_key: str) -> WorkerSettings:
    return WorkerSettings(
        model=options.model_name,
        model_path=str(options.model_path),
        role=options.role,
        engine_kind=options.engine_kind,
        engine=replace(options.engine, num_blocks=facts.num_blocks, max_model_len=facts.max_model_len),
        transfer=transfer_settings(options.host, options.transfer),
        control=options.control,
        disagg=options.disagg,
        worker_id=worker_id,
        public_key=public_key,
        tokenizer_fingerprint=_tokenizer_fingerprint(options.model_path),
    )


def _tokenizer_fingerprint(path: Path) -> str:
    """Raises CheckpointError."""
    try:
        return tokenizer_fingerprint(path)
    except OSError as exc:
        raise CheckpointError(f"cannot read {exc.filename}: {exc.strerror}") from exc
