"""What one frontend has counted in each of the last five minutes' seconds, and the sum over all frontends.

Counts are taken from the frontend's metrics once a second, so requests pay nothing for it. Rows are numbered by
wall-clock second, because those of several frontends are added up. This module does not know how they travel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import starmap, zip_longest
from operator import add, sub
from typing import Annotated

import msgspec

from kvrelay.core.histogram import LATENCY_BUCKETS_S, TOKEN_BUCKETS_S
from kvrelay.frontend.cluster.cold_start import ColdStart
from kvrelay.frontend.cluster.metrics import FrontendMetrics
from kvrelay.frontend.cluster.worker_link import WorkerLink
from kvrelay.planner import Traffic

HISTORY_S = 300
Count = Annotated[int, msgspec.Meta(ge=0)]
TtftCounts = Annotated[tuple[Count, ...], msgspec.Meta(max_length=len(LATENCY_BUCKETS_S) + 1)]
ItlCounts = Annotated[tuple[Count, ...], msgspec.Meta(max_length=len(TOKEN_BUCKETS_S) + 1)]


class Second(msgspec.Struct, frozen=True, array_like=True):
    """The second that began at ``unix_s``. ``ttft`` and ``itl`` are counts per bucket of the metrics' histograms, empty
    if there were none. The last four are gauges over all workers, which every frontend sees alike."""

    unix_s: int
    num_requests: Count = 0
    num_failed: Count = 0
    num_prompt_tokens: Count = 0
    num_output_tokens: Count = 0
    ttft: TtftCounts = ()
    itl: ItlCounts = ()
    num_running: Count = 0
    num_waiting: Count = 0
    kv_used: Count = 0
    kv_total: Count = 0


class Figures:
    """One frontend's rows. ``links``: its connections to workers. ``cold_start``: knows which requests have none."""

    def __init__(
        self, metrics: FrontendMetrics, links: Callable[[], Iterable[WorkerLink]], cold_start: ColdStart | None = None
    ) -> None:
        self._metrics = metrics
        self._links = links
        self._cold_start = cold_start or ColdStart(0.0)
        self._counted = metrics.counts()
        self._generated: dict[WorkerLink, int] = {}
        self._rows: deque[Second] = deque(maxlen=HISTORY_S)

    @property
    def num_in_flight(self) -> int:
        """Sequences that are being generated."""
        return self._metrics.num_in_flight_of()

    @property
    def traffic(self) -> Traffic:
        """Counts since the start."""
        return self._metrics.traffic()

    @property
    def num_unplaced(self) -> int:
        """Requests that wait because no worker takes requests."""
        return self._cold_start.num_unplaced

    def take(self, unix_s: int) -> None:
        """The second ``unix_s`` has ended. After a clock that went back, rows of its future are dropped."""
        while self._rows and self._rows[-1].unix_s >= unix_s:
            self._rows.pop()
        counts, before = self._metrics.counts(), self._counted
        self._counted = counts
        links = list(self._links())
        generated = {link: link.counts.generated_tokens for link in links}
        loads = [link.load for link in links if link.load is not None]
        self._rows.append(
            Second(
                unix_s,
                counts.num_requests - before.num_requests,
                counts.num_failed - before.num_failed,
                counts.num_prompt_tokens - before.num_prompt_tokens,
                sum(count - self._generated.get(link, 0) for link, count in generated.items()),
                _difference(counts.ttft, before.ttft),
                _difference(counts.itl, before.itl),
                sum(load.request_active_slots for load in loads),
                sum(load.num_requests_waiting for load in loads),
                sum(load.kv_active_blocks for load in loads),
                sum(load.kv_total_blocks for load in loads),
            )
        )
        self._generated = generated

    def since(self, unix_s: int) -> tuple[Second, ...]:
        """The rows after that second."""
        return tuple(row for row in self._rows if row.unix_s > unix_s)


def _difference(after: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    """Empty if nothing was counted."""
    return () if after == before else tuple(map(sub, after, before))


def added_up(frontends: Iterable[Iterable[Second]], from_unix_s: int, to_unix_s: int) -> list[Second]:
    """One row for each second of the range in which any frontend has one, in order."""
    found: dict[int, Second] = {}
    for row in (row for rows in frontends for row in rows):
        if from_unix_s <= row.unix_s <= to_unix_s:
            other = found.get(row.unix_s)
            found[row.unix_s] = row if other is None else _sum(row, other)
    return [found[second] for second in sorted(found)]


def total_of(rows: Iterable[Second]) -> Second:
    """The counts of several seconds as one row; gauges are the largest."""
    total = Second(0)
    for row in rows:
        total = _sum(row, total)
    return total


def _sum(one: Second, other: Second) -> Second:
    return Second(
        one.unix_s,
        one.num_requests + other.num_requests,
        one.num_failed + other.num_failed,
        one.num_prompt_tokens + other.num_prompt_tokens,
        one.num_output_tokens + other.num_output_tokens,
        added(one.ttft, other.ttft),
        added(one.itl, other.itl),
        max(one.num_running, other.num_running),
        max(one.num_waiting, other.num_waiting),
        max(one.kv_used, other.kv_used),
        max(one.kv_total, other.kv_total),
    )


def added(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """Element by element; one that is shorter counts as zeros at its end."""
    if len(one) == len(other):
        return tuple(map(add, one, other))
    if not (one and other):
        return tuple(one or other)
    return tuple(starmap(add, zip_longest(one, other, fillvalue=0)))
