"""The cost of a request at each worker, in seconds; pure functions of the candidates' columns.

    cost        = first token + lost prefix + decode
    first token = prefill_token * (pending + own)
    lost prefix = prefill_token * own * (LOST_PREFIX + BALANCE * recent)
    decode      = L * B * (decode + context * (prompt + L / 2))

``own`` are the prompt's tokens beyond the overlap, ``B`` the requests at the worker, ``L`` the expected tokens of the
answer. *decode* is what the request's answer adds to the steps of the ``B`` others. Its own steps do not count: on
equal workers they differ by errors of the fit only, which must not outweigh a prefix. *lost prefix* is the later cost
of a prefix that is computed and stored a second time: it takes the place of another one. A token that waits costs this
request time; a token that is computed twice costs this much more. The factor was found by replaying traces.
``docs/routing.md`` explains the terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvrelay.router.costs import CostColumns
from kvrelay.router.load import FloatColumn, LoadColumns

LOST_PREFIX = 3.0 / 7.0
BALANCE = 0.02 * (1.0 + LOST_PREFIX)


@dataclass(frozen=True, slots=True)
class Seconds:
    """One entry a worker."""

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
    """What an answer of ``num_output`` tokens adds to the steps of the others."""
    added = costs.decode_s + costs.context_s * (prompt_tokens + num_output / 2)
    seconds: FloatColumn = num_output * load.num_requests * added
    return seconds
