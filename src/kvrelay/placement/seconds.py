"""The cost of a request at each worker, in seconds; pure functions of the candidates' columns.

    cost        = first token + load + lost prefix + decode
    first token = prefill_token * (pending + own)
    load        = what is got from a tier or another worker instead, if that is faster than computing it
    lost prefix = (prefill_token * own + load) * (LOST_PREFIX + BALANCE * recent)
    decode      = L / tokens_per_step * B * (decode + context * (prompt + L / 2))

``own`` are the prompt's tokens beyond the overlap and the load, ``B`` the requests at the worker, ``L`` the expected
tokens of the answer. *decode* is what the request's answer adds to the steps of the ``B`` others. Its own steps do not
count: on equal workers they differ by errors of the fit only, which must not outweigh a prefix. *lost prefix* is the
later cost of a prefix that is computed and stored a second time: it takes the place of another one. Recomputing a
cached token costs LOST_PREFIX times its prefill on top; the factor was found by replaying traces.
``docs/routing.md`` explains the terms.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvrelay.core.step_cost import StepCost

FloatColumn = npt.NDArray[np.float64]
BoolColumn = npt.NDArray[np.bool_]
Each = TypeVar("Each", float, FloatColumn)

PREFILL_COSTS = ("prefill_s", "prefill_token_s", "pair_s")
"""The coefficients of StepCost that only prefills measure."""
LOST_PREFIX = 3.0 / 7.0
BALANCE = 0.02 * (1.0 + LOST_PREFIX)
FEW = 16
"""Of so many workers Python's own arithmetic takes less time than NumPy's calls, above all where other work has emptied
the CPU's caches."""
# Weights are arrays of no dimension: a Python number would be converted anew in every operation with a column.
PENDING_WEIGHT = np.asarray(0.7)
BALANCE_WEIGHT = np.asarray(0.02)


class LoadColumns(msgspec.Struct, frozen=True):
    """One entry a worker, in row order. Counts are floats too (exact up to 2^53), so that formulas need no conversion.

    ``prefill_tokens``: placed by this router and not yet prefilled; ``context_tokens``: the router's effective load;
    ``num_requests``: at the worker, effective in the same way; ``recent_share``: tokens placed by this router in the
    last minutes, over those of the worker that got the most (0 to 1); ``cache_usage`` (share of the KV pool, 0 to 1)
    and ``num_waiting`` as published, 0 without a fresh sample. ``others_prefill_tokens``: of prompts that others have
    sent there, as published: not in ``prefill_tokens``.
    """

    prefill_tokens: FloatColumn
    context_tokens: FloatColumn
    recent_share: FloatColumn
    cache_usage: FloatColumn
    num_waiting: FloatColumn
    num_requests: FloatColumn
    others_prefill_tokens: FloatColumn


class CostColumns(msgspec.Struct, frozen=True):
    """One entry a worker: the coefficients of StepCost."""

    step_s: FloatColumn
    prefill_s: FloatColumn
    prefill_token_s: FloatColumn
    pair_s: FloatColumn
    decode_s: FloatColumn
    context_s: FloatColumn
    tokens_per_step: FloatColumn

    def of(self, row: int) -> StepCost:
        """One worker's."""
        return StepCost(*(float(column[row]) for column in msgspec.structs.astuple(self)))

    def hoped(self, rows: BoolColumn, *others: CostColumns) -> CostColumns:
        """With prefills in these ``rows`` as fast as at the fastest worker, here and among ``others``."""
        known = (self, *others)
        least = {name: min(float(getattr(one, name).min()) for one in known) for name in PREFILL_COSTS}
        return msgspec.structs.replace(
            self, **{name: np.where(rows, value, getattr(self, name)) for name, value in least.items()}
        )


class Loads(msgspec.Struct, frozen=True):
    """One entry a worker: so many tokens beyond its overlap could be loaded, in so many seconds."""

    tokens: FloatColumn
    seconds: FloatColumn

    def worth(self, costs: CostColumns) -> Loads:
        """Only those that take less time than computing."""
        is_worth = self.seconds < costs.prefill_token_s * self.tokens
        return Loads(np.where(is_worth, self.tokens, 0.0), np.where(is_worth, self.seconds, 0.0))

    def then(self, later: Loads) -> Loads:
        return Loads(self.tokens + later.tokens, self.seconds + later.seconds)


class Candidates(msgspec.Struct, frozen=True):
    """The columns of one decision. ``overlap_blocks`` are leading blocks of this prompt that the worker holds.

    ``costs``: of the workers' steps; None while none are known. ``num_output``: the expected tokens of the answer.
    ``loads``: what is worth loading, from tiers and from other workers; None: nothing anywhere.
    """

    prompt_tokens: int
    block_size: int
    overlap_blocks: FloatColumn
    load: LoadColumns
    costs: CostColumns | None = None
    num_output: float = 0.0
    loads: Loads | None = None

    def __len__(self) -> int:
        return len(self.overlap_blocks)


class Seconds(msgspec.Struct, frozen=True):
    """One entry a worker."""

    first_token: FloatColumn
    lost_prefix: FloatColumn
    decode: FloatColumn
    load: FloatColumn | None = None

    @property
    def total(self) -> FloatColumn:
        total: FloatColumn = self.first_token + self.lost_prefix + self.decode
        return total if self.load is None else total + self.load


def own_tokens(prompt_tokens: int, overlap_tokens: FloatColumn) -> FloatColumn:
    """Tokens to compute at each worker, zero or above."""
    own: FloatColumn = np.maximum(prompt_tokens - overlap_tokens, 0.0)
    return own


def prefill_seconds(
    own: FloatColumn, load: LoadColumns, costs: CostColumns, loads: Loads | None = None
) -> tuple[FloatColumn, FloatColumn]:
    """The time to the first token but for the loading, and the later cost of the lost prefix. What is loaded takes the
    place of another prefix too, which can be loaded again in its turn."""
    own_s = costs.prefill_token_s * (own if loads is None else np.maximum(own - loads.tokens, 0.0))
    first_token = costs.prefill_token_s * load.prefill_tokens + own_s
    stored_s = own_s if loads is None else own_s + loads.seconds
    return first_token, _lost_prefix(stored_s, load.recent_share)


def decode_seconds(prompt_tokens: int, num_output: float, load: LoadColumns, costs: CostColumns) -> FloatColumn:
    """What an answer of ``num_output`` tokens adds to the steps of the others."""
    context, num_steps = prompt_tokens + num_output / 2, num_output / costs.tokens_per_step
    return _decode(num_steps, context, load.num_requests, costs.decode_s, costs.context_s)


def totals_of_few(candidates: Candidates, costs: CostColumns, overlap_weight: float) -> list[float]:
    """``Seconds.total`` of candidates without loads, bit for bit: the same operations in the same order."""
    load, num_output = candidates.load, candidates.num_output
    per_block, context = overlap_weight * candidates.block_size, candidates.prompt_tokens + num_output / 2
    of_request = (candidates.overlap_blocks, load.prefill_tokens, load.recent_share, load.num_requests)
    of_worker = (costs.prefill_token_s, costs.decode_s, costs.context_s, costs.tokens_per_step)
    totals = []
    for overlap, pending, recent, requests, token_s, decode_s, context_s, per_step in zip(
        *[column.tolist() for column in of_request + of_worker]
    ):
        own_s = token_s * max(candidates.prompt_tokens - per_block * overlap, 0.0)
        added_s = _decode(num_output / per_step, context, requests, decode_s, context_s)
        totals.append(token_s * pending + own_s + _lost_prefix(own_s, recent) + added_s)
    return totals


# -- the terms, of one worker or of all -------------------------------------------------------------------------------


def _lost_prefix(stored_s: Each, recent_share: Each) -> Each:
    return stored_s * (LOST_PREFIX + BALANCE * recent_share)


def _decode(num_steps: Each, context: float, num_requests: Each, decode_s: Each, context_s: Each) -> Each:
    """``context``: tokens before the middle of the answer."""
    return num_steps * num_requests * (decode_s + context_s * context)
