"""What the workers' steps cost, as they publish it: one column per coefficient, in the row order of a decision.

It owns the last sound costs of each worker and their age. A decision needs a cost of every candidate. So a worker
without fresh costs counts with the median of the others, and no worker's cost differs more from the median than
``MAX_RATIO``: a worker that publishes nonsense can neither attract all requests nor repel them for good. If no worker
has fresh costs, there are no columns, and the policy decides without.

``TransferTimes`` holds the measured time of moving one token's KV between two workers, with its age. If nothing is
known of a pair, it has none, and ``placement/pair_cost.py`` estimates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvrelay.core.clock import Clock
from kvrelay.core.events import TransferCost
from kvrelay.core.step_cost import StepCost
from kvrelay.placement.seconds import CostColumns

MAX_RATIO = 10.0
KEEP_S = 600.0
"""A worker repeats its costs while it lives; a pair that has moved nothing for long says nothing new."""
REFRESH_S = 0.1
"""Columns are at most this much older than the samples."""


class WorkerCosts:
    """The costs of the registered workers. A cost older than ``stale_after_s`` does not count."""

    def __init__(self, clock: Clock, stale_after_s: float) -> None:
        self._clock = clock
        self._stale_after_s = stale_after_s
        self._known: dict[str, tuple[StepCost, float]] = {}
        self._columns: CostColumns | None = None
        self._built_s = -math.inf

    def __repr__(self) -> str:
        return f"WorkerCosts({len(self._known)} known)"

    def heard(self, worker_id: str, cost: StepCost | None) -> None:
        """The worker has published ``cost``; None and impossible ones say nothing."""
        if cost is not None and cost.is_sound:
            if worker_id not in self._known:
                self.changed()
            self._known[worker_id] = (cost, self._clock.now())

    def forget(self, worker_id: str) -> None:
        self._known.pop(worker_id, None)
        self.changed()

    def changed(self) -> None:
        """The rows of a decision have changed."""
        self._built_s = -math.inf

    def columns(self, worker_ids: Sequence[str]) -> CostColumns | None:
        """The columns for these workers in this order, the same since ``changed``; None if no fresh costs are known."""
        now_s = self._clock.now()
        if now_s - self._built_s >= REFRESH_S:
            self._columns, self._built_s = self._build(worker_ids, now_s), now_s
        return self._columns

    def _build(self, ids: Sequence[str], now_s: float) -> CostColumns | None:
        oldest_s = now_s - self._stale_after_s
        found = [(at, *self._known[name]) for at, name in enumerate(ids) if name in self._known]
        fresh = [(at, cost) for at, cost, heard_s in found if heard_s >= oldest_s]
        if not fresh:
            return None
        known = np.array([msgspec.structs.astuple(cost) for _, cost in fresh], dtype=np.float64)
        median = _median(known)
        values = np.tile(median, (len(ids), 1))
        values[[at for at, _ in fresh]] = known.clip(median / MAX_RATIO, median * MAX_RATIO)
        return CostColumns(*np.ascontiguousarray(values.T))


def _median(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of each column. For a few rows np.median takes ten times as long."""
    ordered = np.sort(rows, axis=0)
    middle: npt.NDArray[np.float64] = (ordered[(len(rows) - 1) // 2] + ordered[len(rows) // 2]) / 2
    return middle


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
