"""The shape of a KV pool, and the digest by which two workers know that they can exchange KV.

The pool is block-major: ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``.

    block b  = [ layer 0: K heads | V heads ][ layer 1: K | V ] ...     one contiguous piece of ``block_bytes``
    a head   = [ block_size, head_dim ]                                 contiguous too, so a TP slice of a layer is

So two workers of equal layout move an extent of adjacent blocks as one piece of memory.
"""

from __future__ import annotations

import msgspec
import xxhash

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4}


class KVLayout(msgspec.Struct, frozen=True):
    """Shape of one rank's KV pool. ``num_layers`` and ``num_kv_heads`` are those of this rank."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: str
    tp_size: int = 1
    pp_size: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether one rank holds all layers and heads."""
        return self.tp_size == self.pp_size == 1

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        return self.block_bytes // self.block_size


class MemoryRegion(msgspec.Struct, frozen=True):
    """A contiguous piece of memory that holds a KV pool. ``device`` is "cpu" or "cuda"."""

    address: int
    num_bytes: int
    device: str = "cpu"
    device_id: int = 0


class Compatibility(msgspec.Struct, frozen=True):
    """Everything that must agree before two workers may exchange KV. A difference in any field means other bytes."""

    model: str
    weights_fingerprint: str
    layout: KVLayout
    hash_seed: int
    protocol: int

    def digest(self) -> str:
        """16 hex digits; equal digests mean exchangeable KV."""
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode(self))
