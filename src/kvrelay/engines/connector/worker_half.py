"""The worker half: copies blocks between the staging pool and vLLM's paged KV.

    staging pool, shared memory     [num_blocks, layer, *interior]     contiguous
    vLLM's paged KV, per layer      [num_blocks, *interior]            with any strides

The interior is [head, token, K|V * head_dim] by its shape. Its order of values is the business of vLLM's attention: the
CPU's, for example, packs the keys of all tokens of a block. So blocks are copied whole, and only between equal vLLMs.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvrelay.core.layout import KVLayout
from kvrelay.engines.connector.scheduler_half import Copies, Copy
from kvrelay.engines.connector.terms import Pools, StagingPlace
from kvrelay.engines.connector.tickets import TicketTable
from kvrelay.errors import ConfigError, InvalidInputError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A staging pool. Without ``tickets`` the worker itself knows when a copy is over."""

    name: str
    blocks: torch.Tensor
    tickets: TicketTable | None


class WorkerHalf:
    """One per vLLM worker. Copies are complete when ``copy`` returns."""

    def __init__(self, pools: Pools, layout: KVLayout) -> None:
        self._pools = pools
        self._layout = layout
        self._interior = (layout.num_kv_heads, layout.block_size, 2 * layout.head_dim)
        self._dtype = getattr(torch, layout.dtype)
        self._pool: _Mapped | None = None
        """The one that was used last."""
        self._caches: list[torch.Tensor] = []
        self._loaded: set[str] = set()
        self._missing: set[int] = set()

    def open(self, pool: str) -> None:
        """Map this pool. Raises ConfigError if that is not possible, InvalidInputError if there is no such pool."""
        place = self._pools.place(pool)
        blocks = _map(place).view(place.num_blocks, place.layout.num_layers, *self._interior)
        tickets = TicketTable(Path(place.tickets), place.num_blocks) if place.tickets else None
        self._pool = _Mapped(pool, blocks, tickets)

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """vLLM's KV by layer name. Raises ConfigError for another shape than the staging pool is made for."""
        if len(caches) != self._layout.num_layers:
            raise ConfigError(f"vLLM has KV of {len(caches)} layers, not of {self._layout.num_layers}")
        for name, cache in caches.items():
            if tuple(cache.shape[1:]) != self._interior or cache.dtype != self._dtype:
                raise ConfigError(
                    f"vLLM's KV of {name} is {tuple(cache.shape)} {cache.dtype}, "
                    f"not (blocks, *{self._interior}) {self._dtype}"
                )
        self._caches = [caches[name] for name in sorted(caches, key=_layer_number)]

    def copy(self, copies: Copies) -> None:
        """Everything that a step copies. What the worker has revoked is left out."""
        for load in copies.loads:
            if not self._copied(load, self._load):
                self._missing.update(load.paged)
            self._loaded.add(load.request_id)
        for save in copies.saves:
            self._copied(save, self._save)

    def _copied(self, copy: Copy, move: Callable[[torch.Tensor, Copy], None]) -> bool:
        try:
            if self._pool is None or self._pool.name != copy.pool:
                self.open(copy.pool)
        except (ConfigError, InvalidInputError) as exc:
            _log.warning("request %s: %s", copy.request_id, exc.message)
            return False
        assert self._pool is not None
        if self._pool.tickets is None:
            move(self._pool.blocks, copy)
            return True
        with self._pool.tickets.copying(copy.staged, copy.ticket) as may_copy:
            if may_copy:
                move(self._pool.blocks, copy)
        return may_copy

    def _load(self, blocks: torch.Tensor, copy: Copy) -> None:
        staged, paged = _index(copy.staged), _index(copy.paged)
        for layer, cache in enumerate(self._caches):
            cache[paged] = blocks[staged, layer].to(cache.device)

    def _save(self, blocks: torch.Tensor, copy: Copy) -> None:
        staged, paged = _index(copy.staged), _index(copy.paged)
        for layer, cache in enumerate(self._caches):
            blocks[staged, layer] = cache[paged].to(blocks.device)

    def take_loaded(self) -> set[str]:
        """Requests whose loads have ended since the last call, also those whose KV is missing."""
        loaded, self._loaded = self._loaded, set()
        return loaded

    def take_missing(self) -> set[int]:
        """vLLM's blocks that a load since the last call should have filled, and has not."""
        missing, self._missing = self._missing, set()
        return missing


def _index(block_ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(block_ids, dtype=torch.int64)


def _layer_number(name: str) -> tuple[int, ...]:
    """``model.layers.11.self_attn.attn`` comes after layer 2."""
    return tuple(int(number) for number in re.findall(r"\d+", name))


def _map(place: StagingPlace) -> torch.Tensor:
    num_bytes = place.num_blocks * place.layout.block_bytes
    try:
        fd = os.open(place.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size < num_bytes:
                raise ConfigError(f"the staging pool at {place.path} is smaller than {num_bytes} bytes")
            memory = mmap.mmap(fd, num_bytes)
        finally:
            os.close(fd)
    except OSError as exc:
        raise ConfigError(f"the staging pool at {place.path} cannot be mapped: {exc.strerror}") from exc
    return torch.frombuffer(memory, dtype=getattr(torch, place.layout.dtype))
