"""Which attention implementation a configuration gets; heavy packages are imported only for the chosen one."""

from __future__ import annotations

import torch

from kvrelay.errors import ConfigError
from kvrelay.executors.torch.attention.base import Attention, AttentionSpec


def choose_backend(requested: str, device: torch.device) -> str:
    """ "auto" resolved: Numba on the CPU, else torch. Raises ConfigError."""
    if requested == "auto":
        return "cpu" if device.type == "cpu" else "torch"
    if requested == "cpu" and device.type != "cpu":
        raise ConfigError(f"attention_backend {requested} does not run on {device.type}", param="attention_backend")
    return requested


def build_attention(
    backend: str, spec: AttentionSpec, pool: torch.Tensor, dtype: torch.dtype, num_threads: int
) -> Attention:
    """The implementation that ``choose_backend`` named."""
    if backend == "cpu":
        from kvrelay.executors.torch.attention.cpu import CpuAttention

        return CpuAttention(spec, pool, dtype, num_threads)
    from kvrelay.executors.torch.attention.torch_ref import TorchAttention

    return TorchAttention(spec, pool)
