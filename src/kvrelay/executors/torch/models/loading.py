"""From a checkpoint to a decoder: which Hugging Face tensors become which fused parameter.

Owns the names and shapes of every supported family. Query, key and value are one matrix, gate and up another, so that a
layer takes four products. Of a model that is distributed over ranks it reads only its rank's share.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
import torch

from kvrelay.errors import CheckpointError
from kvrelay.executors.torch.config import ModelConfig, MoeConfig
from kvrelay.executors.torch.kernels.base import Kernels, Linear
from kvrelay.executors.torch.models.decoder import (
    Decoder,
    DecoderLayer,
    DenseFeedForward,
    FeedForward,
    ReducedFeedForward,
    SparseFeedForward,
)
from kvrelay.executors.torch.parallel.rank import ParallelRank
from kvrelay.executors.torch.weights import Checkpoint, Cut

if TYPE_CHECKING:
    from kvrelay.executors.torch.parallel.collectives import Groups
    from kvrelay.executors.torch.parallel.experts import ExpertGroup

_log = logging.getLogger(__name__)

_LM_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


class LoadedModel(msgspec.Struct, frozen=True):
    """The decoder, and the norms of queries and keys (by layer, None where the family has none) for attention."""

    decoder: Decoder
    q_norms: tuple[torch.Tensor | None, ...]
    k_norms: tuple[torch.Tensor | None, ...]


def load_model(
    config: ModelConfig,
    checkpoint: Checkpoint,
    kernels: Kernels,
    device: torch.device,
    rank: ParallelRank | None = None,
    groups: Groups | None = None,
    experts: ExpertGroup | None = None,
) -> LoadedModel:
    """Read the tensors of the model to ``device``: all of them, or with ``groups`` the share of ``rank``. ``experts``:
    each rank of it holds whole experts.

    Raises CheckpointError for missing, misshapen or surplus tensors.
    """
    return _Loader(config, checkpoint, kernels, device, rank or ParallelRank(), groups, experts).load()


class _Loader(msgspec.Struct, frozen=True):
    _config: ModelConfig
    _checkpoint: Checkpoint
    _kernels: Kernels
    _device: torch.device
    _rank: ParallelRank
    _groups: Groups | None
    _expert_group: ExpertGroup | None

    def load(self) -> LoadedModel:
        config, own = self._config, self._rank.layers(self._config.num_layers)
        embedding, head_weight = self._vocabulary()
        for i in range(config.num_layers):
            if i not in own:
                self._checkpoint.ignore_under(f"model.layers.{i}.")
        layers = tuple(self._layer(i) for i in own)
        norms = [self._qk_norms(i) for i in own]
        final_norm = self._norm("model.norm.weight", config.hidden)
        parts = (self._kernels, embedding, layers, final_norm, self._kernels.head(head_weight), config.norm_eps)
        if self._groups is None:
            decoder = Decoder(*parts)
        else:
            from kvrelay.executors.torch.parallel.stage import StageDecoder

            first_token = self._rank.vocabulary(config.vocab_size).start
            decoder = StageDecoder(*parts, self._groups, config.hidden, config.vocab_size, first_token)
        self._checkpoint.finish()
        return LoadedModel(decoder, tuple(q for q, _ in norms), tuple(k for _, k in norms))

    def _vocabulary(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding and head, both for this rank's tokens; a tensor without rows on stages that do not need one."""
        config, rank = self._config, self._rank
        own, shape = Cut(0, rank.vocabulary(config.vocab_size)), (config.vocab_size, config.hidden)
        nothing = torch.zeros((1, config.hidden), dtype=self._checkpoint.dtype)
        has_head = _LM_HEAD in self._checkpoint
        if not has_head and not config.tied_embeddings:
            raise CheckpointError("the checkpoint has no tensor lm_head.weight and its embeddings are not tied")
        self._checkpoint.ignore(_EMBEDDING)
        self._checkpoint.ignore(_LM_HEAD)
        embedding = head = nothing
        if rank.is_first_stage or (not has_head and rank.is_last_stage):
            embedding = self._checkpoint.read(_EMBEDDING, shape, own).to(self._device)
        if rank.is_last_stage:
            head = self._checkpoint.read(_LM_HEAD, shape, own).to(self._device) if has_head else embedding
        if config.tied_embeddings and rank.is_first_stage and rank.is_last_stage and head is not embedding:
            # As in transformers, which ties only what is equal.
            if torch.equal(head, embedding):
                head = embedding
            else:
                _log.warning("using lm_head.weight: it is not the embedding, although tie_word_embeddings is true")
        return embedding, head

    def _layer(self, index: int) -> DecoderLayer:
        config, rank, prefix = self._config, self._rank, f"model.layers.{index}."
        head_dim, attention = config.head_dim, prefix + "self_attn."
        heads, kv_heads = rank.share(config.num_heads), rank.kv_heads(config.num_kv_heads)
        width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim
        parts = [
            (name, outputs, slice(own.start * head_dim, own.stop * head_dim))
            for name, outputs, own in (
                ("q_proj", width, heads),
                ("k_proj", kv_width, kv_heads),
                ("v_proj", kv_width, kv_heads),
            )
        ]
        return DecoderLayer(
            input_norm=self._norm(prefix + "input_layernorm.weight", config.hidden),
            qkv=self._moving(self._fused(attention, parts, config.hidden, config.qkv_bias)),
            output=self._reduced(
                self._row_parallel(attention + "o_proj", width, rank.share(width), config.output_bias)
            ),
            post_norm=self._norm(prefix + "post_attention_layernorm.weight", config.hidden),
            feed_forward=self._feed_forward(index, prefix),
        )

    def _feed_forward(self, index: int, prefix: str) -> FeedForward:
        config, place, names = self._config, prefix + "mlp.", ("gate_proj", "up_proj", "down_proj")
        if config.moe is None or not config.sparse[index]:
            dense = self._dense(place, names, config.intermediate, config.mlp_bias)
            return DenseFeedForward(dense.gate_up, self._reduced(dense.down))
        if config.family == "mixtral":
            place, names = prefix + "block_sparse_moe.", ("w1", "w3", "w2")
        if self._groups is not None and self._expert_group is not None:
            return self._spread_experts(place, names, config.moe, self._groups, self._expert_group)
        moe = config.moe
        prefixes = [f"{place}experts.{i}." for i in range(moe.num_experts)]
        experts = tuple(self._dense(prefix, names, moe.intermediate, bias=False) for prefix in prefixes)
        sparse = SparseFeedForward(self._router(place, moe), experts, moe.top_k, moe.normalize)
        # Each rank has a share of every expert, so one sum over the ranks is enough.
        return sparse if self._groups is None else ReducedFeedForward(sparse, self._groups.all_reduce)

    def _spread_experts(
        self, prefix: str, names: tuple[str, str, str], moe: MoeConfig, groups: Groups, exchange: ExpertGroup
    ) -> FeedForward:
        """Whole experts, those of this rank."""
        from kvrelay.executors.torch.parallel.experts import SpreadFeedForward

        own = exchange.seat.experts(moe.num_experts)
        for i in range(moe.num_experts):
            if i not in own:
                self._checkpoint.ignore_under(f"{prefix}experts.{i}.")
        whole = slice(0, moe.intermediate)
        experts = tuple(self._dense(f"{prefix}experts.{i}.", names, moe.intermediate, False, whole) for i in own)
        return SpreadFeedForward(self._router(prefix, moe), experts, moe.top_k, moe.normalize, groups, exchange)

    def _router(self, prefix: str, moe: MoeConfig) -> Linear:
        return self._fused(prefix, [("gate", moe.num_experts, slice(0, moe.num_experts))], self._config.hidden, False)

    def _dense(
        self, prefix: str, names: tuple[str, str, str], intermediate: int, bias: bool, own: slice | None = None
    ) -> DenseFeedForward:
        """This rank's columns, or ``own``; ``down`` computes a part of the sum over the ranks."""
        gate, up, down = names
        own = own or self._rank.share(intermediate)
        return DenseFeedForward(
            self._fused(prefix, [(gate, intermediate, own), (up, intermediate, own)], self._config.hidden, bias),
            self._row_parallel(prefix + down, intermediate, own, bias),
        )

    def _fused(self, prefix: str, parts: list[tuple[str, int, slice]], inputs: int, bias: bool) -> Linear:
        """One product for several projections of the same input; ``parts`` are names, numbers of outputs, and this
        rank's outputs."""
        names, cuts = [prefix + name for name, _, _ in parts], [Cut(0, own) for _, _, own in parts]
        weight = self._checkpoint.stack(
            [f"{n}.weight" for n in names], [(outputs, inputs) for _, outputs, _ in parts], cuts
        )
        offset = None
        if bias:
            offset = self._checkpoint.stack([f"{n}.bias" for n in names], [(outputs,) for _, outputs, _ in parts], cuts)
            offset = offset.to(self._device)
        return self._kernels.linear(weight.to(self._device), offset)

    def _row_parallel(self, name: str, inputs: int, own: slice, bias: bool) -> Linear:
        """A product of this rank's ``own`` inputs back to the hidden size. Only one rank adds the bias."""
        hidden = self._config.hidden
        weight = self._checkpoint.stack([f"{name}.weight"], [(hidden, inputs)], [Cut(1, own)])
        offset = self._checkpoint.stack([f"{name}.bias"], [(hidden,)]).to(self._device) if bias else None
        return self._kernels.linear(weight.to(self._device), offset if self._rank.tp_rank == 0 else None)

    def _reduced(self, linear: Linear) -> Linear:
        groups = self._groups
        return linear if groups is None else lambda x: groups.all_reduce(linear(x))

    def _moving(self, linear: Linear) -> Linear:
        """Report each layer as progress."""
        groups = self._groups
        return linear if groups is None else groups.moving(linear)

    def _qk_norms(self, index: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not self._config.qk_norm:
            return None, None
        prefix, width = f"model.layers.{index}.self_attn.", self._config.head_dim
        return self._norm(prefix + "q_norm.weight", width), self._norm(prefix + "k_norm.weight", width)

    def _norm(self, name: str, width: int) -> torch.Tensor:
        return self._kernels.norm_weight(self._checkpoint.read(name, (width,)).to(self._device))
