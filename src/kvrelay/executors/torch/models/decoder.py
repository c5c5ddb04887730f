"""A decoder-only transformer: embedding, layers of attention and feed-forward, final norm, output head.

One class covers Llama, Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE: they differ in data (biases, norms, windows,
experts), not in structure. Knows neither files nor the batch: attention is an object that the caller has begun, the
pieces between the matrix products come from ``Kernels``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

import msgspec
import torch

from kvrelay.executors.torch.attention.base import Attention
from kvrelay.executors.torch.kernels.base import Kernels, Linear


class DenseFeedForward(msgspec.Struct, frozen=True):
    """down(silu(gate(x)) * up(x)), gate and up fused."""

    is_collective: ClassVar = False
    gate_up: Linear
    down: Linear

    def forward(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        return self.down(kernels.silu_mul(self.gate_up(x)))


class SparseFeedForward(msgspec.Struct, frozen=True):
    """Mixture of experts: each token's ``top_k`` experts by router probability, weighted by it."""

    is_collective: ClassVar = False
    router: Linear
    experts: tuple[DenseFeedForward, ...]
    top_k: int
    normalize: bool

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights and the numbers of each token's experts, [T, top_k]."""
        weights, chosen = torch.softmax(self.router(x).float(), dim=-1).topk(self.top_k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True) if self.normalize else weights, chosen

    def forward(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        weights, chosen = self.route(x)
        # Rows sorted by expert, so that each expert computes its rows at once.
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        tokens = order // self.top_k
        shares = weights.flatten()[order]
        # One row per (token, choice), summed at the end in the order of choice: a token's result must not depend on
        # which other tokens use the same experts.
        parts = torch.empty(len(order), x.shape[1], dtype=torch.float32, device=x.device)
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                rows = slice(start, start + count)
                out = expert.forward(x[tokens[rows]], kernels)
                parts[order[rows]] = out.float() * shares[rows, None]
                start += count
        return parts.view(len(x), self.top_k, -1).sum(dim=1).to(x.dtype)


class ReducedFeedForward(msgspec.Struct, frozen=True):
    """The sum of the results of every rank's part of ``inner``."""

    is_collective: ClassVar = False
    inner: SparseFeedForward
    all_reduce: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        return self.all_reduce(self.inner.forward(x, kernels))


class FeedForward(Protocol):
    @property
    def is_collective(self) -> bool:
        """Whether other data-parallel ranks wait in ``forward``, also for one that has no tokens."""

    def forward(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor: ...


class DecoderLayer(msgspec.Struct, frozen=True):
    input_norm: torch.Tensor
    qkv: Linear
    output: Linear
    post_norm: torch.Tensor
    feed_forward: FeedForward


class Decoder(msgspec.Struct, frozen=True, eq=False):
    """Layers with their weights. ``forward`` returns hidden states, ``logits`` the scores of the vocabulary."""

    _kernels: Kernels
    _embedding: torch.Tensor
    _layers: tuple[DecoderLayer, ...]
    _final_norm: torch.Tensor
    _head: Linear
    _eps: float

    def forward(self, token_ids: torch.Tensor, attention: Attention, rows: torch.Tensor | None) -> torch.Tensor:
        """Normalised hidden states [R, hidden] of the tokens ``rows`` (None: of all) of a step of T tokens.

        The last layer attends and goes on only for ``rows``: no caller uses the other results.
        """
        return self._through_layers(self._kernels.embed(self._embedding, token_ids), attention, rows)

    def take_part(self) -> None:
        """A forward pass without tokens: what other ranks wait for happens, nothing is computed for this one."""
        device = self._layers[0].input_norm.device
        x = torch.empty(0, self._embedding.shape[1], dtype=self._embedding.dtype, device=device)
        for layer in self._layers:
            if layer.feed_forward.is_collective:
                layer.feed_forward.forward(x, self._kernels)

    def _through_layers(self, residual: torch.Tensor, attention: Attention, rows: torch.Tensor | None) -> torch.Tensor:
        """The result of ``forward`` for embedded tokens; ``residual`` is changed in place unless ``rows`` cut it."""
        kernels, eps = self._kernels, self._eps
        x = kernels.rms_norm(residual, self._layers[0].input_norm, eps)
        last = len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            attended = attention.forward(i, layer.qkv(x), rows if i == last else None)
            if i == last and rows is not None:
                attended, residual = attended[rows], residual[rows]
            x = kernels.add_rms_norm(residual, layer.output(attended), layer.post_norm, eps)
            next_norm = self._final_norm if i == last else self._layers[i + 1].input_norm
            x = kernels.add_rms_norm(residual, layer.feed_forward.forward(x, kernels), next_norm, eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores [R, vocab] in float32, for hidden states from ``forward``."""
        return self._head(hidden)
