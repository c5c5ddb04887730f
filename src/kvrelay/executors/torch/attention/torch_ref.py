"""Attention in plain torch: the reference on the CPU, and what other devices run.

Gathers each sequence's keys and values from the pool and masks. Decode rows are one batch, padded to the longest
context; prefill rows go one by one through scaled_dot_product_attention. All shapes are [rows, kv_heads, ...].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvrelay.executors.torch.attention.base import AttentionSpec
from kvrelay.executors.torch.slots import StepBatch


class TorchAttention:
    def __init__(self, spec: AttentionSpec, pool: torch.Tensor) -> None:
        self._spec = spec
        self._pool = pool
        self.block_size = pool.shape[4]
        self._batch: StepBatch | None = None
        self._num_decodes = 0
        self._positions = self._places = self._tables = torch.zeros(0, dtype=torch.int64, device=pool.device)

    def begin(self, batch: StepBatch) -> None:
        device = self._pool.device
        self._batch, self._num_decodes = batch, batch.num_decodes
        longest = int((batch.starts + batch.num_tokens).max())
        tables = torch.from_numpy(batch.block_table[batch.slots, : -(-longest // self.block_size)])
        self._tables = tables.to(device, torch.int64)
        self._positions = torch.from_numpy(batch.positions).to(device)
        rows = torch.repeat_interleave(torch.from_numpy(batch.num_tokens).long()).to(device)
        self._places = self._tables[rows, self._positions // self.block_size]

    def forward(self, layer: int, qkv: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        spec, decodes = self._spec, self._num_decodes
        q, k, v = split_heads(spec, layer, qkv, self._positions)
        store(self._pool, layer, self._places, self._positions % self.block_size, k, v)
        out = torch.empty(len(qkv), spec.num_heads, spec.head_dim, dtype=qkv.dtype, device=qkv.device)
        if decodes:
            out[:decodes] = decode_attention(
                spec, self._pool, layer, q[:decodes], self._tables[:decodes], self._positions[:decodes]
            )
        batch = self._batch
        for row in range(decodes, batch.num_rows if batch is not None else decodes):
            assert batch is not None
            start, end = int(batch.row_offsets[row]), int(batch.row_offsets[row + 1])
            positions = self._positions[start:end]
            length = int(batch.starts[row]) + end - start
            out[start:end] = self._prefill(layer, q[start:end], self._tables[row], positions, length)
        return out.view(len(qkv), -1)

    def _prefill(
        self, layer: int, q: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, length: int
    ) -> torch.Tensor:
        spec = self._spec
        blocks = self._pool[table[: -(-length // self.block_size)], layer]
        keys, values = blocks.permute(1, 2, 0, 3, 4).reshape(2, spec.num_kv_heads, -1, spec.head_dim)[:, :, :length]
        mask = visible(positions, length, spec.windows[layer])
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, scale=spec.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


def split_heads(
    spec: AttentionSpec, layer: int, qkv: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [T, num_heads, head_dim] and k, v [T, num_kv_heads, head_dim]; q and k normalised and rotated."""
    heads = qkv.view(len(qkv), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    q, k, v = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
    angles = spec.rope[positions]
    rotated = []
    for x, norm in ((q, spec.q_norms[layer]), (k, spec.k_norms[layer])):
        wide = x.float()
        if norm is not None:
            wide = F.rms_norm(wide, (spec.head_dim,), norm, spec.norm_eps)
        cos, sin = angles[:, 0, None], angles[:, 1, None]
        a, b = wide.chunk(2, dim=-1)
        rotated.append(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(qkv.dtype))
    return rotated[0], rotated[1], v


def store(
    pool: torch.Tensor, layer: int, blocks: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Write keys and values [T, num_kv_heads, head_dim] to (block, offset) of each token."""
    pool[:, layer, 0].transpose(1, 2)[blocks, offsets] = k
    pool[:, layer, 1].transpose(1, 2)[blocks, offsets] = v


def decode_attention(
    spec: AttentionSpec, pool: torch.Tensor, layer: int, q: torch.Tensor, tables: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One query per row, [B, num_heads, head_dim], over the blocks in ``tables`` [B, blocks]."""
    rows = len(q)
    blocks = pool[tables, layer].permute(2, 0, 3, 1, 4, 5)
    keys, values = blocks.reshape(2, rows, spec.num_kv_heads, -1, spec.head_dim)
    grouped = q.view(rows, spec.num_kv_heads, spec.group_size, spec.head_dim)
    scores = torch.matmul(grouped.float(), keys.float().transpose(2, 3)) * spec.scale
    mask = visible(positions, keys.shape[2], spec.windows[layer])
    scores.masked_fill_(~mask[:, None, None, :], float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    # What lies behind a row's last token may be anything, also NaN: no weight is small enough for that.
    seen = values.float().masked_fill(~mask[:, None, :, None], 0.0)
    return torch.matmul(weights, seen).view(rows, spec.num_heads, spec.head_dim).to(q.dtype)


def visible(positions: torch.Tensor, length: int, window: int) -> torch.Tensor:
    """[len(positions), length] bool: which keys a query at each position sees."""
    keys = torch.arange(length, device=positions.device)
    mask = keys <= positions[:, None]
    if window > 0:
        mask &= keys > positions[:, None] - window
    return mask
