"""Attention on the CPU by the Numba kernels, directly on the pool's memory.

Owns the scratch memory of each thread, the tiling of prefill chunks and the choice between one thread and several.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.engine.step import Int32Array
from kvrelay.executors.torch.attention import cpu_decode, cpu_prefill
from kvrelay.executors.torch.attention.base import AttentionSpec
from kvrelay.executors.torch.attention.cpu_shared import KEYS
from kvrelay.executors.torch.kernels.numba_kernels import Buffer, as_numpy, use_threads
from kvrelay.executors.torch.kernels.numba_math import constant_marker
from kvrelay.executors.torch.slots import StepBatch

# With fewer multiply-adds one thread has finished before another has woken up.
_PARALLEL_FROM = 150_000
# Query rows (tokens times heads of a group) that share a chunk of widened keys and values.
_TILE_ROWS = 64


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The queries of the prefill rows, in tiles: slot, first token in the batch, number of tokens."""

    slots: Int32Array
    tokens: Int32Array
    counts: Int32Array
    token_slots: Int32Array


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
        self._scratch = np.zeros((num_threads, _scratch_size(spec)), dtype=np.float32)
        self._tile_size = max(_TILE_ROWS // spec.group_size, 1)
        self._state = np.zeros((num_threads, self._tile_size * spec.group_size, 2), dtype=np.float32)
        self._batch: StepBatch | None = None
        self._tiles: _Tiles | None = None
        self._threads = 1

    def begin(self, batch: StepBatch) -> None:
        self._batch = batch
        work = (
            int(((batch.starts + batch.num_tokens).astype(np.int64) * batch.num_tokens).sum())
            * self._spec.num_heads
            * self._spec.head_dim
        )
        self._threads = self._num_threads if work >= _PARALLEL_FROM else 1
        self._tiles = _tile(batch, self._tile_size) if batch.num_decodes < batch.num_rows else None

    def forward(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        batch = self._batch
        assert batch is not None, "begin comes first"
        out = self._out.take(len(qkv), self._spec.num_heads * self._spec.head_dim)
        source, target = as_numpy(qkv), as_numpy(out)
        if batch.num_decodes:
            self._decode(layer, batch, source, target)
        if self._tiles is not None:
            self._prefill(layer, batch, self._tiles, source, target)
        return out

    def _decode(self, layer: int, batch: StepBatch, qkv: npt.NDArray[np.generic], out: npt.NDArray[np.generic]) -> None:
        arguments = (
            self._head, self._group, qkv, self._pool, layer, batch.block_table,
            batch.slots[: batch.num_decodes], batch.starts[: batch.num_decodes], self._rope,
            self._q_norms[layer], self._k_norms[layer], self._eps, self._scale, self._spec.windows[layer],
            out, self._scratch, self._state,
        )  # fmt: skip
        cpu_decode.decode(*arguments, use_threads(self._threads))

    def _prefill(
        self, layer: int, batch: StepBatch, tiles: _Tiles, qkv: npt.NDArray[np.generic], out: npt.NDArray[np.generic]
    ) -> None:
        first_token = batch.num_decodes
        write = (
            self._head, self._group, qkv, self._pool, layer, batch.block_table, tiles.token_slots, batch.positions,
            first_token, self._rope, self._k_norms[layer], self._eps, self._scratch,
        )  # fmt: skip
        attend = (
            self._head, self._group, qkv, self._pool, layer, batch.block_table, tiles.slots, tiles.tokens,
            tiles.counts, batch.positions, self._rope, self._q_norms[layer], self._eps, self._scale,
            self._spec.windows[layer], out, self._scratch, self._state,
        )  # fmt: skip
        threads = use_threads(self._threads)
        cpu_prefill.write(*write, threads)
        cpu_prefill.prefill(*attend, threads)


def kernel_cache() -> Path:
    """Numba's cache directory of the compiled kernels."""
    return Path(cpu_decode.decode.stats.cache_path)


def _scratch_size(spec: AttentionSpec) -> int:
    """Floats of one thread's scratch memory: the larger of the needs of decode and prefill."""
    decode = 2 * spec.group_size * spec.head_dim + spec.group_size * cpu_decode.CHUNK
    tile_rows = max(_TILE_ROWS // spec.group_size, 1) * spec.group_size
    prefill = 2 * tile_rows * spec.head_dim + 2 * KEYS * spec.head_dim + cpu_prefill.ROWS * KEYS
    return max(decode, prefill)


def _tile(batch: StepBatch, size: int) -> _Tiles:
    """Cut each prefill row's tokens into runs of ``size``, the last one shorter."""
    first = batch.num_decodes
    counts = batch.num_tokens[first:]
    per_row = -(-counts // size)
    rows = np.repeat(np.arange(len(counts)), per_row)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    offsets = (within * size).astype(np.int32)
    return _Tiles(
        slots=batch.slots[first:][rows],
        tokens=batch.row_offsets[first:-1][rows] + offsets,
        counts=np.minimum(size, counts[rows] - offsets).astype(np.int32),
        token_slots=np.repeat(batch.slots, batch.num_tokens),
    )
