"""Builds the Transport that the configuration names. It loads its heavy packages at ``register``."""

from __future__ import annotations

from kvrelay.config import TransferConfig
from kvrelay.errors import ConfigError
from kvrelay.transfer.base import Transport
from kvrelay.transfer.loopback import LoopbackFabric, LoopbackTransport
from kvrelay.transfer.nixl import NixlTransport


def build_transport(config: TransferConfig, worker_id: str, fabric: LoopbackFabric | None = None) -> Transport:
    """``fabric`` is shared by the loopback transports of one process. Raises ConfigError if loopback lacks it."""
    if config.transport == "nixl":
        return NixlTransport(config, worker_id)
    if fabric is None:
        raise ConfigError("transport loopback needs a shared fabric, within one process: use nixl", param="transport")
    return LoopbackTransport(fabric, worker_id)
