"""Which Transport the configuration asks for. Heavy packages are loaded by the chosen one, at ``register``."""

from __future__ import annotations

from kvrelay.config import TransferConfig
from kvrelay.errors import ConfigError
from kvrelay.transfer.base import Transport
from kvrelay.transfer.loopback import LoopbackFabric, LoopbackTransport
from kvrelay.transfer.nixl import NixlTransport


def build_transport(config: TransferConfig, worker_id: str, fabric: LoopbackFabric | None = None) -> Transport:
    """``fabric`` is what loopback transports of one process share. Raises ConfigError when it is missing."""
    if config.transport == "nixl":
        return NixlTransport(config, worker_id)
    if fabric is None:
        raise ConfigError("transport loopback works only within one process, with a shared fabric", param="transport")
    return LoopbackTransport(fabric, worker_id)
