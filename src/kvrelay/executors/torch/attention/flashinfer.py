"""Attention by FlashInfer on CUDA: its paged decode and prefill kernels on the block-major pool.

A layer of the pool, [blocks, 2, kv_heads, block_size, head_dim] with a stride between blocks, is FlashInfer's "HND"
layout, so nothing is copied. Torch (``torch_ref``) rotates, and writes keys and values. A step is planned once for each
distinct sliding window, not once per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flashinfer
import numpy as np
import torch

from kvrelay.executors.torch.attention.base import AttentionSpec
from kvrelay.executors.torch.attention.torch_ref import split_heads, store
from kvrelay.executors.torch.slots import StepBatch

_WORKSPACE_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class _Wrappers:
    """FlashInfer's objects that hold a plan; one pair per distinct window."""

    decode: Any
    prefill: Any


class FlashInferAttention:
    def __init__(self, spec: AttentionSpec, pool: torch.Tensor, dtype: torch.dtype) -> None:
        self._spec = spec
        self._pool = pool
        self._dtype = dtype
        self._block_size = pool.shape[4]
        self._wrappers = {window: self._make_wrappers() for window in set(spec.windows)}
        self._num_decodes = self._num_rows = 0
        self._positions = self._places = torch.zeros(0, dtype=torch.int64, device=pool.device)

    def _make_wrappers(self) -> _Wrappers:
        def workspace() -> torch.Tensor:
            return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._pool.device)

        return _Wrappers(
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), "HND", use_tensor_cores=True),
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "HND"),
        )

    def begin(self, batch: StepBatch) -> None:
        device = self._pool.device
        self._num_decodes, self._num_rows = batch.num_decodes, batch.num_rows
        self._positions = torch.from_numpy(batch.positions).to(device)
        rows = np.repeat(np.arange(batch.num_rows), batch.num_tokens)
        places = batch.block_table[batch.slots[rows], batch.positions // self._block_size]
        self._places = torch.from_numpy(places.astype(np.int64)).to(device)
        for window, wrappers in self._wrappers.items():
            if self._num_decodes:
                self._plan_decode(wrappers.decode, batch, window)
            if self._num_decodes < self._num_rows:
                self._plan_prefill(wrappers.prefill, batch, window)

    def forward(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        spec, decodes = self._spec, self._num_decodes
        q, k, v = split_heads(spec, layer, qkv, self._positions)
        store(self._pool, layer, self._places, self._positions % self._block_size, k, v)
        cache = self._pool[:, layer]
        wrappers = self._wrappers[spec.windows[layer]]
        parts = []
        if decodes:
            parts.append(wrappers.decode.run(q[:decodes].contiguous(), cache))
        if decodes < self._num_rows:
            parts.append(wrappers.prefill.run(q[decodes:].contiguous(), cache))
        return torch.cat(parts).view(len(qkv), -1)

    def _pages(self, batch: StepBatch, rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Concatenated block ids of the rows, the index at which each row begins, and the number of tokens in each last
        block."""
        lengths = batch.starts[rows] + batch.num_tokens[rows]
        counts = -(-lengths // self._block_size)
        offsets = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=offsets[1:])
        slots = np.repeat(batch.slots[rows], counts)
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        last = (lengths - 1) % self._block_size + 1
        return (
            torch.from_numpy(offsets),
            torch.from_numpy(batch.block_table[slots, within]).to(self._pool.device),
            torch.from_numpy(last.astype(np.int32)),
        )

    def _plan_decode(self, wrapper: Any, batch: StepBatch, window: int) -> None:
        spec = self._spec
        offsets, pages, last = self._pages(batch, slice(0, self._num_decodes))
        wrapper.plan(
            offsets,
            pages,
            last,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            self._block_size,
            window_left=window - 1,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            sm_scale=spec.scale,
        )

    def _plan_prefill(self, wrapper: Any, batch: StepBatch, window: int) -> None:
        spec = self._spec
        offsets, pages, last = self._pages(batch, slice(self._num_decodes, None))
        query_offsets = batch.row_offsets[self._num_decodes :] - batch.row_offsets[self._num_decodes]
        wrapper.plan(
            torch.from_numpy(query_offsets.astype(np.int32)),
            offsets,
            pages,
            last,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            self._block_size,
            causal=True,
            window_left=window - 1,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            sm_scale=spec.scale,
        )
