"""The staging pool: host memory of the worker through which a backend's KV comes and goes, and its blocks.

The backend's processes map the memory, too. Peers write into a block, or read from it, while the hand-off's ledger has
it lent; the backend copies from it, or into it, while an answer is under way. Each such use holds the block, and a
block is free when no use is left.
"""

from __future__ import annotations

import mmap
import os

import msgspec

from kvrelay.config import VllmConfig
from kvrelay.config.byte_sizes import parse_bytes
from kvrelay.core.layout import KVLayout
from kvrelay.engine.free_extents import FreeExtents
from kvrelay.engines.connector.terms import StagingPlace
from kvrelay.errors import ConfigError, IntegrityError
from kvrelay.executors.host_memory import HostMemory


class StagingMemory(msgspec.Struct, frozen=True):
    """``num_blocks`` blocks of the worker's layout, which the backend has mapped, too."""

    memory: mmap.mmap
    num_blocks: int


class StagedBlocks(msgspec.Struct, eq=False):
    """The blocks of one request, in order, and how many uses hold them. Made by ``StagingBlocks.take``."""

    block_ids: tuple[int, ...]
    num_uses: int = 1


class StagingBlocks:
    """Not thread-safe."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = FreeExtents()
        self._free.add(0, num_blocks)
        self._taken: set[StagedBlocks] = set()

    def __repr__(self) -> str:
        return f"StagingBlocks({self.num_free} of {self.num_blocks} free, for {len(self._taken)} uses)"

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> StagedBlocks | None:
        """``count`` blocks with one use; None if fewer are free."""
        if count > self.num_free:
            return None
        blocks = StagedBlocks(tuple(self._free.take(count)))
        self._taken.add(blocks)
        return blocks

    def use(self, blocks: StagedBlocks) -> StagedBlocks:
        """One more use."""
        assert blocks in self._taken, "blocks that are free"
        blocks.num_uses += 1
        return blocks

    def release(self, blocks: StagedBlocks) -> None:
        """One use has ended."""
        assert blocks in self._taken, "blocks that are free already"
        blocks.num_uses -= 1
        if not blocks.num_uses:
            self._taken.remove(blocks)
            for block_id in blocks.block_ids:
                self._free.add(block_id)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every block is free or taken, and none is both or twice."""
        found = [block_id for blocks in self._taken for block_id in blocks.block_ids]
        for start, length in self._free.extents().items():
            found += range(start, start + length)
        if sorted(found) != list(range(self.num_blocks)):
            raise IntegrityError(f"{self!r}: a staging block is lost, or in two places")


class Staging(msgspec.Struct, frozen=True):
    """``place`` is for vLLM's processes, ``memory`` for this one. ``kind`` names vLLM's inner layout of a block, which
    kvrelay does not know: version, device, block size."""

    place: StagingPlace
    memory: StagingMemory
    kind: str


def allocate_staging(layout: KVLayout, max_model_len: int, kind: str, vllm: VllmConfig, memory: HostMemory) -> Staging:
    """As large as ``--vllm-staging`` says. Raises ConfigError if the longest prompt does not fit."""
    num_blocks = parse_bytes(vllm.vllm_staging) // layout.block_bytes
    if num_blocks * layout.block_size < max_model_len:
        needed = -(-max_model_len // layout.block_size) * layout.block_bytes
        raise ConfigError(
            f"--vllm-staging {vllm.vllm_staging} holds no prompt of {max_model_len} tokens: "
            f"set it to {needed} bytes or more, or set --max-model-len",
            param="vllm_staging",
        )
    num_bytes = num_blocks * layout.block_bytes
    if memory.allocate is not None and memory.reserve is not None:
        fd, pool = os.dup(memory.reserve()), memory.allocate(num_bytes)
    else:
        fd = os.memfd_create("kvrelay-kv-pool", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        pool = mmap.mmap(fd, num_bytes)
    # The descriptor stays open until this process ends: vLLM's processes open it when they start.
    path = f"/proc/{os.getpid()}/fd/{fd}"
    return Staging(StagingPlace(path, num_blocks, layout), StagingMemory(pool, num_blocks), kind)
