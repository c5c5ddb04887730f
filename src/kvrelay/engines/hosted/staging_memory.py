"""The staging pool of a worker with kvrelay's connector: memory that vLLM's processes map, too."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

from kvrelay.config import VllmConfig
from kvrelay.core.layout import KVLayout
from kvrelay.engines.connector.terms import StagingPlace
from kvrelay.engines.hosted.staging import StagingMemory
from kvrelay.errors import ConfigError
from kvrelay.executors.byte_sizes import parse_bytes
from kvrelay.executors.host_memory import HostMemory


@dataclass(frozen=True, slots=True)
class Staging:
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
