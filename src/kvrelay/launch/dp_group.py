"""A data-parallel group on this host: ``kvrelay worker --dp N`` starts a worker process for each rank and watches
them.

The group lives and ends as one. If a rank ends with an error, the others end by themselves, because they have lost it.
Ranks that have not ended GROUP_END_S later are killed; stopped ones at once, because they cannot end. The exit code is
that of the first rank that failed. The ranks meet in a private directory, so they step by shared memory.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvrelay.launch.children import Child, kvrelay_command, start_child
from kvrelay.launch.signals import on_terminate

GROUP_END_S = 5.0
POLL_INTERVAL_S = 0.05
GPU_LIST = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """``arguments``: those of a ``kvrelay worker`` without ports and rank options. Ports are those of rank 0; the other
    ranks' count up from them; 0: none, or any. ``environment`` holds settings that command lines must not show."""

    arguments: list[str]
    environment: Mapping[str, str]
    num_ranks: int
    num_devices: int
    """GPUs of a rank, where there are GPUs."""
    worker_port: int
    metrics_port: int
    kv_port: int = 0


async def run_group(options: GroupOptions) -> int:
    """Run all ranks until they end, or SIGTERM. Returns the exit code."""
    stop = asyncio.Event()
    on_terminate(stop.set)
    with tempfile.TemporaryDirectory(prefix="kvrelay-dp-") as directory:
        ranks = [_start(options, rank, directory) for rank in range(options.num_ranks)]
        try:
            return await _watch(ranks, stop)
        finally:
            for child in ranks:
                if child.exit_code is None:
                    child.process.kill()
                child.process.wait()


def _start(options: GroupOptions, rank: int, directory: str) -> Child:
    command = [*options.arguments, "--dp-rank", str(rank), "--dp-address", directory]
    for flag, port in (
        ("--worker-port", options.worker_port),
        ("--metrics-port", options.metrics_port),
        ("--kv-port", options.kv_port),
    ):
        if port:
            command += [flag, str(port + rank)]
    environment = dict(options.environment)
    devices = devices_of_rank(rank, options.num_ranks, options.num_devices, environment.get("CUDA_VISIBLE_DEVICES"))
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    return start_child(f"rank {rank}", kvrelay_command("worker", *command), environment=environment)


async def _watch(ranks: list[Child], stop: asyncio.Event) -> int:
    code, is_told, kill_s = 0, False, float("inf")
    while any(child.exit_code is None for child in ranks):
        for number, child in enumerate(ranks):
            if child.exit_code and not code:
                code, kill_s = child.exit_code, time.monotonic() + GROUP_END_S
                how = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
                print(f"rank {number} (pid {child.pid}) {how}: its group ends", file=sys.stderr, flush=True)
        if stop.is_set() and not is_told:
            is_told = True
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
