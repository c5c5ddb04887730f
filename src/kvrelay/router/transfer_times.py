"""The measured time of moving one token's KV between two workers, as the workers publish it.

It owns the last figures and their age. If nothing is known of a pair, it has none, and ``pair_cost.py`` estimates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvrelay.core.clock import Clock
from kvrelay.core.events import TransferCost

KEEP_S = 600.0
"""A worker repeats its costs while it lives; a pair that has moved nothing for long says nothing new."""


class TransferTimes:
    """Costs by the worker that published them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, tuple[tuple[TransferCost, ...], dict[str, float], float]] = {}

    def __repr__(self) -> str:
        return f"TransferTimes({len(self._known)} workers)"

    def heard(self, worker_id: str, costs: tuple[TransferCost, ...]) -> None:
        """The worker has published ``costs``. The age counts from their last change."""
        known = self._known.get(worker_id)
        if costs and (known is None or known[0] != costs):
            self._known[worker_id] = (costs, {cost.worker_id: cost.token_s for cost in costs}, self._clock.now())

    def forget(self, worker_id: str) -> None:
        self._known.pop(worker_id, None)

    def of(self, worker_id: str) -> dict[str, float]:
        """Seconds per token with each peer of ``worker_id``."""
        _, peers, heard_s = self._known.get(worker_id, ((), {}, 0.0))
        return peers if self._clock.now() - heard_s <= KEEP_S else {}


def pair_token_seconds(
    prefills: Sequence[str], decodes: Sequence[str], of_prefill: TransferTimes, of_decode: TransferTimes
) -> npt.NDArray[np.float64]:
    """[P, D]: what the prefill worker has measured, or else the decode worker (it reads, with pull); NaN if neither."""
    found = np.full((len(prefills), len(decodes)), np.nan)
    known = {name: peers for name in decodes if (peers := of_decode.of(name))}
    for row, prefill in enumerate(prefills):
        own = of_prefill.of(prefill)
        if own or known:
            for column, decode in enumerate(decodes):
                found[row, column] = own.get(decode, known.get(decode, {}).get(prefill, np.nan))
    return found
