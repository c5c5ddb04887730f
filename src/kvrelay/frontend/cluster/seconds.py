"""A row of a frontend's figures, of a second or of a longer time, and how rows are added up, over time and over
frontends. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import starmap, zip_longest
from operator import add, sub
from typing import Annotated

import msgspec

from kvrelay.core.activity import Activity, Number, Seconds
from kvrelay.core.histogram import LATENCY_BUCKETS_S, TOKEN_BUCKETS_S

Count = Annotated[int, msgspec.Meta(ge=0)]
TtftCounts = Annotated[tuple[Count, ...], msgspec.Meta(max_length=len(LATENCY_BUCKETS_S) + 1)]
ItlCounts = Annotated[tuple[Count, ...], msgspec.Meta(max_length=len(TOKEN_BUCKETS_S) + 1)]


class Second(msgspec.Struct, frozen=True, array_like=True):
    """The second that began at ``unix_s``, or a longer time. ``ttft`` and ``itl`` are counts per bucket of the metrics'
    histograms, empty if there were none. GAUGES are sums over all workers' load samples, which all frontends see alike.
    Fields stand in the order of the releases that brought them. ``num_limited`` of the refused requests: by the limits
    of their API key. ``num_judged``: whole answers, each choice one. ``num_cached_tokens``: of the prompts, as clients
    are told. ``cpu_s`` and ``rss_bytes``: of frontends. ``work``: of all workers, as far as this frontend has heard
    them; every frontend hears the same."""

    unix_s: int
    num_requests: Count = 0
    num_failed: Count = 0
    num_prompt_tokens: Count = 0
    num_output_tokens: Count = 0
    ttft: TtftCounts = ()
    itl: ItlCounts = ()
    num_admitted: Count = 0
    num_waiting: Count = 0
    num_blocks_in_use: Count = 0
    num_blocks: Count = 0
    num_answered: Count = 0
    num_refused: Count = 0
    num_limited: Count = 0
    num_judged: Count = 0
    num_in_time: Count = 0
    num_late_first: Count = 0
    num_late_gaps: Count = 0
    num_cached_tokens: Count = 0
    cpu_s: Seconds = 0.0
    rss_bytes: Number = 0
    work: Activity | None = None

    def since(self, before: Second) -> Second:
        """Of two sums since the start: what was counted after ``before``. Gauges and ``work`` are none of it."""
        return Second(
            self.unix_s,
            ttft=difference(self.ttft, before.ttft),
            itl=difference(self.itl, before.itl),
            **{name: max(getattr(self, name) - getattr(before, name), 0) for name in _ADDED},
        )

    def then(self, later: Second) -> Second:
        """Of two times together, from the first one's second on."""
        works = [row.work for row in (self, later) if row.work is not None]
        return msgspec.structs.replace(
            self.beside(later),
            rss_bytes=max(self.rss_bytes, later.rss_bytes),
            work=reduce(Activity.then, works) if works else None,
        )

    def beside(self, other: Second) -> Second:
        """Of two frontends. What they know of workers is the same: the first one's counts."""
        return msgspec.structs.replace(
            self,
            ttft=added(self.ttft, other.ttft),
            itl=added(self.itl, other.itl),
            work=self.work or other.work,
            **{name: getattr(self, name) + getattr(other, name) for name in _ADDED},
            **{name: max(getattr(self, name), getattr(other, name)) for name in GAUGES},
        )


GAUGES = ("num_admitted", "num_waiting", "num_blocks_in_use", "num_blocks")
"""Fields of a second that are those of a load sample, over all workers."""
_NOT_ADDED = {"unix_s", "ttft", "itl", "work", *GAUGES}
_ADDED = tuple(name for name in Second.__struct_fields__ if name not in _NOT_ADDED)


def difference(after: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    """Empty if nothing was counted."""
    return () if after == before else tuple(map(sub, after, before))


def added_up(frontends: Iterable[Iterable[Second]], from_unix_s: int, to_unix_s: int) -> list[Second]:
    """One row for each second of the range in which any frontend has one, in order."""
    found: dict[int, Second] = {}
    for row in (row for rows in frontends for row in rows):
        if from_unix_s <= row.unix_s <= to_unix_s:
            other = found.get(row.unix_s)
            found[row.unix_s] = row if other is None else other.beside(row)
    return [found[second] for second in sorted(found)]


def total_of(rows: Iterable[Second]) -> Second:
    """The counts of several seconds as one row; gauges are the largest."""
    return reduce(Second.then, rows, Second(0))


def added(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """Element by element; one that is shorter counts as zeros at its end."""
    if len(one) == len(other):
        return tuple(map(add, one, other))
    if not (one and other):
        return tuple(one or other)
    return tuple(starmap(add, zip_longest(one, other, fillvalue=0)))
