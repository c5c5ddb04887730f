"""Log-probabilities of tokens, as an executor computes them and every answer format shows them."""

from __future__ import annotations

import msgspec


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token; ``rank`` is 1 for the likeliest."""

    token_id: int
    logprob: float
    rank: int


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The chosen token at one position and its likeliest alternatives, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()
