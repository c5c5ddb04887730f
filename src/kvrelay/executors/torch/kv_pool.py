"""The KV pool: one page-aligned piece of memory, block-major, and the rules for its size.

    pool[block, layer, 0 = K | 1 = V, kv_head, position in block, head_dim]

Owns the memory, which is not touched before its blocks are used: on the CPU it is an anonymous mapping, so an empty
pool costs no resident memory, and it comes in huge pages if the kernel has them. The engine knows which request holds
which block.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.config.byte_sizes import parse_bytes, shown_bytes
from kvrelay.core.checksums import unit_checksums
from kvrelay.core.control_groups import available_bytes
from kvrelay.core.layout import KVLayout, MemoryRegion
from kvrelay.errors import ConfigError
from kvrelay.executors.host_memory import private_memory

_AUTO_CPU_SHARE, _AUTO_CPU_LIMIT_BYTES = 0.25, 2**30
_AUTO_CUDA_SHARE = 0.8


class KvPool:
    """``tensor`` is the pool in its logical shape and dtype, ``region`` the same memory by address. After the blocks of
    the pool come those of the holding area (``engine.holding``), which no step uses."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device,
        dtype: torch.dtype,
        memory: mmap.mmap | None = None,
        num_holding_blocks: int = 0,
        num_spill_blocks: int = 0,
    ) -> None:
        """``memory``: the memory for all blocks of a CPU pool; None: the pool allocates its own."""
        self.layout = layout
        self.num_blocks, self.num_holding_blocks, self.num_spill_blocks = (
            num_blocks,
            num_holding_blocks,
            num_spill_blocks,
        )
        num_bytes = (num_blocks + num_holding_blocks) * layout.block_bytes
        if device.type == "cpu":
            if memory is None:
                memory = private_memory(num_bytes)
                # A head's part of a block is about a page, so a step of decodes would miss the TLB at each.
                with suppress(OSError):  # a kernel without huge pages
                    memory.madvise(mmap.MADV_HUGEPAGE)
            flat = torch.frombuffer(memory, dtype=dtype, count=num_bytes // dtype.itemsize)
        else:
            try:
                flat = torch.zeros(num_bytes // dtype.itemsize, dtype=dtype, device=device)
            except RuntimeError as exc:  # torch.OutOfMemoryError, and sizes beyond its integers
                raise ConfigError(
                    f"a KV pool of {shown_bytes(num_bytes)} does not fit into the memory of {device} "
                    f"({str(exc).splitlines()[0]}): give a smaller --kv-cache-memory or --num-blocks",
                    param="kv_cache_memory",
                ) from exc
        region = layout.regions[0].region
        shape = (region.num_layers, region.num_vectors, region.num_heads, layout.block_size, region.entry_values)
        self.tensor = flat.view(-1, *shape)
        self._bytes = flat.view(torch.uint8).view(-1, layout.block_bytes)
        spilled = torch.empty(
            num_spill_blocks * layout.block_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        self._spilled = spilled.view(-1, layout.block_bytes)
        self.region = MemoryRegion(flat.data_ptr(), num_bytes, device.type, device.index or 0)

    def checksums(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """Those of ``core.checksums``, block by block. A GPU's blocks are copied to the host one by one, behind what
        the device has been given to do; a CPU's are read in place."""
        blocks = (self.block(block_id) for block_id in block_ids)
        return tuple(checksum for block in blocks for checksum in unit_checksums(block, self.layout))

    def copy(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """On a GPU behind what the device has been given to do; waits for the end."""
        for source_id, target_id in zip(source_ids, target_ids, strict=True):
            self.bytes_of(target_id).copy_(self.bytes_of(source_id), non_blocking=True)
        if self._bytes.is_cuda:
            torch.cuda.current_stream(self._bytes.device).synchronize()

    def bytes_of(self, block_id: int) -> torch.Tensor:
        """The bytes of a block of the pool, of the holding area, or of what was spilled from there."""
        num_here = len(self._bytes)
        return self._bytes[block_id] if block_id < num_here else self._spilled[block_id - num_here]

    def block(self, block_id: int) -> npt.NDArray[np.uint8]:
        """Its bytes, in place or copied to the host."""
        found: npt.NDArray[np.uint8] = self.bytes_of(block_id).cpu().numpy()
        return found

    def __repr__(self) -> str:
        return f"KvPool({self.num_blocks} blocks x {self.layout.block_bytes} bytes on {self.region.device})"


def decide_num_blocks(layout: KVLayout, num_blocks: int, kv_cache_memory: str, free_bytes: Callable[[], int]) -> int:
    """How many blocks the pool gets: ``num_blocks`` if given, else as many as fit into ``kv_cache_memory``.

    ``free_bytes`` returns the number of bytes that "auto" may take. Raises ConfigError if not a single block fits.
    """
    if num_blocks > 0:
        return num_blocks
    budget = free_bytes() if kv_cache_memory == "auto" else parse_bytes(kv_cache_memory)
    if budget < layout.block_bytes:
        raise ConfigError(
            f"kv_cache_memory: {budget} bytes do not hold one block of {layout.block_bytes} bytes",
            param="kv_cache_memory",
        )
    return budget // layout.block_bytes


def auto_pool_bytes(device: torch.device) -> int:
    """A share of the free memory: on a CPU a quarter and at most 1 GiB, so that two workers fit on a laptop."""
    if device.type == "cpu":
        return min(int(available_bytes() * _AUTO_CPU_SHARE), _AUTO_CPU_LIMIT_BYTES)
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * _AUTO_CUDA_SHARE)
