"""From a checkpoint to a decoder: which Hugging Face tensors become which fused parameter.

Owns the names and shapes of every supported family. Query, key and value are one matrix, gate and up another, so that a
layer takes four products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrelay.errors import CheckpointError
from kvrelay.executors.torch.config import ModelConfig, MoeConfig
from kvrelay.executors.torch.kernels.base import Kernels, Linear
from kvrelay.executors.torch.models.decoder import (
    Decoder,
    DecoderLayer,
    DenseFeedForward,
    FeedForward,
    SparseFeedForward,
)
from kvrelay.executors.torch.weights import Checkpoint

_LM_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The decoder, and the norms of queries and keys (by layer, None where the family has none) for attention."""

    decoder: Decoder
    q_norms: tuple[torch.Tensor | None, ...]
    k_norms: tuple[torch.Tensor | None, ...]


def load_model(config: ModelConfig, checkpoint: Checkpoint, kernels: Kernels, device: torch.device) -> LoadedModel:
    """Read every tensor of the model to ``device``. Raises CheckpointError for missing, misshapen or surplus ones."""
    return _Loader(config, checkpoint, kernels, device).load()


class _Loader:
    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, kernels: Kernels, device: torch.device) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._kernels = kernels
        self._device = device

    def load(self) -> LoadedModel:
        config = self._config
        embedding = self._read(_EMBEDDING, config.vocab_size, config.hidden)
        if config.tied_embeddings or _LM_HEAD not in self._checkpoint:
            if not config.tied_embeddings:
                raise CheckpointError("the checkpoint has no tensor lm_head.weight and its embeddings are not tied")
            self._checkpoint.ignore(_LM_HEAD)
            head_weight = embedding
        else:
            head_weight = self._read(_LM_HEAD, config.vocab_size, config.hidden)
        layers = tuple(self._layer(i) for i in range(config.num_layers))
        norms = [self._qk_norms(i) for i in range(config.num_layers)]
        decoder = Decoder(
            self._kernels,
            embedding,
            layers,
            self._norm("model.norm.weight", config.hidden),
            self._kernels.linear(head_weight),
            config.norm_eps,
        )
        self._checkpoint.finish()
        return LoadedModel(decoder, tuple(q for q, _ in norms), tuple(k for _, k in norms))

    def _layer(self, index: int) -> DecoderLayer:
        config, prefix = self._config, f"model.layers.{index}."
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention = prefix + "self_attn."
        parts = [("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)]
        return DecoderLayer(
            input_norm=self._norm(prefix + "input_layernorm.weight", config.hidden),
            qkv=self._fused(attention, parts, config.hidden, config.qkv_bias),
            output=self._fused(attention, [("o_proj", config.hidden)], width, config.output_bias),
            post_norm=self._norm(prefix + "post_attention_layernorm.weight", config.hidden),
            feed_forward=self._feed_forward(index, prefix),
        )

    def _feed_forward(self, index: int, prefix: str) -> FeedForward:
        config = self._config
        if config.moe is None or not config.sparse[index]:
            names = ("gate_proj", "up_proj", "down_proj")
            return self._dense(prefix + "mlp.", names, config.intermediate, config.mlp_bias)
        if config.family == "mixtral":
            return self._experts(prefix + "block_sparse_moe.", ("w1", "w3", "w2"), config.moe)
        return self._experts(prefix + "mlp.", ("gate_proj", "up_proj", "down_proj"), config.moe)

    def _experts(self, prefix: str, names: tuple[str, str, str], moe: MoeConfig) -> SparseFeedForward:
        return SparseFeedForward(
            self._fused(prefix, [("gate", moe.num_experts)], self._config.hidden, bias=False),
            tuple(
                self._dense(f"{prefix}experts.{i}.", names, moe.intermediate, bias=False)
                for i in range(moe.num_experts)
            ),
            moe.top_k,
            moe.normalize,
        )

    def _dense(self, prefix: str, names: tuple[str, str, str], intermediate: int, bias: bool) -> DenseFeedForward:
        gate, up, down = names
        hidden = self._config.hidden
        return DenseFeedForward(
            self._fused(prefix, [(gate, intermediate), (up, intermediate)], hidden, bias),
            self._fused(prefix, [(down, hidden)], intermediate, bias),
        )

    def _fused(self, prefix: str, parts: list[tuple[str, int]], inputs: int, bias: bool) -> Linear:
        """One product for several projections of the same input; ``parts`` are names and numbers of outputs."""
        names = [prefix + name for name, _ in parts]
        weight = self._checkpoint.stack([f"{n}.weight" for n in names], [(rows, inputs) for _, rows in parts])
        offset = None
        if bias:
            offset = self._checkpoint.stack([f"{n}.bias" for n in names], [(rows,) for _, rows in parts])
            offset = offset.to(self._device)
        return self._kernels.linear(weight.to(self._device), offset)

    def _qk_norms(self, index: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not self._config.qk_norm:
            return None, None
        prefix, width = f"model.layers.{index}.self_attn.", self._config.head_dim
        return self._norm(prefix + "q_norm.weight", width), self._norm(prefix + "k_norm.weight", width)

    def _norm(self, name: str, width: int) -> torch.Tensor:
        return self._kernels.norm_weight(self._read(name, width))

    def _read(self, name: str, *shape: int) -> torch.Tensor:
        return self._checkpoint.read(name, shape).to(self._device)
