"""The shape of a KV pool, and what must agree before two workers exchange KV.

A model's KV is a list of named *regions*, each with a spec (``KVRegion``): what one layer stores for a block of tokens.

    heads     K and V of each head for each token                   2 vectors, an entry per token
    latent    one vector per token and layer (MLA)                  1 vector, 1 head, which every TP rank holds
    packed    an order of values that only the attention knows      an entry per block, of all its tokens
    state     what recurrent layers know at the end of a block      an entry per block, of everything before it

A layout (``KVLayout``) says how a worker's ranks share the regions out. The pool is block-major. A block is the parts
of all ranks side by side, stage by stage; a rank's part is its regions side by side; a region is ``[layer, vector,
head, entry, value]``, with the layers of the rank's stage (pipeline parallelism) and its heads (tensor parallelism):

    block b      = [ stage 0: rank 0 | rank 1 ][ stage 1: rank 0 | rank 1 ]            tp_size 2, pp_size 2
    rank's part  = [ region kv: layer 0: K heads | V heads, layer 1: ... ][ region draft: ... ]

If there are more ranks than heads, ``head_replicas`` neighbours hold the same head. So two workers of equal layout move
an extent of adjacent blocks as one piece of memory. ``transfer.layout_mapping`` joins unequal layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "uint8": 1}

_Size = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
"""Bounds for layouts that come from discovery: products of all sizes stay far below 2**127."""
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**20)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=32, pattern="^[a-z][a-z0-9-]*$")]
MAX_REGIONS = 16
MAX_STAGES = 1024

KV = "kv"
"""The region of a model whose KV has one."""


class KVRegion(msgspec.Struct, frozen=True):
    """What a model stores under one name, however a worker cuts it. ``num_heads`` counts each head once.

    ``entry_tokens``: tokens that one entry stands for, 0: everything up to the end of the block (a state). ``window``:
    the attention sees so many tokens before it, 0: all. Blocks are moved and kept whole all the same, because a
    shorter prompt may begin with them. ``tail_tokens``: so many tokens at the end of a prompt cannot be computed by a
    worker that does not go on from them, as with a drafter that reads ahead: a prefill stops short of them, and the
    decode worker computes them.
    """

    name: _Name
    num_layers: _Size
    num_heads: _Size
    entry_values: _Size
    dtype: str
    num_vectors: _Size = 2
    entry_tokens: _Count = 1
    window: _Count = 0
    tail_tokens: _Count = 0

    @property
    def entry_bytes(self) -> int:
        """Of one vector, layer and head."""
        return self.entry_values * DTYPE_BYTES[self.dtype]

    def num_entries(self, num_tokens: int) -> int:
        """Of a block of ``num_tokens``, per layer, vector and head."""
        return num_tokens // self.entry_tokens if self.entry_tokens else 1


class RegionCut(msgspec.Struct, frozen=True):
    """A region and which ranks hold it: the layers on each stage, and on how many TP neighbours each head lies."""

    region: KVRegion
    stage_layers: Annotated[tuple[_Count, ...], msgspec.Meta(min_length=1, max_length=MAX_STAGES)]
    head_replicas: _Size = 1

    @property
    def num_slots(self) -> int:
        """Heads in memory over all TP ranks, repeated ones included."""
        return self.region.num_heads * self.head_replicas

    def cell_bytes(self, block_size: int) -> int:
        """Of one layer, vector and head in a block: its entries."""
        return self.region.num_entries(block_size) * self.region.entry_bytes


class Part(NamedTuple):
    """A rank's share of one region in a worker's block: where it begins, and which layers and slots of heads it has.
    ``shape``: [layer, vector, slot, bytes of a cell]."""

    offset: int
    layers: slice
    slots: slice
    shape: tuple[int, int, int, int]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape)


class KVLayout(msgspec.Struct, frozen=True):
    """How a worker's pool holds the regions of its model's KV, over all its ranks."""

    block_size: _Size
    regions: Annotated[tuple[RegionCut, ...], msgspec.Meta(min_length=1, max_length=MAX_REGIONS)]
    tp_size: _Size = 1

    @property
    def pp_size(self) -> int:
        return len(self.regions[0].stage_layers)

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def is_whole(self) -> bool:
        """Whether one rank holds all layers and heads."""
        return self.num_ranks == 1

    @property
    def model(self) -> tuple[KVRegion, ...]:
        """The regions, however they are cut."""
        return tuple(cut.region for cut in self.regions)

    @property
    def region_names(self) -> tuple[str, ...]:
        return tuple(region.name for region in self.model)

    @property
    def entry_tokens(self) -> int:
        """The fewest tokens that are whole entries of every region."""
        return math.lcm(*(region.entry_tokens or 1 for region in self.model))

    @property
    def tail_tokens(self) -> int:
        """How many tokens before a prompt's end a prefill for another worker stops."""
        return max(region.tail_tokens for region in self.model)

    @property
    def has_states(self) -> bool:
        return any(not region.entry_tokens for region in self.model)

    @property
    def flaw(self) -> str | None:
        """Why no pool can have this layout; None if one can."""
        if len(set(self.region_names)) < len(self.regions):
            return "two regions have the same name"
        return next((f"region {cut.region.name}: {flaw}" for cut in self.regions if (flaw := self._flaw(cut))), None)

    def _flaw(self, cut: RegionCut) -> str | None:
        region, replicas = cut.region, cut.head_replicas
        if region.dtype not in DTYPE_BYTES:
            return f"its dtype {region.dtype!r} is unknown"
        if len(cut.stage_layers) != self.pp_size or sum(cut.stage_layers) != region.num_layers:
            return f"layers {cut.stage_layers} on {self.pp_size} stages are not {region.num_layers}"
        if cut.num_slots % self.tp_size:
            return f"tp {self.tp_size} does not divide {cut.num_slots} KV heads in memory"
        if replicas > 1 and (cut.num_slots != self.tp_size or self.tp_size % replicas):
            return f"tp {self.tp_size} cannot hold {cut.num_slots} KV heads {replicas} times each"
        if region.entry_tokens and self.block_size % region.entry_tokens:
            return f"entries of {region.entry_tokens} tokens do not divide blocks of {self.block_size}"
        return None

    def parts(self, number: int) -> Iterator[Part]:
        """Of region ``number``, rank by rank."""
        cut = self.regions[number]
        num_slots = cut.num_slots // self.tp_size
        begin = first_layer = 0
        for stage, num_layers in enumerate(cut.stage_layers):
            sizes = [self._part_bytes(each, stage) for each in self.regions]
            shape = (num_layers, cut.region.num_vectors, num_slots, cut.cell_bytes(self.block_size))
            for rank in range(self.tp_size):
                yield Part(
                    begin + rank * sum(sizes) + sum(sizes[:number]),
                    slice(first_layer, first_layer + num_layers),
                    slice(rank * num_slots, (rank + 1) * num_slots),
                    shape,
                )
            begin += self.tp_size * sum(sizes)
            first_layer += num_layers

    @property
    def rank_offsets(self) -> tuple[int, ...]:
        """Where each rank's part of a block begins, ascending."""
        return tuple(part.offset for part in self.parts(0))

    def _part_bytes(self, cut: RegionCut, stage: int) -> int:
        vectors = cut.stage_layers[stage] * cut.region.num_vectors
        return vectors * cut.num_slots // self.tp_size * cut.cell_bytes(self.block_size)

    @property
    def block_bytes(self) -> int:
        """Over all ranks."""
        stages = range(self.pp_size)
        return self.tp_size * sum(self._part_bytes(cut, stage) for cut in self.regions for stage in stages)

    @property
    def bytes_per_token(self) -> int:
        return self.block_bytes // self.block_size

    def bytes_after(self, num_tokens: int) -> int:
        """Of what an engine needs to go on after so many tokens: of a window the blocks that it may reach into, of
        states the last one."""
        found = 0
        for number, region in enumerate(self.model):
            reach = (-(-region.window // self.block_size) + 1) * self.block_size if region.window else num_tokens
            num_needed = min(num_tokens, reach) if region.entry_tokens else self.block_size
            found += sum(part.num_bytes for part in self.parts(number)) * num_needed // self.block_size
        return found

    def cells(self, block: npt.NDArray[np.uint8], number: int) -> npt.NDArray[np.uint8]:
        """Region ``number`` of a block ([block_bytes] uint8) as [layer, vector, slot, bytes of a cell]: a view if one
        rank holds it all, else a copy."""
        parts = list(self.parts(number))
        views = [block[part.offset : part.offset + part.num_bytes].reshape(part.shape) for part in parts]
        if len(views) == 1:
            return views[0]
        cut = self.regions[number]
        cells = np.empty((cut.region.num_layers, parts[0].shape[1], cut.num_slots, parts[0].shape[3]), dtype=np.uint8)
        for part, view in zip(parts, views, strict=True):
            cells[part.layers, :, part.slots] = view
        return cells


def paged_kv(
    num_layers: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: str,
    tp_size: int = 1,
    pp_size: int = 1,
    head_replicas: int = 1,
    tail_tokens: int = 0,
) -> KVLayout:
    """K and V per head and token, the one region of most models. ``num_kv_heads`` counts those in memory, repeated ones
    included; stages have equal shares of the layers."""
    region = KVRegion(KV, num_layers, max(1, num_kv_heads // head_replicas), head_dim, dtype, tail_tokens=tail_tokens)
    stages = tuple(num_layers // pp_size + (stage < num_layers % pp_size) for stage in range(pp_size))
    return KVLayout(block_size, (RegionCut(region, stages, head_replicas),), tp_size)


class BlockRun(msgspec.Struct, frozen=True):
    """A part of a sequence's block table. ``block_ids[i]`` holds the tokens from ``(first_block + i) * block_size`` on,
    with the block size of the pool that the ids are of."""

    first_block: int
    block_ids: tuple[int, ...]


class MemoryRegion(msgspec.Struct, frozen=True):
    """A contiguous piece of memory that holds a KV pool. ``device`` is "cpu" or "cuda".

    ``is_pool``: False for a stand-in that no KV lies in, since each rank has its own on its own device.
    """

    address: int
    num_bytes: int
    device: str = "cpu"
    device_id: int = 0
    is_pool: bool = True


class Compatibility(msgspec.Struct, frozen=True):
    """Everything that must agree before two workers may exchange KV. A difference in any field means other values.

    ``adapter``: the adapter (LoRA) that all of it is computed with, by name (empty: none). Adapters that requests ask
    for are not in it: the contents of each are in the hashes of its blocks, and a request runs where its own is.
    TP, PP and block size are not in it: ``transfer.layout_mapping`` joins any two of them.
    """

    model: str
    weights_fingerprint: str
    regions: tuple[KVRegion, ...]
    hash_seed: int
    protocol: int
    adapter: str = ""

    def digest(self) -> str:
        """16 hex digits; equal digests mean exchangeable KV."""
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode(self))

    def difference(self, theirs: Compatibility) -> str | None:
        """The first field that differs, of a region by its name; None if all are equal."""
        for name in ("protocol", "model", "adapter", "weights_fingerprint", "hash_seed"):
            if getattr(self, name) != getattr(theirs, name):
                return f"{name} is {getattr(theirs, name)!r} there, {getattr(self, name)!r} here"
        return region_difference(self.regions, theirs.regions)


def region_difference(ours: Sequence[KVRegion], theirs: Sequence[KVRegion]) -> str | None:
    """The first thing in which the KV of two models differs."""
    names = tuple(tuple(region.name for region in regions) for regions in (ours, theirs))
    if names[0] != names[1]:
        return f"regions are {', '.join(names[1])} there, {', '.join(names[0])} here"
    for mine, other in zip(ours, theirs, strict=True):
        for field in KVRegion.__struct_fields__:
            if getattr(mine, field) != getattr(other, field):
                return f"{field} of region {mine.name} is {getattr(other, field)} there, {getattr(mine, field)} here"
    return None
