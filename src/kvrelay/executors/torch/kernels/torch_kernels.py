"""The contract in plain torch: the reference, and what runs on CUDA (where graphs hide the launches)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvrelay.executors.torch.kernels.base import Linear

# Rows of a head's weight that are widened at a time.
_OUTPUTS_AT_ONCE = 256


class TorchKernels:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return lambda x: F.linear(x, weight, bias)

    def head(self, weight: torch.Tensor) -> Linear:
        if weight.dtype == torch.float32:
            return self.linear(weight)
        if weight.is_cuda and torch.__version__ >= "2.8":  # others have no product whose result is of another type
            return lambda x: torch.mm(x, weight.t(), out_dtype=torch.float32)
        parts = torch.split(weight, _OUTPUTS_AT_ONCE)
        return lambda x: torch.cat([F.linear(x.float(), part.float()) for part in parts], dim=-1)

    def norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float()

    def embed(self, table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, table).float()

    def rms_norm(self, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(residual, (residual.shape[-1],), weight, eps).to(self._dtype)

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        residual += delta
        return self.rms_norm(residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate.float()).mul_(up).to(self._dtype)
