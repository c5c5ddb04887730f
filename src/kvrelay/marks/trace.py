"""One request as its frontend sees it: its marks, and those that its workers have sent."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvrelay.marks.phases import Phase, Role
from kvrelay.marks.ring import Ring
from kvrelay.marks.run_queue import RunQueue
from kvrelay.marks.trace_context import TraceContext
from kvrelay.marks.travel import MAX_BYTES, ProcessMarks

MAX_ATTEMPTS = 16
"""Attempts, over all choices, whose marks are kept."""
MAX_FIELDS = 2
"""A worker sends its marks with its first output and with its last."""
MAX_LATE = 32
MAX_ERROR_CHARS = 200
MAX_TRACE_BYTES = 32 * 1024
BASE_BYTES = 1024
"""About what a trace holds besides marks."""


@dataclass(slots=True)
class Attempt:
    """One placement of one choice. ``fields``: what came of its marks, undecoded."""

    worker_id: str
    prefill_id: str
    fields: list[bytes] = field(default_factory=list)


class Trace:
    """Marks by its ring until ``end``; then its own bytes. Times are monotonic but ``received_unix``."""

    __slots__ = (
        "_marks",
        "_ring",
        "_run_queue",
        "attempts",
        "client",
        "context",
        "ended_ns",
        "error",
        "first_ns",
        "model",
        "num_late",
        "num_migrations",
        "output_tokens",
        "prompt_tokens",
        "received_ns",
        "received_unix",
        "request_id",
        "status",
        "traceparent",
    )

    def __init__(self, ring: Ring, run_queue: RunQueue, request_id: str, client: str) -> None:
        self._ring = ring
        self._run_queue = run_queue
        self._marks = b""
        self.request_id = request_id
        self.client = client
        """The API key's name."""
        self.model = ""
        self.status = "running"
        self.error: str | None = None
        self.prompt_tokens = self.output_tokens = 0
        self.num_migrations = self.num_late = 0
        self.attempts: list[Attempt] = []
        self.context: TraceContext | None = None
        """The request's place in a tracing system; None if no traces are sent."""
        self.traceparent = ""
        """For those who compute the request: ours, or without a collector the client's."""
        self.received_unix = time.time()
        self.received_ns = time.monotonic_ns()
        self.first_ns = self.ended_ns = 0
        self._with_run_queue(Phase.RECEIVED)

    def mark(self, phase: Phase, value: float = 0.0) -> None:
        """The request has reached ``phase`` here."""
        self._ring.add(self.request_id, phase, value)

    def routed(self, worker_id: str, prefill_id: str = "") -> int:
        """It was sent to a worker, or to a pair. Returns the attempt's number."""
        number = len(self.attempts)
        if number < MAX_ATTEMPTS:
            self.attempts.append(Attempt(worker_id, prefill_id))
            self.mark(Phase.ROUTED, number)
        return number

    def heard(self, number: int, marks: bytes) -> None:
        """A worker's marks have come."""
        if number < len(self.attempts) and 0 < len(marks) <= MAX_BYTES and self.num_bytes < MAX_TRACE_BYTES:
            fields = self.attempts[number].fields
            if len(fields) < MAX_FIELDS and marks not in fields:
                fields.append(marks)
                self.mark(Phase.HEARD, number)

    def first_token(self) -> None:
        """A choice has its first token."""
        if not self.first_ns:
            self.first_ns = time.monotonic_ns()
            self._with_run_queue(Phase.FIRST_TOKEN)

    def late_token(self, gap_s: float) -> None:
        """A token came ``gap_s`` after the one before it."""
        if self.num_late < MAX_LATE:
            self.num_late += 1
            self.mark(Phase.LATE_TOKEN, gap_s)

    def migrated(self, num_tokens: int) -> None:
        """The worker was lost after so many tokens."""
        self.num_migrations += 1
        self.mark(Phase.MIGRATED, num_tokens)

    def end(self, error: str | None = None) -> None:
        """The client has the whole answer, or an error."""
        self.error = None if error is None else error[:MAX_ERROR_CHARS]
        self.status = "failed" if error is not None else "migrated" if self.num_migrations else "finished"
        self._with_run_queue(Phase.FINISHED if error is None else Phase.FAILED)
        self.ended_ns = time.monotonic_ns()
        self._marks = self._ring.take(self.request_id)

    def own_marks(self, frontend: str) -> ProcessMarks:
        """What this frontend, of that name, has marked until now."""
        return ProcessMarks(frontend, Role.FRONTEND, self._marks or self._ring.read(self.request_id))

    @property
    def latency_ns(self) -> int:
        """Until its end, or until now."""
        return (self.ended_ns or time.monotonic_ns()) - self.received_ns

    @property
    def num_bytes(self) -> int:
        """About the memory that it takes."""
        return BASE_BYTES + len(self._marks) + sum(len(each) for one in self.attempts for each in one.fields)

    def _with_run_queue(self, phase: Phase) -> None:
        self.mark(phase)
        self.mark(Phase.RUN_QUEUE, self._run_queue.waited_s())
