"""Contract of the pieces between a decoder's matrix products, so that models are written once.

``x`` is in the model's dtype, [T, hidden]; the residual stream is float32. Implementations may return buffers that the
next call of the same method overwrites, so a result must be used before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Linear = Callable[[torch.Tensor], torch.Tensor]


class Kernels(Protocol):
    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """x -> x @ weight.T + bias; ``weight`` [out, in] may be repacked; the caller must not use it any more."""

    def head(self, weight: torch.Tensor) -> Linear:
        """x -> x @ weight.T, summed and returned in float32 whatever ``x`` and ``weight`` are: rounded to bfloat16,
        different scores would be equal. ``weight`` as in ``linear``."""

    def norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight in the form that the norms take."""

    def embed(self, table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """The residual stream's start: rows of ``table`` as float32, in a new tensor."""

    def rms_norm(self, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual / rms(residual) * weight, in the model's dtype."""

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add ``delta`` to ``residual`` in place, then ``rms_norm``."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, of [T, 2 * width] with the gates first."""
