"""What one frontend has counted in each of the last five minutes' seconds, in each quarter of the last hour's minutes,
and the sum over all frontends.

Counts are taken from the frontend's metrics once a second, so requests pay nothing for it. Rows are numbered by
wall-clock second, because those of several frontends are added up. This module does not know how they travel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import starmap, zip_longest
from operator import add, sub
from typing import Annotated

import msgspec

from kvrelay.config import WorkerRole
from kvrelay.core.activity import Activity, Number, Seconds
from kvrelay.core.events import LoadMetrics
from kvrelay.core.histogram import LATENCY_BUCKETS_S, TOKEN_BUCKETS_S
from kvrelay.core.process_usage import ProcessUsage
from kvrelay.core.workers import Name, WorkerId, WorkerInfo
from kvrelay.frontend.cluster.cold_start import ColdStart
from kvrelay.frontend.cluster.metrics import AllCounts, FrontendMetrics, Latencies
from kvrelay.frontend.cluster.worker_link import WorkerLink
from kvrelay.planner import Traffic

HISTORY_S = 300
MINUTE_S = 60
MAX_WORKERS = 4096
COARSE_S = 15
NUM_COARSE = 240
"""An hour."""
Count = Annotated[int, msgspec.Meta(ge=0)]
TtftCounts = Annotated[tuple[Count, ...], msgspec.Meta(max_length=len(LATENCY_BUCKETS_S) + 1)]
ItlCounts = Annotated[tuple[Count, ...], msgspec.Meta(max_length=len(TOKEN_BUCKETS_S) + 1)]


class Second(msgspec.Struct, frozen=True, array_like=True):
    """The second that began at ``unix_s``. ``ttft`` and ``itl`` are counts per bucket of the metrics' histograms, empty
    if there were none. GAUGES are sums over all workers' load samples, which all frontends see alike. Fields stand in
    the order of the releases that brought them. ``num_limited`` of the refused requests: by the limits of their API
    key. ``num_judged``: whole answers, each choice one. ``num_cached_tokens``: of the prompts, as clients are told.
    ``cpu_s`` and ``rss_bytes``: of frontends. ``work``: of all workers, as far as this frontend has heard them; every
    frontend hears the same."""

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


GAUGES = ("num_admitted", "num_waiting", "num_blocks_in_use", "num_blocks")
"""Fields of a second that are those of a load sample, over all workers."""
_NOT_ADDED = {"unix_s", "ttft", "itl", "work", *GAUGES}
_ADDED = tuple(name for name in Second.__struct_fields__ if name not in _NOT_ADDED)
_COUNTED = tuple(name for name in AllCounts._fields if name in _ADDED)


class HeardLoad(msgspec.Struct, frozen=True, array_like=True):
    """What a worker has told last of its load, ``age_s`` ago; without what only people watch, and what routers need."""

    load: LoadMetrics
    age_s: Seconds


class WorkerTimes(msgspec.Struct, frozen=True, array_like=True):
    """Of one worker, over a time: counts per bucket. First tokens and gaps between tokens, of answers that it has sent
    to one frontend; and its prefills, as it tells every frontend. It may have left since."""

    worker_id: WorkerId
    role: WorkerRole
    model: Name
    dp_group: Name = ""
    ttft: TtftCounts = ()
    itl: ItlCounts = ()
    prefills: TtftCounts = ()

    def plus(self, other: WorkerTimes) -> WorkerTimes:
        """Of two intervals together."""
        return msgspec.structs.replace(
            self,
            ttft=added(self.ttft, other.ttft),
            itl=added(self.itl, other.itl),
            prefills=added(self.prefills, other.prefills),
        )


class LastMinute:
    """Each worker's times of the last minute, in steps of a second."""

    def __init__(self) -> None:
        self._before: dict[Latencies, tuple[Sequence[int], Sequence[int]]] = {}
        self._rows: deque[tuple[int, list[WorkerTimes]]] = deque()
        self._infos: dict[str, WorkerInfo] = {}

    def take(
        self,
        unix_s: int,
        infos: Iterable[WorkerInfo],
        latencies: Mapping[str, Latencies],
        works: Mapping[str, Activity],
    ) -> None:
        """The second ``unix_s`` has ended, in which the workers ``infos`` have done ``works``. One that has just left
        is in ``latencies`` only."""
        before, self._before, row = self._before, {}, []
        present = {info.worker_id: info for info in infos}
        known_infos, self._infos = self._infos | present, present
        for name in known_infos.keys() & (latencies.keys() | works.keys()):
            known, work = latencies.get(name) or Latencies.none(), works.get(name)
            ttft, itl = tuple(known.ttft.counts), tuple(known.itl.counts)
            self._before[known] = ttft, itl
            old_ttft, old_itl = before.get(known, ((0,) * len(ttft), (0,) * len(itl)))
            prefills = work.prefills if work is not None and any(work.prefills) else ()
            info = known_infos[name]
            times = WorkerTimes(
                name,
                info.role,
                info.model,
                info.dp_group,
                _difference(ttft, old_ttft),
                _difference(itl, old_itl),
                prefills,
            )
            if times.ttft or times.itl or times.prefills:
                row.append(times)
        self._rows.append((unix_s, row))
        while self._rows and not unix_s - MINUTE_S < self._rows[0][0] <= unix_s:
            self._rows.popleft()

    def times(self) -> tuple[WorkerTimes, ...]:
        found: dict[str, WorkerTimes] = {}
        for times in (times for _, row in self._rows for times in row):
            known = found.get(times.worker_id)
            found[times.worker_id] = times if known is None else known.plus(times)
        return tuple(found.values())[:MAX_WORKERS]


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
        self._done: dict[str, Activity] = {}
        """By worker, as it was told last."""
        self._minute = LastMinute()
        self._usage = ProcessUsage()
        self._cpu_s = self._usage.read().cpu_s
        self._rows: deque[Second] = deque(maxlen=HISTORY_S)
        self._hour: deque[Second] = deque(maxlen=NUM_COARSE)

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

    def times(self) -> tuple[WorkerTimes, ...]:
        """By worker, of the last minute."""
        return self._minute.times()

    def loads(self, now_s: float) -> tuple[HeardLoad, ...]:
        """Of each worker that has told its load. ``now_s`` is monotonic."""
        reports = [link.report for link in self._links()][:MAX_WORKERS]
        return tuple(
            HeardLoad(report.load.without_details, max(now_s - report.heard_s, 0.0))
            for report in reports
            if report.load is not None and report.heard_s is not None
        )

    def take(self, unix_s: int) -> None:
        """The second ``unix_s`` has ended. After a clock that went back, rows of its future are dropped."""
        while self._rows and self._rows[-1].unix_s >= unix_s:
            self._rows.pop()
        counts, before = self._metrics.counts(), self._counted
        self._counted = counts
        links = list(self._links())
        generated = {link: link.counts.generated_tokens for link in links}
        loads = [link.load for link in links if link.load is not None]
        works, usage = self._works(links), self._usage.read()
        infos = [link.info for link in links]
        self._minute.take(unix_s, infos, self._metrics.latencies(), works)
        self._metrics.keep_workers({info.worker_id for info in infos})
        row = Second(
            unix_s,
            num_output_tokens=sum(count - self._generated.get(link, 0) for link, count in generated.items()),
            ttft=_difference(counts.ttft, before.ttft),
            itl=_difference(counts.itl, before.itl),
            cpu_s=max(usage.cpu_s - self._cpu_s, 0.0),
            rss_bytes=usage.rss_bytes,
            work=reduce(Activity.plus, works.values()) if works else None,
        )
        gauges = {name: sum(getattr(load, name) for load in loads) for name in GAUGES}
        counted = {name: max(getattr(counts, name) - getattr(before, name), 0) for name in _COUNTED}
        self._rows.append(msgspec.structs.replace(row, **gauges, **counted))
        self._generated, self._cpu_s = generated, usage.cpu_s
        begun = msgspec.structs.replace(self._rows[-1], unix_s=unix_s - unix_s % COARSE_S)
        while self._hour and self._hour[-1].unix_s > begun.unix_s:
            self._hour.pop()
        if self._hour and self._hour[-1].unix_s == begun.unix_s:
            begun = _then(self._hour.pop(), begun)
        self._hour.append(begun)

    def _works(self, links: Iterable[WorkerLink]) -> dict[str, Activity]:
        """What each worker has done since the last call. What it did before it was connected first is in no second."""
        before, self._done, works = self._done, {}, {}
        for link in links:
            activity = None if link.load is None else link.load.activity
            if activity is not None:
                name = link.info.worker_id
                works[name] = activity.since(before.get(name) or link.first_activity or activity)
                self._done[name] = activity
        return works

    def since(self, unix_s: int) -> tuple[Second, ...]:
        """The rows after that second."""
        return tuple(row for row in self._rows if row.unix_s > unix_s)

    def hour_since(self, unix_s: int) -> tuple[Second, ...]:
        """The rows of ``COARSE_S`` seconds that begin at ``unix_s`` or later; the last one grows. Gauges are the
        largest of their seconds."""
        return tuple(row for row in self._hour if row.unix_s >= unix_s)


def _difference(after: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    """Empty if nothing was counted."""
    return () if after == before else tuple(map(sub, after, before))


def added_up(frontends: Iterable[Iterable[Second]], from_unix_s: int, to_unix_s: int) -> list[Second]:
    """One row for each second of the range in which any frontend has one, in order."""
    found: dict[int, Second] = {}
    for row in (row for rows in frontends for row in rows):
        if from_unix_s <= row.unix_s <= to_unix_s:
            other = found.get(row.unix_s)
            found[row.unix_s] = row if other is None else _together(other, row)
    return [found[second] for second in sorted(found)]


def total_of(rows: Iterable[Second]) -> Second:
    """The counts of several seconds as one row; gauges are the largest."""
    total = Second(0)
    for row in rows:
        total = _then(total, row)
    return total


def _then(one: Second, later: Second) -> Second:
    """Of two times together, from the first one's second on."""
    works = [row.work for row in (one, later) if row.work is not None]
    return msgspec.structs.replace(
        _together(one, later),
        rss_bytes=max(one.rss_bytes, later.rss_bytes),
        work=reduce(Activity.then, works) if works else None,
    )


def _together(one: Second, other: Second) -> Second:
    """Of two frontends. What they know of workers is the same: the first one's counts."""
    return msgspec.structs.replace(
        one,
        ttft=added(one.ttft, other.ttft),
        itl=added(one.itl, other.itl),
        work=one.work or other.work,
        **{name: getattr(one, name) + getattr(other, name) for name in _ADDED},
        **{name: max(getattr(one, name), getattr(other, name)) for name in GAUGES},
    )


def added(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """Element by element; one that is shorter counts as zeros at its end."""
    if len(one) == len(other):
        return tuple(map(add, one, other))
    if not (one and other):
        return tuple(one or other)
    return tuple(starmap(add, zip_longest(one, other, fillvalue=0)))
