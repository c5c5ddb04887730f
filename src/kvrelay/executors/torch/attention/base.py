"""Contract of attention over the paged KV pool.

Per step: ``begin(batch)`` once, then ``forward(layer, qkv)`` for each layer in order. ``forward`` takes the fused
projection [T, (num_heads + 2 * num_kv_heads) * head_dim] (q heads, k heads, v heads), normalises q and k where the
model does, rotates them by their positions, writes k and v into the pool at the tokens' places, attends causally over
the blocks of the sequence's block table, and returns [T, num_heads * head_dim]. With ``rows``, int64 numbers of tokens,
only their results are defined. The result may be in a buffer that the next call reuses.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import torch

from kvrelay.executors.torch.slots import StepBatch


class AttentionSpec(msgspec.Struct, frozen=True):
    """The model's side. ``rope`` [positions, 2, head_dim / 2] float32 (cos, sin); ``windows``, ``q_norms``,
    ``k_norms`` by layer: tokens that a query sees (0: all), and float32 [head_dim] norm weights, if any."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    rope: torch.Tensor
    norm_eps: float
    q_norms: tuple[torch.Tensor | None, ...]
    k_norms: tuple[torch.Tensor | None, ...]

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads


class Attention(Protocol):
    def begin(self, batch: StepBatch) -> None: ...

    def forward(self, layer: int, qkv: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor: ...
