"""The decoder of one rank: its stage's layers, its share of the vocabulary, and what passes between stages.

first stage    token ids ──embed──> residual           (each rank looks up its own tokens; the sum is the embedding)
every stage    residual ──layers──> residual ──send──> the next stage, float32 [T, hidden]
last stage     residual ──layers, final norm──> hidden ──head──> logits, gathered on the stage's first rank
"""

from __future__ import annotations

import torch

from kvrelay.executors.torch.attention.base import Attention
from kvrelay.executors.torch.kernels.base import Kernels, Linear
from kvrelay.executors.torch.models.decoder import Decoder, DecoderLayer
from kvrelay.executors.torch.parallel.groups import Groups


class StageDecoder(Decoder):
    """``embedding`` (first stage) and ``head`` (last stage) cover the rank's tokens, from ``first_token`` on.
    ``final_norm`` of other stages than the last only fills a place."""

    def __init__(
        self,
        kernels: Kernels,
        embedding: torch.Tensor,
        layers: tuple[DecoderLayer, ...],
        final_norm: torch.Tensor,
        head: Linear,
        norm_eps: float,
        *,
        groups: Groups,
        hidden: int,
        vocab_size: int,
        first_token: int,
    ) -> None:
        super().__init__(kernels, embedding, layers, final_norm, head, norm_eps)
        self._groups = groups
        self._hidden = hidden
        self._vocab_size = vocab_size
        self._first_token = first_token

    def forward(self, token_ids: torch.Tensor, attention: Attention, rows: torch.Tensor | None) -> torch.Tensor:
        """As ``Decoder.forward`` on the last stage; on others an empty tensor, and the residual goes to the next."""
        rank, groups = self._groups.rank, self._groups
        residual = self._embed(token_ids) if rank.is_first_stage else groups.receive(len(token_ids), self._hidden)
        if rank.is_last_stage:
            return self._through_layers(residual, attention, rows)
        self._through_layers(residual, attention, None)
        # The kernels use the first stage's memory again for the next micro-batch.
        groups.send(residual.clone() if rank.is_first_stage else residual)
        return residual[:0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As ``Decoder.logits`` on the stage's first rank; on the others the rank's own columns."""
        return self._groups.gather_columns(self._head(hidden), self._vocab_size)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._groups.rank.tp_size == 1:
            return self._kernels.embed(self._embedding, token_ids)
        own = token_ids - self._first_token
        is_foreign = (own < 0) | (own >= len(self._embedding))
        residual = self._kernels.embed(self._embedding, own.masked_fill_(is_foreign, 0))
        return self._groups.all_reduce(residual.masked_fill_(is_foreign[:, None], 0.0))
