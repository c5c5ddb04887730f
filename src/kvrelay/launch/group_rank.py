"""How a worker process becomes a rank of a data-parallel group: what must agree, and what happens if the group ends."""

from __future__ import annotations

import logging
import os
import socket
import sys
from typing import TYPE_CHECKING

from kvrelay.core.addresses import is_loopback
from kvrelay.dp.addresses import GroupAddress
from kvrelay.dp.group import StepGroup, StepsTogether
from kvrelay.dp.member import GroupMember
from kvrelay.dp.messages import RankInfo
from kvrelay.engine.step import Executor
from kvrelay.engines.registry import HOSTS
from kvrelay.errors import ConfigError, EngineDeadError
from kvrelay.version import __version__

if TYPE_CHECKING:
    from kvrelay.launch.worker_process import WorkerOptions


def join_group(options: WorkerOptions) -> StepGroup | None:
    """Wait until all ranks are there; None if the worker has no group. Blocks.

    Raises ConfigError for sizes that cannot be, and if the ranks differ; AddressInUseError, FatalError.
    """
    group = options.group
    _check_experts(options)
    if group.dp == 1:
        return None
    if sys.platform != "linux":
        raise ConfigError("data-parallel groups need Linux; leave out --dp", param="dp")
    if options.engine_kind in HOSTS:
        raise ConfigError(f"engine {options.engine_kind} computes elsewhere: leave out --dp", param="dp")
    address = GroupAddress.parse(group.dp_address)
    if not (address.is_shared_memory or is_loopback(address.host) or options.control.insecure):
        raise ConfigError(
            f"--dp-address {address} is reachable from other machines, and data-parallel ranks do not authenticate "
            "each other: give --insecure on a network that you trust",
            param="dp_address",
        )
    place = f"{socket.gethostname()}, pid {os.getpid()}"
    info = RankInfo(group.dp_rank, group.dp, place, _facts(options))
    member = GroupMember.join(address, info, group.dp_lookahead, silence_s=options.runner.rank_timeout_s)
    return StepGroup(member, _end_process)


def together(ep: bool, engine_kind: str, executor: Executor) -> StepsTogether | None:
    """The executor, if its ranks must step together. Raises ConfigError."""
    if not ep:
        return None
    if not isinstance(executor, StepsTogether):
        raise ConfigError(f"engine {engine_kind} has no expert parallelism; leave out --ep", param="ep")
    return executor


def _check_experts(options: WorkerOptions) -> None:
    """Raises ConfigError before anything is started."""
    if not options.group.ep:
        return
    if options.engine_kind != "torch":
        raise ConfigError(f"engine {options.engine_kind} has no expert parallelism; leave out --ep", param="ep")
    from kvrelay.executors.torch.config import load_model_config
    from kvrelay.executors.torch.parallel.rank import check_sizes

    check_sizes(load_model_config(options.model_path), options.runner.tp, options.runner.pp, options.group)


def _facts(options: WorkerOptions) -> dict[str, str]:
    """What must be equal on all ranks."""
    facts = {
        "the version of kvrelay": __version__,
        "the model": options.model_name,
        "the engine": options.engine_kind,
        "the role": str(options.role),
        "--tp": str(options.runner.tp),
        "--pp": str(options.runner.pp),
        "--dtype": options.runner.dtype,
        "--ep": str(options.group.ep),
        "--dp-lookahead": str(options.group.dp_lookahead),
        "--block-size": str(options.engine.block_size),
    }
    if options.engine_kind == "torch":
        from kvrelay.executors.torch.shards import weights_fingerprint

        facts["the fingerprint of the weights"] = weights_fingerprint(options.model_path)
    return facts


def _end_process(error: EngineDeadError) -> None:
    """The group has ended while this rank loads: nothing can interrupt that."""
    print(f"kvrelay: {error.message}", file=sys.stderr, flush=True)
    logging.shutdown()
    os._exit(error.exit_code)
