"""The worker half: copies blocks between the staging pool and vLLM's paged KV.

    staging pool, shared memory     [num_blocks, layer, *interior]     contiguous
    vLLM's paged KV, per layer      [num_blocks, *interior]            with any strides

The interior is [head, token, K|V * head_dim] by its shape. Its order of values is the business of vLLM's attention: the
CPU's, for example, packs the keys of all tokens of a block. So blocks are copied whole, and only between equal vLLMs.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Mapping, Sequence

import torch

from kvrelay.engines.connector.scheduler_half import Copies
from kvrelay.engines.connector.terms import StagingPlace
from kvrelay.errors import ConfigError


class WorkerHalf:
    """One per vLLM worker. Copies are complete when ``copy`` returns. Raises ConfigError for a pool at ``place`` that
    cannot be mapped."""

    def __init__(self, place: StagingPlace) -> None:
        layout = self._layout = place.layout
        self._interior = (layout.num_kv_heads, layout.block_size, 2 * layout.head_dim)
        self._dtype = getattr(torch, layout.dtype)
        self._blocks = _map(place).view(place.num_blocks, layout.num_layers, *self._interior)
        self.caches: list[torch.Tensor] = []
        """vLLM's, in the order of its layers."""
        self._loaded: set[str] = set()

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
        self.caches = [caches[name] for name in sorted(caches, key=_layer_number)]

    def copy(self, copies: Copies) -> None:
        """Everything that a step copies."""
        for load in copies.loads:
            staged, paged = _index(load.staged), _index(load.paged)
            for layer, cache in enumerate(self.caches):
                cache[paged] = self._blocks[staged, layer].to(cache.device)
            self._loaded.add(load.request_id)
        for save in copies.saves:
            staged, paged = _index(save.staged), _index(save.paged)
            for layer, cache in enumerate(self.caches):
                self._blocks[staged, layer] = cache[paged].to(self._blocks.device)

    def take_loaded(self) -> set[str]:
        """Requests whose loads have ended since the last call."""
        loaded, self._loaded = self._loaded, set()
        return loaded


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
