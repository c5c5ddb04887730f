"""What one frontend has counted in each of the last five minutes' seconds, in each quarter of the last hour's minutes,
and of each worker in the last minute.

Counts are taken from the frontend's metrics once a second, so requests pay nothing for it. Rows are numbered by
wall-clock second, because those of several frontends are added up. This module does not know how they travel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce

import msgspec

from kvrelay.config import WorkerRole
from kvrelay.core.activity import Activity, Seconds
from kvrelay.core.events import LoadMetrics
from kvrelay.core.process_usage import ProcessUsage
from kvrelay.core.workers import Name, WorkerId, WorkerInfo
from kvrelay.frontend.cluster.cold_start import ColdStart
from kvrelay.frontend.cluster.metrics import FrontendMetrics, Latencies
from kvrelay.frontend.cluster.seconds import GAUGES, ItlCounts, Second, TtftCounts, added, difference
from kvrelay.frontend.cluster.worker_link import WorkerLink

HISTORY_S = 300
MINUTE_S = 60
MAX_WORKERS = 4096
COARSE_S = 15
NUM_COARSE = 240
"""An hour."""


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
                difference(ttft, old_ttft),
                difference(itl, old_itl),
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
        self.metrics = metrics
        self._links = links
        self.cold_start = cold_start or ColdStart(0.0)
        self._generated: dict[WorkerLink, int] = {}
        self._done: dict[str, Activity] = {}
        """By worker, as it was told last."""
        self.last_minute = LastMinute()
        self._usage = ProcessUsage()
        self._counted = self._counts()
        self._rows: deque[Second] = deque(maxlen=HISTORY_S)
        self._hour: deque[Second] = deque(maxlen=NUM_COARSE)

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
        counts, before = self._counts(), self._counted
        links = list(self._links())
        generated = {link: link.counts.generated_tokens for link in links}
        loads = [link.load for link in links if link.load is not None]
        works, infos = self._works(links), [link.info for link in links]
        self.last_minute.take(unix_s, infos, self.metrics.latencies(), works)
        self.metrics.keep_workers({info.worker_id for info in infos})
        row = msgspec.structs.replace(
            counts.since(before),
            unix_s=unix_s,
            num_output_tokens=sum(count - self._generated.get(link, 0) for link, count in generated.items()),
            rss_bytes=counts.rss_bytes,
            work=reduce(Activity.plus, works.values()) if works else None,
            **{name: sum(getattr(load, name) for load in loads) for name in GAUGES},
        )
        self._rows.append(row)
        self._counted, self._generated = counts, generated
        begun = msgspec.structs.replace(row, unix_s=unix_s - unix_s % COARSE_S)
        while self._hour and self._hour[-1].unix_s > begun.unix_s:
            self._hour.pop()
        if self._hour and self._hour[-1].unix_s == begun.unix_s:
            begun = self._hour.pop().then(begun)
        self._hour.append(begun)

    def _counts(self) -> Second:
        """Since the start."""
        usage = self._usage.read()
        return msgspec.structs.replace(self.metrics.counts(), cpu_s=usage.cpu_s, rss_bytes=usage.rss_bytes)

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
