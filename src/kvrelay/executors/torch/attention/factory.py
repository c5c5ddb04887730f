"""Which attention implementation a configuration gets; heavy packages are imported only for the chosen one."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from kvrelay.errors import ConfigError
from kvrelay.executors.torch.attention.base import Attention, AttentionSpec


def choose_backend(requested: str, device: torch.device) -> str:
    """ "auto" resolved: Numba on the CPU, FlashInfer on CUDA if it is installed, else torch. Raises ConfigError."""
    if requested == "auto":
        if device.type == "cpu":
            return "cpu"
        return "flashinfer" if find_spec("flashinfer") is not None else "torch"
    if (requested == "cpu") != (device.type == "cpu") and requested != "torch":
        raise ConfigError(f"attention_backend {requested} does not run on {device.type}", param="attention_backend")
    if requested == "flashinfer" and find_spec("flashinfer") is None:
        raise ConfigError("attention_backend flashinfer is not installed: kvrelay[cuda]", param="attention_backend")
    return requested


def build_attention(
    backend: str, spec: AttentionSpec, pool: torch.Tensor, dtype: torch.dtype, num_threads: int
) -> Attention:
    """The implementation that ``choose_backend`` named."""
    if backend == "cpu":
        from kvrelay.executors.torch.attention.cpu import CpuAttention

        return CpuAttention(spec, pool, dtype, num_threads)
    if backend == "flashinfer":
        from kvrelay.executors.torch.attention.flashinfer import FlashInferAttention

        return FlashInferAttention(spec, pool, dtype)
    from kvrelay.executors.torch.attention.torch_ref import TorchAttention

    return TorchAttention(spec, pool)
