"""The requests that a frontend can still show: those that run, and of the ended ones the latest, those without an
answer, the slowest, and one in a hundred. Bounded in number, and each trace in bytes (``trace.MAX_TRACE_BYTES``),
however many requests come."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Iterator

from kvrelay.core.status import Outcome
from kvrelay.marks.otlp import TraceExporter
from kvrelay.marks.run_queue import RunQueue
from kvrelay.marks.trace import Trace
from kvrelay.marks.trace_context import TraceContext, followed

NUM_RECENT = 200
NUM_FAILED = 500
NUM_UNANSWERED = 200
"""Of each other outcome: refusals come in floods, which must not push out what failed."""
NUM_SAMPLED = 200
SAMPLE_EVERY = 100
NUM_SLOWEST = 20
"""Of each slice of the window."""
SLICE_S = 60.0
NUM_SLICES = 15


class Slowest:
    """The slowest of each minute of the last quarter of an hour."""

    def __init__(self) -> None:
        self._slices: deque[tuple[float, list[tuple[float, int, Trace]]]] = deque(maxlen=NUM_SLICES)
        self._numbers = itertools.count()
        """No two traces are ever compared."""
        self._until_s = 0.0
        self._floor_s = 0.0
        """A faster request of this slice is not among them."""

    def add(self, trace: Trace) -> None:
        latency_s = trace.ended_s - trace.received_s
        if trace.ended_s >= self._until_s:
            self._until_s, self._floor_s = trace.ended_s + SLICE_S, 0.0
            self._slices.append((trace.ended_s, []))
        elif latency_s <= self._floor_s:
            return
        slowest = self._slices[-1][1]
        heapq.heappush(slowest, (latency_s, next(self._numbers), trace))
        if len(slowest) > NUM_SLOWEST:
            heapq.heappop(slowest)
        if len(slowest) == NUM_SLOWEST:
            self._floor_s = slowest[0][0]

    def since(self, now_s: float) -> Iterator[Trace]:
        """Those of the window that ends now."""
        for begun_s, slowest in self._slices:
            if begun_s > now_s - SLICE_S * NUM_SLICES:
                yield from (trace for _, _, trace in slowest)


class Kept:
    """One frontend's traces. On its event loop."""

    def __init__(self, frontend: str) -> None:
        self.frontend = frontend
        self.running: dict[str, Trace] = {}
        """By request id."""
        self._run_queue = RunQueue()
        self._run_queue.watch()
        self._recent: deque[Trace] = deque(maxlen=NUM_RECENT)
        self._unanswered: dict[Outcome, deque[Trace]] = {
            outcome: deque(maxlen=NUM_FAILED if outcome is Outcome.FAILED else NUM_UNANSWERED) for outcome in Outcome
        }
        self._sampled: deque[Trace] = deque(maxlen=NUM_SAMPLED)
        self._slowest = Slowest()
        self._num_ended = 0
        self.exporter: TraceExporter | None = None

    def begin(self, request_id: str, client: str, traceparent: str = "") -> None:
        """A request has come, with this header."""
        trace = self.running[request_id] = Trace(self._run_queue, request_id, client)
        if self.exporter is not None:
            trace.context = TraceContext.of(traceparent)
            trace.traceparent = trace.context.traceparent
        elif traceparent:
            trace.traceparent = followed(traceparent)

    def end(self, request_id: str, error: str | None, outcome: Outcome = Outcome.FAILED) -> None:
        """It is over; ``error``: why there is no answer, which is the ``outcome``."""
        trace = self.running.pop(request_id, None)
        if trace is None:
            return  # another request of the same id has ended before
        trace.end(error, outcome)
        self._recent.append(trace)
        if error is not None:
            self._unanswered[outcome].append(trace)
        if self._num_ended % SAMPLE_EVERY == 0:
            self._sampled.append(trace)
        self._num_ended += 1
        self._slowest.add(trace)
        if self.exporter is not None:
            self.exporter.add(trace)

    def find(self, request_id: str) -> Trace | None:
        """The trace of this request, if it is kept."""
        return next((trace for trace in self.all() if trace.request_id == request_id), None)

    def all(self) -> list[Trace]:
        """Every trace once, in no order."""
        slowest = self._slowest.since(time.monotonic())
        found = itertools.chain(self.running.values(), self._recent, *self._unanswered.values(), self._sampled, slowest)
        return list(dict.fromkeys(found))

    def close(self) -> None:
        self._run_queue.close()
