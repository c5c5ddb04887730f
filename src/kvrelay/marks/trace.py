"""One request as its frontend sees it: its marks, and those that its workers have sent. Times are monotonic seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec

from kvrelay.core.status import Outcome
from kvrelay.marks.phases import Phase
from kvrelay.marks.recorder import Mark
from kvrelay.marks.run_queue import RunQueue
from kvrelay.marks.trace_context import TraceContext
from kvrelay.marks.travel import MAX_BYTES

MAX_ATTEMPTS = 16
"""Attempts, over all choices, whose marks are kept."""
MAX_FIELDS = 2
"""A worker sends its marks with its first output and with its last."""
MAX_LATE = 32
MAX_ERROR_CHARS = 200
MAX_TRACE_BYTES = 16 * 1024


class Attempt(msgspec.Struct):
    """One placement of one choice. ``fields``: what came of its marks, undecoded, and when."""

    worker_id: str
    prefill_id: str
    routed_s: float
    fields: list[tuple[float, bytes]] = []


class Trace:
    """On the event loop. What happens once is an attribute, which costs no mark; the class has its value before."""

    model = ""
    status = "running"
    error: str | None = None
    prompt_tokens = num_migrations = num_late = num_bytes = 0
    tokenised_s = first_s = ended_s = 0.0
    context: TraceContext | None = None
    """The request's place in a tracing system; None if no traces are sent."""
    traceparent = ""
    """For those who compute the request: ours, or without a collector the client's."""

    def __init__(self, run_queue: RunQueue, request_id: str, client: str) -> None:
        self._run_queue = run_queue
        self.request_id = request_id
        self.client = client
        """The API key's name."""
        self.attempts: list[Attempt] = []
        self._count_output: Callable[[], int] = int
        """While it runs: how many tokens its answer has."""
        self.others: list[Mark] = []
        """Late tokens, migrations and refusals."""
        self.received_unix = time.time()
        self.received_s = now_s = time.monotonic()
        self.waits = [now_s, run_queue.waited_s(now_s)]
        """Times, each with the run queue's count."""

    def tokenised(self, model: str, num_tokens: int) -> None:
        """All prompts are token ids of this model."""
        self.model, self.prompt_tokens = model, num_tokens
        self.tokenised_s = time.monotonic()

    @property
    def output_tokens(self) -> int:
        """Of all choices, so far."""
        return self._count_output()

    def answering(self, count: Callable[[], int]) -> None:
        """From now on ``count`` tells the answer's tokens."""
        self._count_output = count

    def answered(self) -> None:
        """No more tokens come: what counts them is let go of."""
        num_tokens = self._count_output()
        self._count_output = lambda: num_tokens

    def routed(self, worker_id: str, prefill_id: str = "") -> int:
        """It is sent to a worker, or to a pair. Returns the attempt's number."""
        number = len(self.attempts)
        if number < MAX_ATTEMPTS:
            self.attempts.append(Attempt(worker_id, prefill_id, time.monotonic()))
        return number

    def heard(self, number: int, marks: bytes) -> None:
        """A worker's marks have come."""
        if marks and number < len(self.attempts):
            size, fields = len(marks), self.attempts[number].fields
            is_new = not fields or (len(fields) < MAX_FIELDS and fields[-1][1] != marks)
            if is_new and size <= MAX_BYTES and self.num_bytes <= MAX_TRACE_BYTES:
                fields.append((time.monotonic(), marks))
                self.num_bytes += size

    def first_token(self, now_s: float) -> None:
        """A choice has its first token."""
        if not self.first_s:
            self.first_s = now_s
            self.waits += (now_s, self._run_queue.waited_s(now_s))

    def late_token(self, now_s: float, gap_s: float) -> None:
        """A token came ``gap_s`` after the one before it."""
        if self.num_late < MAX_LATE:
            self.num_late += 1
            self.others.append(Mark(Phase.LATE_TOKEN, now_s, gap_s))

    def migrated(self, num_tokens: int) -> None:
        """The worker was lost after so many tokens."""
        self.num_migrations += 1
        if self.num_migrations < MAX_ATTEMPTS:
            self.others.append(Mark(Phase.MIGRATED, time.monotonic(), num_tokens))

    def refused(self) -> None:
        """A worker does not take it."""
        if len(self.others) < MAX_LATE + 2 * MAX_ATTEMPTS:
            self.others.append(Mark(Phase.REFUSED, time.monotonic(), 0.0))

    def end(self, error: str | None, outcome: Outcome = Outcome.FAILED) -> None:
        """The client has the whole answer, or an error, which is the ``outcome``."""
        self.ended_s = now_s = time.monotonic()
        self.waits += (now_s, self._run_queue.waited_s(now_s))
        if error is not None:
            self.error, self.status = error[:MAX_ERROR_CHARS], outcome.value
        else:
            self.status = "migrated" if self.num_migrations else "finished"

    @property
    def latency_ms(self) -> float:
        """Until its end, or until now."""
        return 1e3 * ((self.ended_s or time.monotonic()) - self.received_s)

    def marks(self) -> list[Mark]:
        """What this frontend has marked until now, in order."""
        return sorted(self._all_marks(), key=lambda mark: mark.at_s)

    def _all_marks(self) -> Iterator[Mark]:
        yield Mark(Phase.RECEIVED, self.received_s, 0.0)
        last = Phase.FINISHED if self.error is None else Phase.FAILED
        once = ((Phase.TOKENISED, self.tokenised_s), (Phase.FIRST_TOKEN, self.first_s), (last, self.ended_s))
        yield from (Mark(phase, at_s, 0.0) for phase, at_s in once if at_s)
        yield from self.others
        for number, attempt in enumerate(self.attempts):
            yield Mark(Phase.ROUTED, attempt.routed_s, number)
            yield from (Mark(Phase.HEARD, at_s, number) for at_s, _ in attempt.fields)
        yield from (Mark(Phase.RUN_QUEUE, at_s, value) for at_s, value in zip(self.waits[::2], self.waits[1::2]))
