"""The worker half: copies blocks between the staging pool and vLLM's paged KV.

    staging pool, shared memory     [num_blocks, layer, head, *interior]     contiguous, of the whole model
    vLLM's paged KV, per layer      [num_blocks, head, *interior]            with any strides, of this rank

The interior is [token, K|V * head_dim] by its shape. Its order of values is the business of vLLM's attention: the
CPU's, for example, packs the keys of all tokens of a block. So a head's part of a block is copied whole, and only
between equal vLLMs. A latent (MLA) is one head, whose interior is [token, latent].

Each rank copies its own layers (pipeline parallelism) and heads (tensor parallelism), all of them at once. So the two
sides of a hand-off may have any numbers of ranks: the pools between them are alike.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from kvrelay.core.layout import KVLayout
from kvrelay.engines.connector.scheduler_half import Copies
from kvrelay.engines.connector.terms import StagingPlace
from kvrelay.errors import ConfigError

LATENT_DIMS = 3
"""Of vLLM's KV with latents: [num_blocks, token, latent]."""


class RankPart(NamedTuple):
    """What a rank holds: ``num_layers`` layers, and ``num_heads`` KV heads from ``first_head`` on. ``saves``: no rank
    before it holds the same heads."""

    num_layers: int
    first_head: int
    num_heads: int
    saves: bool

    @staticmethod
    def of(layout: KVLayout, num_layers: int, tp_rank: int, tp_size: int) -> RankPart:
        """``layout``: of the whole model. As vLLM shares it out: if ranks outnumber heads, neighbours hold the same."""
        heads = layout.regions[0].num_slots
        first = tp_rank * heads // tp_size
        is_first = tp_rank == 0 or (tp_rank - 1) * heads // tp_size < first
        return RankPart(num_layers, first, max(1, heads // tp_size), is_first)


class WorkerHalf:
    """One per vLLM worker, whose part of the model is ``part``. Copies are complete when ``copy`` returns. Raises
    ConfigError for a pool at ``place`` that cannot be mapped."""

    def __init__(self, place: StagingPlace, part: RankPart) -> None:
        layout = place.layout
        self._part = part
        region, size = layout.regions[0].region, layout.block_size
        self._num_layers = region.num_layers
        self._interior = (part.num_heads, size, region.num_entries(size) * region.entry_values // size)
        self._dtype = getattr(torch, region.dtype)
        pool = _map(place).view(place.num_blocks, region.num_layers, region.num_heads, *self._interior[1:])
        self._blocks = pool[:, :, part.first_head : part.first_head + part.num_heads]
        self.caches: dict[int, torch.Tensor] = {}
        """vLLM's, by the numbers of their layers in the model."""
        self._loaded: set[str] = set()

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """vLLM's KV by layer name. Raises ConfigError for another shape than the staging pool is made for."""
        for name, cache in caches.items():
            number, blocks = _layer_number(name), cache.unsqueeze(1) if cache.dim() == LATENT_DIMS else cache
            if number in self.caches or not 0 <= number < self._num_layers:
                raise ConfigError(f"vLLM has KV of {name}: a layer twice, or none of {self._num_layers}")
            if tuple(blocks.shape[1:]) != self._interior or cache.dtype != self._dtype:
                raise ConfigError(
                    f"vLLM's KV of {name} is {tuple(cache.shape)} {cache.dtype}, "
                    f"not (blocks, *{self._interior}) {self._dtype}"
                )
            self.caches[number] = blocks
        if len(self.caches) != self._part.num_layers:
            raise ConfigError(f"vLLM has KV of {len(self.caches)} layers, not of {self._part.num_layers}")

    def copy(self, copies: Copies) -> None:
        """Everything that a step copies."""
        for load in copies.loads:
            staged, paged = _index(load.staged), _index(load.paged)
            for layer, cache in self.caches.items():
                cache[paged] = self._blocks[staged, layer].to(cache.device)
            self._loaded.add(load.request_id)
        for save in copies.saves if self._part.saves else ():
            staged, paged = _index(save.staged), _index(save.paged)
            for layer, cache in self.caches.items():
                self._blocks[staged, layer] = cache[paged].to(self._blocks.device)

    def take_loaded(self) -> set[str]:
        """Requests whose loads have ended since the last call."""
        loaded, self._loaded = self._loaded, set()
        return loaded


def _index(block_ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(block_ids, dtype=torch.int64)


def _layer_number(name: str) -> int:
    """11 of ``model.layers.11.self_attn.attn``; -1 if there is none."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


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
    return torch.frombuffer(memory, dtype=getattr(torch, place.layout.regions[0].region.dtype))
