"""The load of the workers as this router sees it: what they publish, and what this router has placed.

Published load is always late, so the router also counts, in tokens, every request that it has placed and not yet seen
finished. Both are columns with one row per worker, updated at every change: a decision over many workers only reads
them, in a handful of vector operations. Load belongs to the placed requests, not to the registration: a worker that
leaves and comes back under the same id still carries its placements. The table does not know prefixes or policies.

    effective load = max(own now, published + own now - own when the sample arrived)

The first term protects against a sample that was taken before our latest requests reached the worker; the second
counts what other frontends have placed. So a sample sets the effective load to max(own, published), and every later
placement or finish shifts it. The router ignores samples older than ``stale_after_s``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec
import numpy as np

from kvrelay.core.clock import Clock
from kvrelay.core.events import STALE_AFTER_S, LoadMetrics
from kvrelay.placement.seconds import FloatColumn, LoadColumns

RECENT_S = 60.0
"""Time constant of a worker's recent tokens: a token placed this long ago counts 1/e."""
MAX_RECENT_GROWTH = 1e9
MAX_RECENT_EXPONENT = 500.0


class InFlightRequest(msgspec.Struct):
    """A request in flight: ``prefill_tokens`` count until the first token, ``context_tokens`` until the end."""

    worker_id: str
    prefill_tokens: int
    context_tokens: int


class _Bookkeeping(NamedTuple):
    """Columns that decisions do not read. ``others_context`` and ``others_requests``: the parts of ``context_tokens``
    and ``num_requests`` that other frontends have placed; ``num_placed``: placed here and not finished; ``recent``: the
    numerator of ``recent_share``; ``heard_at``: when the last sample arrived; ``prefilled``: tokens of ours whose
    prefill has ended since then, which the next sample may count still."""

    others_context: FloatColumn
    others_requests: FloatColumn
    num_placed: FloatColumn
    recent: FloatColumn
    heard_at: FloatColumn
    prefilled: FloatColumn


_NUM_SHOWN = len(LoadColumns.__struct_fields__)
_NUM_KEPT = len(_Bookkeeping._fields)


class LoadTable:
    """One row of load per worker, and the placements that it counts."""

    def __init__(self, block_size: int, clock: Clock, stale_after_s: float = STALE_AFTER_S) -> None:
        self._block_size = block_size
        self._clock = clock
        self._stale_after_s = stale_after_s
        self._fresh_until_s = math.inf
        self._ids: list[str] = []
        self._row: dict[str, int] = {}
        self._recent_top = 1.0
        self._recent_since = clock.now()
        self._placements: dict[str, InFlightRequest] = {}
        self._last_seq: dict[str, int] = {}
        self._hold(np.zeros((_NUM_SHOWN + _NUM_KEPT, 0)))

    def _hold(self, values: FloatColumn) -> None:
        """Take over an array with a row per column and a column per worker; all columns are views of it."""
        self._values = values
        self._shown = LoadColumns(*values[:_NUM_SHOWN])
        self._kept = _Bookkeeping(*values[_NUM_SHOWN:])

    @property
    def worker_ids(self) -> list[str]:
        """The workers in row order. Not to be changed by the caller."""
        return self._ids

    @property
    def num_pending(self) -> int:
        """Requests that wait on any worker: as placed by this router or as published, whichever is more."""
        waiting = self.columns().num_waiting
        return int(np.maximum(self._kept.num_placed, waiting).sum())

    def row(self, worker_id: str) -> int | None:
        return self._row.get(worker_id)

    def add_worker(self, worker_id: str) -> None:
        """Append a row; idempotent. If the worker was here before, its unfinished requests count again."""
        if worker_id in self._row:
            return
        at = self._row[worker_id] = len(self._ids)
        self._ids.append(worker_id)
        self._hold(np.concatenate([self._values, np.zeros((len(self._values), 1))], axis=1))
        self._kept.heard_at[at] = -math.inf
        for placed in self.placed(worker_id):
            self._shift(worker_id, placed.prefill_tokens, placed.context_tokens, 1)

    def remove_worker(self, worker_id: str) -> None:
        """Drop the row. The worker's placed requests are kept until they finish."""
        at = self._row.pop(worker_id, None)
        if at is None:
            return
        del self._ids[at]
        self._row = {name: row for row, name in enumerate(self._ids)}
        self._hold(np.delete(self._values, at, axis=1))
        self._recent_top = float(self._kept.recent.max(initial=1.0))
        self._share_recent()
        self._last_seq.pop(worker_id, None)

    # -- placed by this router ----------------------------------------------------------------------------------------

    def place(self, request_id: str, worker_id: str, prefill_tokens: int, context_tokens: int) -> None:
        """Count a request as placed. A request that moved to another worker leaves the former one first."""
        self.finish(request_id)
        self._placements[request_id] = InFlightRequest(worker_id, prefill_tokens, context_tokens)
        self._shift(worker_id, prefill_tokens, context_tokens, 1)
        self._remember(worker_id, context_tokens)

    def prefilled(self, request_id: str) -> None:
        """The request's prefill is done. Unknown ids are ignored."""
        placed = self._placements.get(request_id)
        if placed is not None and placed.prefill_tokens:
            self._shift(placed.worker_id, -placed.prefill_tokens, 0, 0)
            placed.prefill_tokens = 0

    def finish(self, request_id: str) -> InFlightRequest | None:
        """Take the request off its worker. Unknown ids are ignored."""
        placed = self._placements.pop(request_id, None)
        if placed is not None:
            self._shift(placed.worker_id, -placed.prefill_tokens, -placed.context_tokens, -1)
        return placed

    def placed(self, worker_id: str) -> list[InFlightRequest]:
        """The requests placed on ``worker_id`` and not yet seen finished, whether or not it is registered."""
        return [placed for placed in self._placements.values() if placed.worker_id == worker_id]

    def _shift(self, worker_id: str, prefill: int, context: int, requests: int) -> None:
        at = self._row.get(worker_id)
        if at is None:
            return
        shown = self._shown
        if prefill:
            shown.prefill_tokens[at] += prefill
            self._kept.prefilled[at] -= min(prefill, 0)
        if requests:
            shown.context_tokens[at] += context
            shown.num_requests[at] += requests
            self._kept.num_placed[at] += requests

    def _remember(self, worker_id: str, num_tokens: int) -> None:
        """Weight new placements ever more instead of letting old ones decay: only shares matter."""
        at = self._row.get(worker_id)
        if at is None:
            return
        recent = self._kept.recent
        growth = math.exp(min((self._clock.now() - self._recent_since) / RECENT_S, MAX_RECENT_EXPONENT))
        if growth > MAX_RECENT_GROWTH:
            recent /= growth
            self._recent_top = max(self._recent_top / growth, 1.0)
            self._recent_since, growth = self._clock.now(), 1.0
            self._share_recent()
        own = float(recent[at]) + num_tokens * growth
        recent[at] = own
        if own > self._recent_top:
            self._recent_top = own
            self._share_recent()
        else:
            self._shown.recent_share[at] = own / self._recent_top

    def _share_recent(self) -> None:
        np.divide(self._kept.recent, self._recent_top, out=self._shown.recent_share)

    # -- published ----------------------------------------------------------------------------------------------------

    def apply_metrics(self, metrics: LoadMetrics) -> bool:
        """Take a sample; False if the worker is unknown or the sample is older than the last one."""
        at = self._row.get(metrics.worker_id)
        if at is None or (metrics.seq and metrics.seq <= self._last_seq.get(metrics.worker_id, 0)):
            return False
        self._last_seq[metrics.worker_id] = metrics.seq
        shown, kept, now = self._shown, self._kept, self._clock.now()
        own = shown.context_tokens[at] - kept.others_context[at]
        shown.context_tokens[at] = max(own, metrics.num_blocks_in_use * self._block_size)
        shown.cache_usage[at] = metrics.cache_usage
        shown.num_waiting[at] = metrics.num_waiting
        kept.others_context[at] = shown.context_tokens[at] - own
        published = metrics.num_admitted + metrics.num_waiting
        kept.others_requests[at] = max(published - kept.num_placed[at], 0.0)
        shown.num_requests[at] = kept.num_placed[at] + kept.others_requests[at]
        ours = shown.prefill_tokens[at] + kept.prefilled[at]
        shown.others_prefill_tokens[at] = max(metrics.num_prefill_tokens - ours, 0.0)
        kept.prefilled[at] = 0.0
        kept.heard_at[at] = now
        self._fresh_until_s = min(self._fresh_until_s, now + self._stale_after_s)
        return True

    def _forget_stale(self, now: float) -> None:
        """For workers whose last sample is too old, keep only the load placed by this router."""
        shown, kept = self._shown, self._kept
        stale = kept.heard_at < now - self._stale_after_s
        shown.cache_usage[stale] = 0.0
        shown.num_waiting[stale] = 0.0
        shown.others_prefill_tokens[stale] = 0.0
        shown.context_tokens[stale] -= kept.others_context[stale]
        kept.others_context[stale] = 0.0
        shown.num_requests[stale] -= kept.others_requests[stale]
        kept.others_requests[stale] = 0.0
        self._fresh_until_s = float(kept.heard_at[~stale].min(initial=math.inf)) + self._stale_after_s

    @property
    def sample_ages_s(self) -> FloatColumn:
        """Seconds since each worker's last sample."""
        ages: FloatColumn = self._clock.now() - self._kept.heard_at
        return ages

    # -- columns, in row order ----------------------------------------------------------------------------------------

    def columns(self) -> LoadColumns:
        """The columns that a decision reads. The caller must not change them. Valid until the table changes."""
        now = self._clock.now()
        if now > self._fresh_until_s:
            self._forget_stale(now)
        return self._shown

    def __repr__(self) -> str:
        context = self._shown.context_tokens.sum() - self._kept.others_context.sum()
        return (
            f"LoadTable(workers={len(self._ids)}, requests={self._kept.num_placed.sum():.0f}, "
            f"prefill_tokens={self._shown.prefill_tokens.sum():.0f}, context_tokens={context:.0f})"
        )


MIN_AGE_S = 0.5
"""Shorter steps are not remembered."""


class Stalls:
    """The age of each worker's running step in its last sample. A worker that falls silent keeps that age."""

    def __init__(self) -> None:
        self._age_s: dict[str, float] = {}

    def heard(self, worker_id: str, step_age_s: float) -> None:
        if step_age_s >= MIN_AGE_S:
            self._age_s[worker_id] = step_age_s
        else:
            self._age_s.pop(worker_id, None)

    def forget(self, worker_id: str) -> None:
        self._age_s.pop(worker_id, None)

    def avoidable(
        self, after_s: float, row_of: Callable[[str], int | None], excluded: Collection[int], num_rows: int
    ) -> list[int]:
        """Rows to avoid besides ``excluded``: those of workers that have been at one step for ``after_s`` seconds
        (0: none). Empty if that would leave none of the ``num_rows``."""
        if not self._age_s or not after_s:
            return []
        rows = {row_of(worker_id) for worker_id, age_s in self._age_s.items() if age_s >= after_s}
        stalled = [row for row in rows if row is not None and row not in excluded]
        return stalled if len(stalled) + len(excluded) < num_rows else []
