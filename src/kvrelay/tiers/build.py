"""The tiers of a worker's engine, as its settings name them."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.config import TiersConfig
from kvrelay.config.loading import state_directories
from kvrelay.core.hashing import HASH_SEED
from kvrelay.core.step_cost import StepCost
from kvrelay.engine.step import Executor
from kvrelay.errors import ConfigError
from kvrelay.tiers.block import shape_of
from kvrelay.tiers.broker import HostMemory
from kvrelay.tiers.carrier import ThreadCarrier
from kvrelay.tiers.disk import DiskStore
from kvrelay.tiers.host import HostStore
from kvrelay.tiers.store import BlockStore
from kvrelay.tiers.tiers import KvTiers


def open_tiers(config: TiersConfig, executor: Executor, model: str, cost: Callable[[], StepCost]) -> KvTiers | None:
    """None if none is configured. Raises ConfigError."""
    if not config.is_on:
        return None
    region = executor.kv_region
    if not region.is_pool or region.device != "cpu":
        raise ConfigError("host_kv_cache and disk_kv_cache need a KV pool in host memory", param="host_kv_cache")
    shape = shape_of(f"{model} {executor.weights_fingerprint} {HASH_SEED}", executor.kv_layout)
    stores: list[BlockStore] = []
    if config.host_bytes:
        memory = HostMemory(state_directories()[0], shape.name, config.host_bytes, config.host_kv_linger_s)
        host = HostStore(memory, shape)
        host.note_all()
        stores.append(host)
    if config.disk is not None:
        directory, max_bytes = config.disk
        stores.append(DiskStore(directory, shape, max_bytes, config.disk_kv_max_age_s))
    return KvTiers(shape, stores, cost, ThreadCarrier(region, shape.block_bytes))
