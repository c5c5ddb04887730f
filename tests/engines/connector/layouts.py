"""Layouts of models that have no files."""

from __future__ import annotations

from kvrelay.core.layout import KVLayout
from kvrelay.engines.connector.terms import one_rank_layout, packed_region


def packed_layout(
    num_layers: int, num_heads: int, block_size: int, head_dim: int, dtype: str, window: int = 0
) -> KVLayout:
    """K and V of one region, as vLLM's attention packs them."""
    return one_rank_layout(block_size, packed_region(num_layers, num_heads, block_size, head_dim, dtype, window))
