"""The choice of a pair (P, D) for prefill-first: a pure function of both halves' numbers; the lowest cost wins.

    cost(P, D) = prefill(P) + decode(D) + transfer(P, D)

In seconds, if the costs of both halves are known, with the terms of ``seconds.py``:

    prefill(P)     first token + load + lost prefix at P
    decode(D)      decode at D + prefill_token at D * what the prompt needs beyond D's free blocks
    transfer(P, D) (prompt - overlap at D) * the measured time of a token between P and D; before it is known,
                   prefill_token at P * 0.02 within a host, * 0.1 between hosts

By weights, in tokens of prefill:

    prefill(P)     0.7 * pending + (prompt - overlap at P) * (1 + 0.02 * recent)         as the kv policy has it
    decode(D)      decode_weight * context in flight + what the prompt needs beyond D's free blocks
    transfer(P, D) (prompt - overlap at D) * 0.02 within a host, * 0.1 between hosts

KV for which D has no room waits at P and holds P's blocks, so a missing token costs as much as one to prefill. The
weights of the transfer say how many tokens are prefilled while one is moved; they are estimates, not measurements. A
measured time counts as 100 times that estimate at most: it may have been taken while a peer stood still.

Whether a pair serves the request at all, or one decode worker alone, ``ways.py`` says.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvrelay.placement.seconds import (
    BALANCE_WEIGHT,
    PENDING_WEIGHT,
    Candidates,
    FloatColumn,
    decode_seconds,
    own_tokens,
    prefill_seconds,
)

SAME_HOST_WEIGHT = 0.02
OTHER_HOST_WEIGHT = 0.1
MAX_TRANSFER_RATIO = 100.0

BoolMatrix = npt.NDArray[np.bool_]
FloatMatrix = npt.NDArray[np.float64]


class PairCosts(msgspec.Struct, frozen=True):
    """``prefill`` [P], ``decode`` [D], ``transfer`` [P, D]; infinite where a worker or a pair cannot be chosen.
    ``unit``: ``s``, or ``tokens`` of prefill."""

    prefill: FloatColumn
    decode: FloatColumn
    transfer: FloatMatrix
    unit: str
    is_measured: BoolMatrix | None = None
    """[P, D]: whether the transfer's time has been measured. None: nowhere."""

    @property
    def total(self) -> FloatMatrix:
        total: FloatMatrix = self.prefill[:, None] + self.decode[None, :] + self.transfer
        return total


def pair_costs(
    prefill: Candidates,
    decode: Candidates,
    free_tokens: FloatColumn,
    is_same_host: BoolMatrix,
    can_exchange: BoolMatrix,
    decode_weight: float,
) -> PairCosts:
    """By weights. ``free_tokens`` [D]: room in each KV pool of the decode side; ``is_same_host`` and ``can_exchange``
    [P, D]."""
    own, missing = own_tokens_of(prefill), own_tokens_of(decode)
    weight = np.where(is_same_host, SAME_HOST_WEIGHT, OTHER_HOST_WEIGHT)
    return PairCosts(
        prefill=PENDING_WEIGHT * prefill.load.prefill_tokens + own * (1.0 + BALANCE_WEIGHT * prefill.load.recent_share),
        decode=decode_weight * decode.load.context_tokens + np.maximum(missing - free_tokens, 0.0),
        transfer=np.where(can_exchange, weight * missing[None, :], np.inf),
        unit="tokens",
    )


def pair_seconds(
    prefill: Candidates,
    decode: Candidates,
    free_tokens: FloatColumn,
    is_same_host: BoolMatrix,
    can_exchange: BoolMatrix,
    transfer_token_s: FloatMatrix | None = None,
) -> PairCosts | None:
    """In seconds, the arguments as above; None unless the costs of both halves are known. ``transfer_token_s`` [P, D]:
    measured, NaN where it is not known."""
    if prefill.costs is None or decode.costs is None:
        return None
    own, missing = own_tokens_of(prefill), own_tokens_of(decode)
    weight = np.where(is_same_host, SAME_HOST_WEIGHT, OTHER_HOST_WEIGHT) * prefill.costs.prefill_token_s[:, None]
    is_measured = None
    if transfer_token_s is not None:
        is_measured = np.isfinite(transfer_token_s)
        weight = np.where(is_measured, np.minimum(transfer_token_s, weight * MAX_TRANSFER_RATIO), weight)
    first_token, lost_prefix = prefill_seconds(own, prefill.load, prefill.costs, prefill.loads)
    load_s = 0.0 if prefill.loads is None else prefill.loads.seconds
    waiting = decode.costs.prefill_token_s * np.maximum(missing - free_tokens, 0.0)
    return PairCosts(
        prefill=first_token + load_s + lost_prefix,
        decode=decode_seconds(decode.prompt_tokens, decode.num_output, decode.load, decode.costs) + waiting,
        transfer=np.where(can_exchange, weight * missing[None, :], np.inf),
        unit="s",
        is_measured=is_measured,
    )


def own_tokens_of(half: Candidates) -> FloatColumn:
    """Tokens that the workers of this half lack."""
    return own_tokens(half.prompt_tokens, half.block_size * half.overlap_blocks)
