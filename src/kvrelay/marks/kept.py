"""The requests that a frontend can still show: those that run, and of the ended ones the latest, those that failed, the
slowest, and one in a hundred. Bounded in number and in bytes, however many requests come."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Iterator

from kvrelay.marks.otlp import TraceExporter
from kvrelay.marks.ring import Ring
from kvrelay.marks.run_queue import RunQueue
from kvrelay.marks.trace import Trace

NUM_RECENT = 200
NUM_FAILED = 500
NUM_SAMPLED = 200
SAMPLE_EVERY = 100
NUM_SLOWEST = 20
"""Of each slice of the window."""
SLICE_NS = 60 * 10**9
NUM_SLICES = 15
MAX_BYTES = 16 * 1024 * 1024


class Latest:
    """The latest traces, so many at most, and so many bytes."""

    def __init__(self, capacity: int, max_bytes: int) -> None:
        self._traces: deque[Trace] = deque()
        self._capacity = capacity
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def __iter__(self) -> Iterator[Trace]:
        return iter(self._traces)

    def add(self, trace: Trace) -> None:
        self._traces.append(trace)
        self.num_bytes += trace.num_bytes
        while len(self._traces) > self._capacity or self.num_bytes > self._max_bytes:
            self.num_bytes -= self._traces.popleft().num_bytes


class Slowest:
    """The slowest of each minute of the last quarter of an hour."""

    def __init__(self) -> None:
        self._slices: deque[tuple[int, list[tuple[int, int, Trace]]]] = deque(maxlen=NUM_SLICES)
        self._numbers = itertools.count()
        """No two traces are ever compared."""

    def add(self, trace: Trace) -> None:
        slice_number = trace.ended_ns // SLICE_NS
        if not self._slices or self._slices[-1][0] != slice_number:
            self._slices.append((slice_number, []))
        slowest, entry = self._slices[-1][1], (trace.latency_ns, next(self._numbers), trace)
        if len(slowest) < NUM_SLOWEST:
            heapq.heappush(slowest, entry)
        elif entry[0] > slowest[0][0]:
            heapq.heapreplace(slowest, entry)

    def since(self, now_ns: int) -> Iterator[Trace]:
        """Those of the window that ends now."""
        first = now_ns // SLICE_NS - NUM_SLICES
        for number, slowest in self._slices:
            if number > first:
                yield from (trace for _, _, trace in slowest)


class Kept:
    """One frontend's traces. On its event loop."""

    def __init__(self, frontend: str, ring: Ring | None = None) -> None:
        self.frontend = frontend
        self._ring = ring or Ring()
        self._run_queue = RunQueue()
        self._run_queue.watch()
        self._running: dict[str, Trace] = {}
        self._recent = Latest(NUM_RECENT, MAX_BYTES // 4)
        self._failed = Latest(NUM_FAILED, MAX_BYTES // 4)
        self._sampled = Latest(NUM_SAMPLED, MAX_BYTES // 4)
        self._slowest = Slowest()
        self._num_ended = 0
        self.exporter: TraceExporter | None = None

    def begin(self, request_id: str, client: str) -> Trace:
        """A request has come."""
        trace = self._running[request_id] = Trace(self._ring, self._run_queue, request_id, client)
        return trace

    def ended(self, trace: Trace, error: str | None) -> None:
        """The request is over; ``error``: why it failed."""
        trace.end(error)
        self._running.pop(trace.request_id, None)
        self._recent.add(trace)
        if error is not None:
            self._failed.add(trace)
        if self._num_ended % SAMPLE_EVERY == 0:
            self._sampled.add(trace)
        self._num_ended += 1
        self._slowest.add(trace)
        if self.exporter is not None:
            self.exporter.add(trace)

    def find(self, request_id: str) -> Trace | None:
        """The trace of this request, if it is kept."""
        return self._running.get(request_id) or next(
            (trace for trace in self.all() if trace.request_id == request_id), None
        )

    def all(self) -> list[Trace]:
        """Every trace once, the latest request first."""
        found = dict.fromkeys(
            itertools.chain(
                self._running.values(),
                self._recent,
                self._failed,
                self._sampled,
                self._slowest.since(time.monotonic_ns()),
            )
        )
        return sorted(found, key=lambda trace: trace.received_ns, reverse=True)

    def close(self) -> None:
        self._run_queue.close()
