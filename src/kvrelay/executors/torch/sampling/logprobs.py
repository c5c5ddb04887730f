"""Log-probabilities for clients: of the raw logits, before temperature, penalties and filters."""

from __future__ import annotations

import torch

from kvrelay.core.logprobs import PositionLogprobs, TokenLogprob


def logprobs_of(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> list[PositionLogprobs]:
    """For each row of ``logits`` [R, vocab] the chosen token's log-probability, its rank, and the ``num_top`` best."""
    scores = torch.log_softmax(logits.float(), dim=-1)
    chosen = scores.gather(1, token_ids[:, None])
    ranks = (scores > chosen).sum(dim=-1).add_(1).tolist()
    top = scores.topk(min(num_top, scores.shape[-1]), dim=-1)
    values, indices = top.values.tolist(), top.indices.tolist()
    return [
        PositionLogprobs(
            TokenLogprob(token, value, rank),
            tuple(TokenLogprob(t, v, i + 1) for i, (t, v) in enumerate(zip(row_tokens, row_values))),
        )
        for token, value, rank, row_tokens, row_values in zip(
            token_ids.tolist(), chosen[:, 0].tolist(), ranks, indices, values
        )
    ]
