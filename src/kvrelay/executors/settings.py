"""What the builder of an executor or of a whole engine gets."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvrelay.config import EngineConfig, GroupConfig, MockConfig, RunnerConfig, UpstreamConfig, VllmConfig


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """Everything that a builder may need. ``model_path`` is a checkpoint directory. ``allocate(num_bytes)`` returns
    zeroed host memory for a KV pool that other processes must map; None: any memory is suitable. ``reserve()`` returns
    the open file of that memory in advance, for an engine of several processes."""

    model_path: Path
    engine: EngineConfig
    runner: RunnerConfig
    mock: MockConfig
    allocate: Callable[[int], mmap.mmap] | None = None
    upstream: UpstreamConfig = field(default_factory=UpstreamConfig)
    reserve: Callable[[], int] | None = None
    group: GroupConfig = field(default_factory=GroupConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    host: str = "127.0.0.1"
    """Address by which peers reach this worker."""
    exchanges_kv: bool = False
    """Whether the worker has role prefill or decode. Only engines of HOSTS look at it."""
