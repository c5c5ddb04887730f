"""The decoder of one rank: its stage's layers, its share of the vocabulary, and the exchange with other stages.

first stage    token ids ──embed──> residual           (each rank looks up its own tokens; the sum is the embedding)
every stage    residual ──layers──> residual ──send──> the next stage, float32 [T, hidden]
last stage     residual ──layers, final norm──> hidden ──head──> logits, gathered on the stage's first rank
"""

from __future__ import annotations

import torch

from kvrelay.executors.torch.attention.base import Attention
from kvrelay.executors.torch.models.decoder import Decoder
from kvrelay.executors.torch.parallel.collectives import Groups


class StageDecoder(Decoder, frozen=True, eq=False):
    """Embedding (first stage) and head (last stage) cover the rank's tokens, from the first of them on. Only the
    last stage uses the final norm."""

    _groups: Groups
    _hidden: int
    _vocab_size: int
    _first_token: int

    def forward(self, token_ids: torch.Tensor, attention: Attention, rows: torch.Tensor | None) -> torch.Tensor:
        """Like ``Decoder.forward`` on the last stage. Other stages send the residual to the next one and return an
        empty tensor."""
        rank, groups = self._groups.rank, self._groups
        residual = self._embed(token_ids) if rank.is_first_stage else groups.receive(len(token_ids), self._hidden)
        if rank.is_last_stage:
            return self._through_layers(residual, attention, rows)
        self._through_layers(residual, attention, None)
        # The kernels reuse the first stage's memory for the next micro-batch.
        groups.send(residual.clone() if rank.is_first_stage else residual)
        return residual[:0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Like ``Decoder.logits`` on the stage's first rank; other ranks return their own columns."""
        return self._groups.gather_columns(self._head(hidden), self._vocab_size)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._groups.rank.tp_size == 1:
            return self._kernels.embed(self._embedding, token_ids)
        own = token_ids - self._first_token
        is_foreign = (own < 0) | (own >= len(self._embedding))
        residual = self._kernels.embed(self._embedding, own.masked_fill_(is_foreign, 0))
        return self._groups.all_reduce(residual.masked_fill_(is_foreign[:, None], 0.0))
