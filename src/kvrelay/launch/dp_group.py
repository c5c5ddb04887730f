"""A data-parallel group: how a worker process becomes a rank of it, and how ``kvrelay worker --dp N`` starts a process
for each rank on this host and watches them.

The group lives and ends as one. If a rank ends with an error, the others end by themselves, because they have lost it.
Ranks that have not ended GROUP_END_S later are killed; stopped ones at once, because they cannot end. The exit code is
that of the first rank that failed. The ranks meet in a private directory, so they step by shared memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil

from kvrelay.config import WorkerConfig
from kvrelay.config.addresses import is_loopback
from kvrelay.control.scratch import ScratchDirectory
from kvrelay.core.cores import threads_each
from kvrelay.dp.addresses import GroupAddress
from kvrelay.dp.group import StepGroup, StepsTogether
from kvrelay.dp.member import GroupMember
from kvrelay.dp.messages import RankInfo
from kvrelay.engine.step import Executor
from kvrelay.errors import ConfigError, EngineDeadError
from kvrelay.launch.children import NO_READY_LINE, Child, control_environment, start_child, worker_command
from kvrelay.launch.process import on_terminate
from kvrelay.version import __version__

GROUP_END_S = 5.0
POLL_INTERVAL_S = 0.05
GPU_LIST = Path("/proc/driver/nvidia/gpus")


async def run_group(config: WorkerConfig, *, announces: bool = False) -> int:
    """Run all ranks of ``config.group`` on this host until they end, or SIGTERM. Returns the exit code. With
    ``announces`` rank 0 says when it is ready, which is when all are loaded."""
    stop = asyncio.Event()
    on_terminate(stop.set)
    directory = ScratchDirectory("kvrelay-dp-")
    ranks: list[Child] = []
    try:
        for rank in range(config.group.dp):
            ranks.append(start_rank(config, rank, str(directory.path), announces=announces and not rank))
        return await _watch(ranks, stop)
    finally:
        for child in ranks:
            if child.exit_code is None:
                child.process.kill()
            child.process.wait()
        directory.remove()


def start_rank(config: WorkerConfig, rank: int, directory: str, *, announces: bool = False) -> Child:
    """Ports are those of rank 0; the other ranks' count up from them; 0: none, or any."""

    def port(first: int, num_each: int = 1) -> int:
        return first and first + rank * num_each

    runner, dp = config.runner, config.group.dp
    own = replace(
        config,
        port=port(config.port),
        runner=replace(runner, num_threads=runner.num_threads or threads_each(dp)),
        group=replace(config.group, dp_rank=rank, dp_address=directory),
        transfer=replace(config.transfer, kv_port=port(config.transfer.kv_port, config.num_kv_ports)),
        metrics=replace(config.metrics, metrics_port=port(config.metrics.metrics_port)),
    )
    if config.engine_kind == "vllm":
        from kvrelay.engines.vllm.cores import shares

        cores = shares(config.vllm.engine_cores, dp)[rank]
        own = replace(own, vllm=replace(config.vllm, engine_cores=cores))
    environment = control_environment(config.control)
    devices = devices_of_rank(rank, dp, runner.num_ranks, environment.get("CUDA_VISIBLE_DEVICES"))
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    command = [*worker_command(own), *([] if announces else [NO_READY_LINE])]
    return start_child(f"rank {rank}", command, environment=environment)


async def _watch(ranks: list[Child], stop: asyncio.Event) -> int:
    code, is_notified, kill_s = 0, False, float("inf")
    while any(child.exit_code is None for child in ranks):
        for number, child in enumerate(ranks):
            if child.exit_code and not code:
                code, kill_s = child.exit_code, time.monotonic() + GROUP_END_S
                how = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
                print(f"rank {number} (pid {child.pid}) {how}: its group ends", file=sys.stderr, flush=True)
        if stop.is_set() and not is_notified:
            is_notified = True
            for child in ranks:
                if child.exit_code is None:
                    child.process.terminate()
        if code and all(child.exit_code is not None or _is_stopped(child) for child in ranks):
            kill_s = 0.0
        if time.monotonic() > kill_s:
            return code if code > 0 else 1
        await asyncio.sleep(POLL_INTERVAL_S)
    codes = [child.exit_code or 0 for child in ranks]
    code = code or next((each for each in codes if each), 0)
    return code if code >= 0 else 1


def _is_stopped(child: Child) -> bool:
    """By SIGSTOP or a debugger."""
    try:
        return bool(psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def devices_of_rank(
    rank: int, num_ranks: int, num_devices: int, visible: str | None, gpu_list: Path = GPU_LIST
) -> str | None:
    """The value of CUDA_VISIBLE_DEVICES for ``rank``; None if there are not enough GPUs for all ranks, which then share
    those that they see."""
    if visible is not None:
        known = [word for word in visible.split(",") if word]
    else:
        known = [str(number) for number in range(len(os.listdir(gpu_list)) if gpu_list.is_dir() else 0)]
    if len(known) < num_ranks * num_devices:
        return None
    return ",".join(known[rank * num_devices : (rank + 1) * num_devices])


def join_group(config: WorkerConfig) -> StepGroup | None:
    """Wait until all ranks are there; None if the worker has no group. Blocks.

    Raises ConfigError for sizes that cannot be, and if the ranks differ; AddressInUseError, FatalError.
    """
    group = config.group
    _check_experts(config)
    if group.dp == 1:
        return None
    if sys.platform != "linux":
        raise ConfigError("data-parallel groups need Linux; leave out --dp", param="dp")
    if config.engine_kind == "openai":
        raise ConfigError(f"engine {config.engine_kind} computes elsewhere: leave out --dp", param="dp")
    address = GroupAddress.parse(group.dp_address)
    if not (address.is_shared_memory or is_loopback(address.host) or config.control.insecure):
        raise ConfigError(
            f"--dp-address {address} is reachable from other machines, and data-parallel ranks do not authenticate "
            "each other: give --insecure on a network that you trust",
            param="dp_address",
        )
    place = f"{socket.gethostname()}, pid {os.getpid()}"
    info = RankInfo(group.dp_rank, group.dp, place, _facts(config))
    member = GroupMember.join(address, info, group.dp_lookahead, silence_s=config.runner.rank_timeout_s)
    return StepGroup(member, _end_process)


def together(ep: bool, engine_kind: str, executor: Executor) -> StepsTogether | None:
    """The executor, if its ranks must step together. Raises ConfigError."""
    if not ep:
        return None
    if not isinstance(executor, StepsTogether):
        raise ConfigError(f"engine {engine_kind} has no expert parallelism; leave out --ep", param="ep")
    return executor


def _check_experts(config: WorkerConfig) -> None:
    """Raises ConfigError before anything is started."""
    if not config.group.ep or config.engine_kind == "vllm":
        return  # vLLM checks its own
    if config.engine_kind != "torch":
        raise ConfigError(f"engine {config.engine_kind} has no expert parallelism; leave out --ep", param="ep")
    from kvrelay.executors.torch.config import load_model_config
    from kvrelay.executors.torch.parallel.rank import check_sizes

    check_sizes(load_model_config(config.model_path, warns=False), config.runner.tp, config.runner.pp, config.group)


def _facts(config: WorkerConfig) -> dict[str, str]:
    """What must be equal on all ranks."""
    facts = {
        "the version of kvrelay": __version__,
        "the model": config.model,
        "the engine": config.engine_kind,
        "the role": str(config.role),
        "--tp": str(config.runner.tp),
        "--pp": str(config.runner.pp),
        "--dtype": config.runner.dtype,
        "--ep": str(config.group.ep),
        "--dp-lookahead": str(config.group.dp_lookahead),
        "--block-size": str(config.engine.block_size),
    }
    if config.engine_kind == "torch":
        from kvrelay.executors.torch.shards import weights_fingerprint

        facts["the fingerprint of the weights"] = weights_fingerprint(config.model_path)
    if config.engine_kind == "vllm":
        from kvrelay.engines.vllm.library import vllm_version

        facts["the version of vLLM"] = vllm_version() or "none"
        facts["--engine-args"] = config.vllm.engine_args
        facts["--enforce-eager"] = str(config.runner.enforce_eager)
    return facts


def _end_process(error: EngineDeadError) -> None:
    """The group has ended while this rank loads: nothing can interrupt that."""
    print(f"kvrelay: {error.message}", file=sys.stderr, flush=True)
    logging.shutdown()
    os._exit(error.exit_code)
