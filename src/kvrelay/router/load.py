"""The load of the workers as this router sees it: what they publish, and what it has placed itself.

Published load is always late, so the router also counts, in tokens, every request that it has placed and not yet seen
finished. Both are columns (one row a worker), so that a decision over many workers is a handful of vector operations.
What it does not know: prefixes, policies. Load belongs to the placed requests, not to the registration: a worker that
leaves and comes back under the same id still carries what was placed there.

    effective load = max(own now, published + own now - own when the sample arrived)

The first term protects against a sample that was taken before our latest requests reached the worker, the second
counts what other frontends have placed. A sample older than ``stale_after_s`` is not believed any more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrelay.core.clock import Clock
from kvrelay.core.events import LoadMetrics

FloatColumn = npt.NDArray[np.float64]
IntColumn = npt.NDArray[np.int64]

STALE_AFTER_S = 5.0
RECENT_S = 60.0
"""After so long a placed token counts 1/e in what a worker has had of late."""
MAX_RECENT_GROWTH = 1e9
MAX_RECENT_EXPONENT = 500.0


@dataclass(slots=True)
class Placement:
    """A request on its way: ``prefill_tokens`` go with the first token, ``context_tokens`` stay to the end."""

    worker_id: str
    prefill_tokens: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class OwnLoad:
    """What this router has placed on one worker and not yet seen finished."""

    prefill_tokens: int
    context_tokens: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class LoadColumns:
    """One entry a worker, in row order.

    ``prefill_tokens``: placed by this router and not yet prefilled; ``context_tokens``: the module's effective load;
    ``num_requests``: placed by this router and not finished; ``recent_share``: tokens placed by this router in the last
    minutes, over those of the worker that has had the most (0 to 1); ``cache_usage`` (share of the KV pool, 0 to 1) and
    ``num_waiting`` as published, 0 while nothing fresh is known.
    """

    prefill_tokens: IntColumn
    context_tokens: IntColumn
    num_requests: IntColumn
    recent_share: FloatColumn
    cache_usage: FloatColumn
    num_waiting: IntColumn


_PREFILL, _CONTEXT, _REQUESTS = range(3)
_ACTIVE, _WAITING = range(2)


class LoadTable:
    """Rows of load, and the placements behind them."""

    def __init__(self, block_size: int, clock: Clock, stale_after_s: float = STALE_AFTER_S) -> None:
        self._block_size = block_size
        self._clock = clock
        self._stale_after_s = stale_after_s
        self._ids: list[str] = []
        self._row: dict[str, int] = {}
        self._own = np.zeros((3, 0), dtype=np.int64)
        self._published = np.zeros((2, 0), dtype=np.int64)
        self._usage = np.zeros(0)
        self._heard_at = np.zeros(0)
        self._context_at_sample = np.zeros(0, dtype=np.int64)
        self._recent = np.zeros(0)
        self._recent_top = 1.0
        self._recent_since = clock.now()
        self._placements: dict[str, Placement] = {}
        self._parked: dict[str, list[int]] = {}
        self._last_seq: dict[str, int] = {}

    @property
    def worker_ids(self) -> list[str]:
        """The workers in row order. Not to be changed by the caller."""
        return self._ids

    @property
    def num_placements(self) -> int:
        return len(self._placements)

    def row(self, worker_id: str) -> int | None:
        return self._row.get(worker_id)

    def add_worker(self, worker_id: str) -> None:
        """Append a row; idempotent. Requests placed before it left are counted again."""
        if worker_id in self._row:
            return
        self._row[worker_id] = len(self._ids)
        self._ids.append(worker_id)
        own = np.array(self._parked.pop(worker_id, [0, 0, 0]), dtype=np.int64).reshape(3, 1)
        self._own = np.concatenate([self._own, own], axis=1)
        self._published = np.concatenate([self._published, np.zeros((2, 1), dtype=np.int64)], axis=1)
        self._recent = np.append(self._recent, 0.0)
        self._usage = np.append(self._usage, 0.0)
        self._heard_at = np.append(self._heard_at, -np.inf)
        self._context_at_sample = np.append(self._context_at_sample, 0)

    def remove_worker(self, worker_id: str) -> None:
        """Drop the row; its placed requests stay counted apart until they finish."""
        at = self._row.pop(worker_id, None)
        if at is None:
            return
        own: list[int] = self._own[:, at].tolist()
        if own[_REQUESTS]:
            self._parked[worker_id] = own
        del self._ids[at]
        self._row = {name: row for row, name in enumerate(self._ids)}
        self._own = np.delete(self._own, at, axis=1)
        self._published = np.delete(self._published, at, axis=1)
        self._recent = np.delete(self._recent, at)
        self._recent_top = float(self._recent.max(initial=1.0))
        self._usage = np.delete(self._usage, at)
        self._heard_at = np.delete(self._heard_at, at)
        self._context_at_sample = np.delete(self._context_at_sample, at)
        self._last_seq.pop(worker_id, None)

    # -- placed by this router ----------------------------------------------------------------------------------------

    def place(self, request_id: str, worker_id: str, prefill_tokens: int, context_tokens: int) -> None:
        """Count a request as placed. One that is placed again (it moved) leaves its former worker first."""
        self.finish(request_id)
        self._placements[request_id] = Placement(worker_id, prefill_tokens, context_tokens)
        self._shift(worker_id, prefill_tokens, context_tokens, 1)
        self._remember(worker_id, context_tokens)

    def prefilled(self, request_id: str) -> None:
        """The request's prefill is done. Unknown ids are ignored."""
        placed = self._placements.get(request_id)
        if placed is not None and placed.prefill_tokens:
            self._shift(placed.worker_id, -placed.prefill_tokens, 0, 0)
            placed.prefill_tokens = 0

    def finish(self, request_id: str) -> Placement | None:
        """Take the request off its worker. Unknown ids are ignored."""
        placed = self._placements.pop(request_id, None)
        if placed is not None:
            self._shift(placed.worker_id, -placed.prefill_tokens, -placed.context_tokens, -1)
        return placed

    def own(self, worker_id: str) -> OwnLoad:
        """What is placed on ``worker_id`` now, registered or not."""
        at = self._row.get(worker_id)
        values = self._parked.get(worker_id, [0, 0, 0]) if at is None else self._own[:, at]
        return OwnLoad(int(values[_PREFILL]), int(values[_CONTEXT]), int(values[_REQUESTS]))

    def _shift(self, worker_id: str, prefill: int, context: int, requests: int) -> None:
        at = self._row.get(worker_id)
        if at is not None:
            self._own[_PREFILL, at] += prefill
            self._own[_CONTEXT, at] += context
            self._own[_REQUESTS, at] += requests
            return
        parked = self._parked.setdefault(worker_id, [0, 0, 0])
        parked[_PREFILL] += prefill
        parked[_CONTEXT] += context
        parked[_REQUESTS] += requests
        if parked[_REQUESTS] <= 0:
            del self._parked[worker_id]

    def _remember(self, worker_id: str, num_tokens: int) -> None:
        """Instead of letting what was placed fade, let what is placed count more and more: only shares matter."""
        at = self._row.get(worker_id)
        if at is None:
            return
        growth = math.exp(min((self._clock.now() - self._recent_since) / RECENT_S, MAX_RECENT_EXPONENT))
        if growth > MAX_RECENT_GROWTH:
            self._recent /= growth
            self._recent_top = max(self._recent_top / growth, 1.0)
            self._recent_since, growth = self._clock.now(), 1.0
        self._recent[at] += num_tokens * growth
        self._recent_top = max(self._recent_top, float(self._recent[at]))

    # -- published ----------------------------------------------------------------------------------------------------

    def apply_metrics(self, metrics: LoadMetrics) -> bool:
        """Take a sample; False when the worker is unknown or the sample is older than the last one."""
        at = self._row.get(metrics.worker_id)
        if at is None or (metrics.seq and metrics.seq <= self._last_seq.get(metrics.worker_id, 0)):
            return False
        self._last_seq[metrics.worker_id] = metrics.seq
        self._published[:, at] = (metrics.kv_active_blocks * self._block_size, metrics.num_requests_waiting)
        self._usage[at] = metrics.gpu_cache_usage_perc
        self._heard_at[at] = self._clock.now()
        self._context_at_sample[at] = self._own[_CONTEXT, at]
        return True

    # -- columns, in row order ----------------------------------------------------------------------------------------

    def columns(self) -> LoadColumns:
        """Everything that a decision looks at. Valid until the table changes."""
        own, published = self._own, self._published
        fresh = self._heard_at >= self._clock.now() - self._stale_after_s
        context, usage, waiting = own[_CONTEXT], self._usage, published[_WAITING]
        others = published[_ACTIVE] + (context - self._context_at_sample)
        if not fresh.all():
            usage, waiting, others = (
                np.where(fresh, usage, 0.0),
                np.where(fresh, waiting, 0),
                np.where(fresh, others, 0),
            )
        return LoadColumns(
            prefill_tokens=own[_PREFILL],
            context_tokens=np.maximum(context, others),
            num_requests=own[_REQUESTS],
            recent_share=self._recent / self._recent_top,
            cache_usage=usage,
            num_waiting=waiting,
        )

    def __repr__(self) -> str:
        total = self._own.sum(axis=1) if self._ids else np.zeros(3)
        return (
            f"LoadTable(workers={len(self._ids)}, requests={int(total[_REQUESTS])}, "
            f"prefill_tokens={int(total[_PREFILL])}, context_tokens={int(total[_CONTEXT])})"
        )
