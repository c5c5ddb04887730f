"""What the builder of an engine gets beside the settings: host memory of a KV pool that other processes must map, and
where processes are offered that move their own KV."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvrelay.config.settings import EngineConfig
from kvrelay.core.control_groups import map_memory, require_memory

if TYPE_CHECKING:
    from kvrelay.transfer.ranks.link import RankLink
    from kvrelay.transfer.ranks.messages import Fence

OfferRanks = Callable[[Sequence["RankLink"], "Fence"], None]


class HostMemory(msgspec.Struct, frozen=True):
    """``allocate(num_bytes)`` returns zeroed memory, ``reserve()`` the open file of that memory in advance, for an
    engine of several processes. None: any memory is suitable. ``offer_ranks`` (``RankLinks.offer``) takes those
    processes, if each can move its own KV."""

    allocate: Callable[[int], mmap.mmap] | None = None
    reserve: Callable[[], int] | None = None
    offer_ranks: OfferRanks | None = None


ANYWHERE = HostMemory()


def private_memory(num_bytes: int) -> mmap.mmap:
    """Memory for a KV pool that no other process maps. Raises ConfigError."""
    return map_memory(num_bytes, "kv_cache_memory", "the KV pool and its holding area")


def require_host_memory(num_bytes: int, config: EngineConfig) -> None:
    """Raises ConfigError if the host has not so much left for a KV pool."""
    require_memory(num_bytes, "num_blocks" if config.num_blocks else "kv_cache_memory", "a KV pool")
