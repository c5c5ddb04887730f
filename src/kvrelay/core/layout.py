"""The shape of a KV pool, and the digest by which two workers know that they can exchange KV.

The pool is block-major. With one rank it is ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``:

    block b  = [ layer 0: K heads | V heads ][ layer 1: K | V ] ...     one contiguous piece of ``block_bytes``
    a head   = [ block_size, head_dim ]                                 contiguous too, so a TP slice of a layer is

With several ranks a block is the blocks of all ranks side by side, stage by stage. Each is of the shape above, with the
layers of its stage (pipeline parallelism) and the KV heads of its rank (tensor parallelism):

    block b  = [ stage 0: rank 0 | rank 1 ][ stage 1: rank 0 | rank 1 ]            tp_size 2, pp_size 2

If there are more ranks than KV heads, ``head_replicas`` neighbours hold the same head. So two workers of equal layout
move an extent of adjacent blocks as one piece of memory. ``transfer.layout_mapping`` joins unequal layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import xxhash

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "uint8": 1}

_Size = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
"""Bounds for layouts that come from discovery: products of all sizes stay far below 2**127."""


class KVLayout(msgspec.Struct, frozen=True):
    """Shape of a worker's KV pool over all its ranks.

    ``num_layers`` counts all stages' layers, ``num_kv_heads`` the heads in memory, repeated ones included.
    """

    num_layers: _Size
    num_kv_heads: _Size
    block_size: _Size
    head_dim: _Size
    dtype: str
    tp_size: _Size = 1
    pp_size: _Size = 1
    head_replicas: _Size = 1

    @property
    def num_model_heads(self) -> int:
        """KV heads of the model: each counts once."""
        return self.num_kv_heads // self.head_replicas

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def is_whole(self) -> bool:
        """Whether one rank holds all layers and heads."""
        return self.num_ranks == 1

    @property
    def flaw(self) -> str | None:
        """Why no pool can have this layout; None if one can."""
        if self.dtype not in DTYPE_BYTES:
            return f"its dtype {self.dtype!r} is unknown"
        if self.num_layers % self.pp_size:
            return f"pp {self.pp_size} does not divide {self.num_layers} layers"
        if self.num_kv_heads % self.tp_size:
            return f"tp {self.tp_size} does not divide {self.num_kv_heads} KV heads in memory"
        if self.head_replicas > 1 and (self.num_kv_heads != self.tp_size or self.tp_size % self.head_replicas):
            return f"tp {self.tp_size} cannot hold {self.num_kv_heads} KV heads {self.head_replicas} times each"
        return None

    @property
    def shape(self) -> KVShape:
        return KVShape(self.num_layers, self.num_model_heads, self.head_dim, self.dtype)

    @property
    def of_rank(self) -> KVLayout:
        """The layout of one rank's part, as if it were a pool of its own."""
        return msgspec.structs.replace(
            self,
            num_layers=self.num_layers // self.pp_size,
            num_kv_heads=self.num_kv_heads // self.tp_size,
            tp_size=1,
            pp_size=1,
            head_replicas=1,
        )

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Of one rank's layout only."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def token_head_bytes(self) -> int:
        """Bytes of K or V of one token, layer and head."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Over all ranks."""
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.token_head_bytes

    @property
    def bytes_per_token(self) -> int:
        return self.block_bytes // self.block_size


class BlockRun(msgspec.Struct, frozen=True):
    """A part of a sequence's block table. ``block_ids[i]`` holds the tokens from ``(first_block + i) * block_size`` on,
    with the block size of the pool that the ids are of."""

    first_block: int
    block_ids: Sequence[int]


class MemoryRegion(msgspec.Struct, frozen=True):
    """A contiguous piece of memory that holds a KV pool. ``device`` is "cpu" or "cuda".

    ``is_pool``: False for a stand-in that no KV lies in, since each rank has its own on its own device.
    """

    address: int
    num_bytes: int
    device: str = "cpu"
    device_id: int = 0
    is_pool: bool = True


class KVShape(msgspec.Struct, frozen=True):
    """What a model's KV is, however a worker cuts it: ``num_kv_heads`` counts each head once."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str


class Compatibility(msgspec.Struct, frozen=True):
    """Everything that must agree before two workers may exchange KV. A difference in any field means other values.

    TP, PP and block size are not in it: ``transfer.layout_mapping`` joins any two of them.
    """

    model: str
    weights_fingerprint: str
    shape: KVShape
    hash_seed: int
    protocol: int

    def digest(self) -> str:
        """16 hex digits; equal digests mean exchangeable KV."""
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode(self))
