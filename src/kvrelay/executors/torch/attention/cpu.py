"""Attention on the CPU by the Numba kernels, directly on the pool's memory.

Owns the scratch memory of each thread, the tiling of prefill chunks and the choice between one thread and several.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.engine.step import Int32Array
from kvrelay.executors.torch.attention import cpu_kernels
from kvrelay.executors.torch.attention.base import AttentionSpec
from kvrelay.executors.torch.kernels.numba_kernels import Buffer, as_numpy
from kvrelay.executors.torch.kernels.numba_math import constant_marker
from kvrelay.executors.torch.kernels.numba_threads import use_threads
from kvrelay.executors.torch.slots import StepBatch

# With fewer multiply-adds one thread has finished before another has woken up.
_PARALLEL_FROM = 150_000
# Query rows (tokens times heads of a group) that share a chunk of widened keys and values: the more, the less widening;
# but short prompts are to keep all threads busy.
_TILE_ROWS, _SHORT_TILE_ROWS = 256, 64
# New tokens of a step for which a tile is large.
_LARGE_FROM = 512


_NO_TILES = (np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32))


class CpuAttention:
    def __init__(self, spec: AttentionSpec, pool: torch.Tensor, dtype: torch.dtype, num_threads: int) -> None:
        self._spec = spec
        self._pool = as_numpy(pool)
        self._out = Buffer(dtype)
        self._rope = spec.rope.numpy()
        none = np.zeros(0, dtype=np.float32)
        self._q_norms = [none if norm is None else norm.numpy() for norm in spec.q_norms]
        self._k_norms = [none if norm is None else norm.numpy() for norm in spec.k_norms]
        self._head, self._group = constant_marker(spec.head_dim), constant_marker(spec.group_size)
        self._eps, self._scale = np.float32(spec.norm_eps), np.float32(spec.scale)
        self._num_threads = num_threads
        self._tile_sizes = [max(rows // spec.group_size, 1) for rows in (_SHORT_TILE_ROWS, _TILE_ROWS)]
        tile_rows = self._tile_sizes[1] * spec.group_size
        floats = cpu_kernels.scratch_size(spec.group_size, spec.head_dim, tile_rows)
        self._scratch = torch.zeros(num_threads, -(-floats // 16) * 16).numpy()
        self._state = np.zeros((num_threads, tile_rows, 2), dtype=np.float32)
        self._batch: StepBatch | None = None
        self._slots = np.zeros(0, dtype=np.int32)
        self._tiles = _NO_TILES
        self._threads = 1

    def begin(self, batch: StepBatch) -> None:
        self._batch = batch
        work = (
            int(((batch.starts + batch.num_tokens).astype(np.int64) * batch.num_tokens).sum())
            * self._spec.num_heads
            * self._spec.head_dim
        )
        self._threads = self._num_threads if work >= _PARALLEL_FROM else 1
        if batch.num_decodes < batch.num_rows:
            size = self._tile_sizes[len(batch.token_ids) - batch.num_decodes >= _LARGE_FROM]
            self._slots, self._tiles = np.repeat(batch.slots, batch.num_tokens), _tile(batch, size)
        else:
            self._slots, self._tiles = batch.slots, _NO_TILES

    def forward(self, layer: int, qkv: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        batch = self._batch
        assert batch is not None, "begin comes first"
        out = self._out.take(qkv.shape[0], self._spec.num_heads * self._spec.head_dim)
        tiles = self._tiles if rows is None else _cut(self._tiles, rows.numpy())
        arguments = (
            self._head, self._group, as_numpy(qkv), self._pool, layer, self._slots, batch.positions, batch.block_table,
            self._rope, self._q_norms[layer], self._k_norms[layer], self._eps, self._scale, self._spec.windows[layer],
            as_numpy(out), self._scratch, self._state, batch.num_decodes, *tiles,
        )  # fmt: skip
        cpu_kernels.attend(*arguments, use_threads(self._threads))
        return out


def kernel_cache() -> Path:
    """Numba's cache directory of the compiled kernels; no directory if they are compiled in memory."""
    return Path(cpu_kernels.attend.stats.cache_path or os.devnull)


def _tile(batch: StepBatch, size: int) -> tuple[Int32Array, Int32Array]:
    """The prefill rows' tokens in runs of ``size``, the last of a row shorter: first tokens, and numbers of tokens."""
    first = batch.num_decodes
    counts = batch.num_tokens[first:]
    per_row = -(-counts // size)
    rows = np.repeat(np.arange(len(counts)), per_row)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    offsets = (within * size).astype(np.int32)
    return batch.row_offsets[first:-1][rows] + offsets, np.minimum(size, counts[rows] - offsets).astype(np.int32)


def _cut(tiles: tuple[Int32Array, Int32Array], rows: npt.NDArray[np.int64]) -> tuple[Int32Array, Int32Array]:
    """Of each tile only the run of tokens that holds all its ``rows``; tiles without any are left out."""
    if not len(tiles[0]):
        return tiles
    tokens = np.sort(rows[rows >= tiles[0][0]]).astype(np.int32)
    _, begins = np.unique(np.searchsorted(tiles[0], tokens, side="right"), return_index=True)
    first = tokens[begins]
    return first, tokens[np.append(begins, len(tokens))[1:] - 1] - first + 1
