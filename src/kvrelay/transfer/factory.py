"""Builds the Transport that the configuration names. It loads its heavy packages at ``register``."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable

from kvrelay.config import TransferConfig
from kvrelay.errors import ConfigError
from kvrelay.transfer.auto import AutoTransport
from kvrelay.transfer.base import Transport
from kvrelay.transfer.loopback import LoopbackFabric
from kvrelay.transfer.nixl import NixlTransport
from kvrelay.transfer.p2p.address import LOOPBACK, P2pAddress
from kvrelay.transfer.p2p.transport import P2pTransport
from kvrelay.transfer.shm.memory import SharedPoolMemory
from kvrelay.transfer.shm.transport import ShmTransport

_log = logging.getLogger(__name__)


def build_transport(
    config: TransferConfig,
    worker_id: str,
    fabric: LoopbackFabric | None = None,
    memory: SharedPoolMemory | None = None,
    address: P2pAddress = LOOPBACK,
) -> Transport:
    """``fabric`` is shared by the loopback transports of one process. ``memory`` is where the pool was allocated, for
    shm and auto; ``address`` is p2p's. Raises ConfigError if the transport lacks something."""
    match config.transport:
        case "nixl":
            return NixlTransport(config, worker_id)
        case "shm" | "auto" if memory is not None:
            shm = ShmTransport(memory, worker_id)
            if config.transport == "shm":
                return shm
            return AutoTransport(worker_id, {"shm": shm, "nixl": NixlTransport(config, worker_id)})
        case "p2p":
            return P2pTransport(config, worker_id, address)
        case "loopback" if fabric is not None:
            return fabric.transport(worker_id)
        case "loopback":
            message = "transport loopback needs a shared fabric, within one process: use nixl"
        case name:
            message = f"transport {name} needs an engine whose KV pool is allocated in shared memory"
    raise ConfigError(message, param="transport")


def shared_memory(config: TransferConfig) -> SharedPoolMemory | None:
    """What the transport needs the pool to be allocated from; None: any memory will do."""
    return SharedPoolMemory() if config.transport in ("shm", "auto") else None


def pool_allocator(config: TransferConfig, memory: SharedPoolMemory | None) -> Callable[[int], mmap.mmap] | None:
    """How an executor gets its pool; None: as it likes. With auto, memory that cannot be shared is no failure."""
    if memory is None:
        return None
    if config.transport == "shm":
        return memory.allocate

    def allocate(num_bytes: int) -> mmap.mmap:
        try:
            return memory.allocate(num_bytes)
        except ConfigError as exc:
            _log.warning("transport shm is not used: %s", exc.message)
            return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    return allocate
