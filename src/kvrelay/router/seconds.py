"""The cost of a request at each worker, in seconds; pure functions of the candidates' columns.

    cost        = first token + lost prefix + HARM * decode
    first token = prefill_token * (pending + own)
    lost prefix = prefill_token * own * (LOST_PREFIX + BALANCE * recent)
    decode      = L * (step + context * (C + B * (prompt + L / 2)) + decode * 2 * B)

``own`` are the prompt's tokens beyond the overlap, ``B`` the requests at the worker, ``C`` their tokens of context,
``L`` the expected tokens of the answer. *decode* is the time of the request's own steps, and what it adds to the steps
of the ``B`` others; HARM weighs it as ``handoff.placement`` weighs a delay of running answers. *lost prefix* is the
later cost of a prefix that is computed and stored a second time: it takes the place of another one. A token that waits
costs this request time; a token that is computed twice costs this much more. The factor was found by replaying traces.
``docs/routing.md`` explains the terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvrelay.handoff.placement import HARM
from kvrelay.router.costs import CostColumns
from kvrelay.router.load import FloatColumn, LoadColumns

LOST_PREFIX = 3.0 / 7.0
BALANCE = 0.02 * (1.0 + LOST_PREFIX)


@dataclass(frozen=True, slots=True)
class Seconds:
    """One entry a worker. ``decode`` is weighed already."""

    first_token: FloatColumn
    lost_prefix: FloatColumn
    decode: FloatColumn

    @property
    def total(self) -> FloatColumn:
        total: FloatColumn = self.first_token + self.lost_prefix + self.decode
        return total


def own_tokens(prompt_tokens: int, overlap_tokens: FloatColumn) -> FloatColumn:
    """Tokens to compute at each worker, zero or above."""
    own: FloatColumn = np.maximum(prompt_tokens - overlap_tokens, 0.0)
    return own


def prefill_seconds(own: FloatColumn, load: LoadColumns, costs: CostColumns) -> tuple[FloatColumn, FloatColumn]:
    """The time to the first token, and the later cost of the lost prefix."""
    first_token = costs.prefill_token_s * (load.prefill_tokens + own)
    lost_prefix = costs.prefill_token_s * own * (LOST_PREFIX + BALANCE * load.recent_share)
    return first_token, lost_prefix


def decode_seconds(prompt_tokens: int, num_output: float, load: LoadColumns, costs: CostColumns) -> FloatColumn:
    """The weighed time of an answer of ``num_output`` tokens and of what it adds to the others."""
    others = load.num_requests
    context = load.context_tokens + others * (prompt_tokens + num_output / 2)
    step = costs.step_s + costs.context_s * context + costs.decode_s * (2.0 * others)
    weighed: FloatColumn = (HARM * num_output) * step
    return weighed
