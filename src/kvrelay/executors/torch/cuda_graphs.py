"""Decode steps as CUDA graphs: one launch instead of hundreds.

A graph has fixed shapes, so batches are padded to the next size and block tables to the next power of two. Padding rows
use a spare block after the pool, which belongs to no sequence. Graphs are captured when their shape is first used, the
common shapes at warm-up. All graphs share one memory pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvrelay.executors.torch.attention.torch_ref import TorchAttention
from kvrelay.executors.torch.models.decoder import Decoder
from kvrelay.executors.torch.slots import StepBatch

_SIZES = (1, 2, 4, *range(8, 257, 8))
_WARM_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    token_ids: torch.Tensor
    tables: torch.Tensor
    positions: torch.Tensor
    hidden: torch.Tensor


class DecodeGraphs:
    def __init__(
        self, decoder: Decoder, attention: TorchAttention, device: torch.device, spare_block: int, max_num_seqs: int
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._device = device
        self._spare_block = spare_block
        self._sizes = (*(size for size in _SIZES if size < max_num_seqs), min(max_num_seqs, _SIZES[-1]))
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def fits(self, batch: StepBatch) -> bool:
        return bool(batch.num_decodes == batch.num_rows <= self._sizes[-1])

    def capture(self) -> None:
        """Capture every batch size for short contexts."""
        with torch.inference_mode():
            for size in reversed(self._sizes):
                self._graph(size, _WARM_BLOCKS)

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Hidden states [B, hidden] of a step that ``fits``; valid until the next step."""
        rows = batch.num_rows
        size = next(size for size in self._sizes if size >= rows)
        block_size = self._attention.block_size
        blocks = int(batch.starts.max()) // block_size + 1
        width = max(_WARM_BLOCKS, 1 << (blocks - 1).bit_length())
        graph = self._graph(size, width)
        tables = np.full((size, width), self._spare_block, dtype=np.int64)
        known = min(width, batch.block_table.shape[1])
        tables[:rows, :known] = batch.block_table[batch.slots, :known]
        graph.tables.copy_(torch.from_numpy(tables))
        graph.token_ids[:rows].copy_(torch.from_numpy(batch.token_ids))
        graph.positions.zero_()
        graph.positions[:rows].copy_(torch.from_numpy(batch.positions))
        graph.graph.replay()
        return graph.hidden[:rows]

    def _graph(self, size: int, width: int) -> _Graph:
        graph = self._graphs.get((size, width))
        if graph is None:
            graph = self._graphs[size, width] = self._capture(size, width)
        return graph

    def _capture(self, size: int, width: int) -> _Graph:
        token_ids = torch.zeros(size, dtype=torch.int64, device=self._device)
        positions = torch.zeros(size, dtype=torch.int64, device=self._device)
        tables = torch.full((size, width), self._spare_block, dtype=torch.int64, device=self._device)

        def step() -> torch.Tensor:
            self._attention.begin_decode(tables, positions)
            return self._decoder.forward(token_ids, self._attention, None)

        # Run once outside the capture first: libraries allocate their workspaces at first use.
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            hidden = step()
        return _Graph(graph, token_ids, tables, positions, hidden)
