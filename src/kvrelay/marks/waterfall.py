"""The waterfall of one request: the marks of all its processes on its frontend's clock, as spans that add up to its
latency. Pure.

A span is the time between two marks, by the tables below. What no span covers is ``unattributed``: it is computed and
shown, never spread over others. A span that ends before it begins is shown as it is, with a note: the clocks of two
machines are known only so well.

    local      tokenise route send admit wait prefill ─────────────────────────────────────────── deliver  answer
    remote     tokenise route send admit wait queue prepare prefill hand_over transfer attach report deliver answer
                                                      claim        (beside the prefill)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import msgspec

from kvrelay.marks.clocks import SAME, Message, Offset, offset_of, times
from kvrelay.marks.phases import Phase, Role
from kvrelay.marks.recorder import Mark, marks_of
from kvrelay.marks.trace import Attempt, Trace
from kvrelay.marks.travel import decode

_P = Phase
Table = Mapping[Phase, Mapping[Phase, str]]

AT_FRONTEND: Table = {
    _P.RECEIVED: {_P.TOKENISED: "tokenise"},
    _P.TOKENISED: {_P.ROUTED: "route"},
    _P.MIGRATED: {_P.ROUTED: "move"},
    _P.ROUTED: {_P.REFUSED: "refuse"},
    _P.REFUSED: {_P.ROUTED: "route"},
    _P.FIRST_TOKEN: {_P.FINISHED: "answer", _P.FAILED: "answer"},
}
AT_DECODE: Table = {
    _P.RECEIVED: {_P.ADMITTED: "admit"},
    _P.ADMITTED: {_P.PREFILL_STARTED: "wait", _P.PREFILL_QUEUED: "wait", _P.LOADING: "wait", _P.TAKEN_IN: "submit"},
    _P.TAKEN_IN: {_P.LOADING: "wait", _P.PREFILL_STARTED: "wait"},
    _P.PREFILL_QUEUED: {_P.RECOMPUTED: "lost"},
    _P.RECOMPUTED: {_P.TAKEN_IN: "submit", _P.PREFILL_STARTED: "wait", _P.LOADING: "wait"},
    _P.CLAIM_HEARD: {_P.GRANTED: "grant"},
    _P.TRANSFER_POSTED: {_P.TRANSFER_ENDED: "transfer"},
    _P.TRANSFER_ENDED: {_P.ATTACHED: "attach", _P.HELD: "attach"},
    _P.HELD: {_P.SENT: "report"},
    _P.ATTACHED: {_P.TAKEN_IN: "submit", _P.FETCHING: "submit", _P.SENT: "report"},
    _P.FETCHING: {_P.PREFILL_STARTED: "fetch"},
    _P.LOADING: {_P.LOADED: "load", _P.PREFILL_STARTED: "load", _P.RESUMED: "load"},
    _P.LOADED: {_P.PREFILL_STARTED: "wait"},
    _P.PREFILL_STARTED: {_P.SAMPLED: "prefill", _P.RESUMED: "resume", _P.SENT: "prefill"},
    _P.SAMPLED: {_P.SENT: "report", _P.PREEMPTED: "decode"},
    _P.SENT: {_P.TAKEN_IN: "submit", _P.PREEMPTED: "decode", _P.LOADING: "held", _P.RESUMED: "held", _P.SENT: "decode"},
    _P.PREEMPTED: {_P.RESUMED: "preempted", _P.PREFILL_STARTED: "preempted", _P.LOADING: "preempted"},
    _P.RESUMED: {_P.PREEMPTED: "decode", _P.SENT: "decode"},
}
AT_PREFILL: Table = {
    _P.PULLED: {_P.LOADING: "prepare", _P.PREFILL_STARTED: "prepare", _P.TAKEN_IN: "prepare"},
    _P.RECEIVED: {_P.LOADING: "prepare", _P.PREFILL_STARTED: "prepare", _P.TAKEN_IN: "prepare"},
    _P.LOADING: {_P.PREFILL_STARTED: "load"},
    _P.TAKEN_IN: {_P.PREFILL_STARTED: "wait"},
    _P.CLAIMED: {_P.GRANT_HEARD: "claim"},
    _P.PREFILL_STARTED: {_P.PREFILL_ENDED: "prefill"},
    _P.PREFILL_ENDED: {_P.TRANSFER_POSTED: "hand_over", _P.SAVED: "save"},
    _P.SAVED: {_P.TRANSFER_POSTED: "hand_over"},
}
"""Within one process: from the last mark of a phase to the next one of each that may follow it. Of several, the first
one counts."""
POINTS = {
    *(_P.RECEIVED, _P.LATE_TOKEN, _P.MIGRATED, _P.REFUSED, _P.FIRST_TOKEN, _P.FINISHED, _P.FAILED, _P.FIRST_BYTES),
    _P.SAVED,
}
"""Shown as points, too."""
SENT_BY_FRONTEND: tuple[Message, ...] = ((_P.ROUTED, _P.RECEIVED),)
HEARD_BY_FRONTEND: tuple[Message, ...] = ((_P.SENT, _P.HEARD),)
SENT_BY_DECODE: tuple[Message, ...] = ((_P.GRANTED, _P.GRANT_HEARD), (_P.PREFILL_QUEUED, _P.PULLED))
HEARD_BY_DECODE: tuple[Message, ...] = ((_P.CLAIMED, _P.CLAIM_HEARD),)
MS = 1e3
SHORTEST_RUN_QUEUE_MS = 0.01


class Process(msgspec.Struct, frozen=True):
    """``clock_uncertainty_ms`` None: its clock could not be compared, so its spans are guesses."""

    name: str
    role: str
    has_marks: bool
    clock_uncertainty_ms: float | None


class Span(msgspec.Struct, frozen=True):
    """Times are relative to ``received``; a point has start and end equal. ``value``: milliseconds waited for
    ``run_queue``, bytes for ``transfer`` and ``saved``, seconds for ``late_token``, tokens for ``migrated``."""

    process: str
    phase: str
    start_ms: float
    end_ms: float
    value: float | None = None
    note: str | None = None


class Summary(msgspec.Struct, frozen=True):
    """A line of the list."""

    id: str
    model: str
    received_unix: float
    latency_ms: float
    ttft_ms: float | None
    status: str
    place: str | None
    prompt_tokens: int
    output_tokens: int
    frontend: str
    error: str | None


class Estimates(msgspec.Struct, frozen=True):
    local_s: float
    remote_s: float


class Moved(msgspec.Struct, frozen=True):
    """What was transferred."""

    bytes: int
    descriptors: int


class Drafts(msgspec.Struct, frozen=True):
    """Tokens that speculative decoding drafted for the answer, and how many of them the model accepted."""

    drafted: int
    accepted: int


class Waterfall(Summary, frozen=True):
    processes: list[Process]
    spans: list[Span]
    unattributed_ms: float
    estimates: Estimates | None
    transfer: Moved | None
    drafts: Drafts | None = None


class _Worker(msgspec.Struct):
    """A worker's marks on its own clock, and its offset from the frontend's."""

    name: str
    role: Role
    marks: list[Mark]
    offset: Offset = SAME


def summary(trace: Trace, frontend: str) -> Summary:
    """A request in a line."""
    return _line(trace, frontend, map(_workers, trace.attempts))


def _line(trace: Trace, frontend: str, attempts: Iterable[Sequence[_Worker]]) -> Summary:
    return Summary(
        id=trace.request_id,
        model=trace.model,
        received_unix=trace.received_unix,
        latency_ms=trace.latency_ms,
        ttft_ms=(trace.first_s - trace.received_s) * MS if trace.first_s else None,
        status=trace.status,
        place=_place(attempts),
        prompt_tokens=trace.prompt_tokens,
        output_tokens=trace.output_tokens,
        frontend=frontend,
        error=trace.error,
    )


def waterfall(trace: Trace, frontend: str) -> Waterfall:
    """The request's phases until its end, or until now."""
    attempts = [_workers(attempt) for attempt in trace.attempts]
    line = _line(trace, frontend, attempts)
    own = trace.marks()
    found = _Spans(trace.received_s)
    processes = [Process(frontend, Role.FRONTEND, has_marks=True, clock_uncertainty_ms=0.0)]
    found.process(_Worker(frontend, Role.FRONTEND, own), AT_FRONTEND)
    marks: list[Mark] = []
    for number, workers in enumerate(attempts):
        ours = [mark for mark in own if mark.phase not in (_P.ROUTED, _P.HEARD) or mark.value == number]
        found.attempt(ours, workers)
        marks += (mark for worker in workers for mark in worker.marks)
        processes += _processes(workers)
    return Waterfall(
        **msgspec.structs.asdict(line),
        processes=list({process.name: process for process in processes}.values()),
        spans=sorted(found.spans, key=lambda span: (span.start_ms, span.end_ms)),
        unattributed_ms=max(line.latency_ms - sum(phases_until(found.spans, line.latency_ms).values()), 0.0),
        estimates=_estimates(marks),
        transfer=_moved(marks),
        drafts=_drafts(marks),
    )


def _workers(attempt: Attempt) -> list[_Worker]:
    """The decode worker first. A prefill worker that has told nothing has no marks."""
    found = {attempt.worker_id: _Worker(attempt.worker_id, Role.DECODE, [])}
    if attempt.prefill_id:
        found[attempt.prefill_id] = _Worker(attempt.prefill_id, Role.PREFILL, [])
    for process in (process for _, field in attempt.fields for process in decode(field)):
        worker = found.setdefault(process.name, _Worker(process.name, process.role, []))
        worker.marks = sorted(worker.marks + marks_of(process.numbers), key=lambda mark: mark.at_s)
    return list(found.values())


def _processes(workers: Sequence[_Worker]) -> list[Process]:
    shown = []
    for worker in workers:
        uncertainty_s = worker.offset.uncertainty_s
        uncertainty_ms = None if uncertainty_s is None else uncertainty_s * MS
        shown.append(Process(worker.name, worker.role, bool(worker.marks), uncertainty_ms))
    return shown


class _Spans:
    """The spans found so far. ``origin_s``: the frontend's clock when the request came."""

    def __init__(self, origin_s: float) -> None:
        self._origin_s = origin_s
        self.spans: list[Span] = []

    def attempt(self, ours: list[Mark], workers: Sequence[_Worker]) -> None:
        """Those of one attempt's workers, and between them; sets their offsets."""
        decode_worker, *others = workers
        decode_worker.offset = offset_of(ours, decode_worker.marks, SENT_BY_FRONTEND, HEARD_BY_FRONTEND) or SAME
        frontend = _Worker("", Role.FRONTEND, ours)
        self.between("send", frontend, _P.ROUTED, decode_worker, _P.RECEIVED)
        self.process(decode_worker, AT_DECODE)
        self.between("deliver", decode_worker, _P.SENT, frontend, _P.HEARD)
        phases = {mark.phase for mark in decode_worker.marks}
        if _P.ADMITTED in phases and not phases & {_P.PREFILL_STARTED, _P.PREFILL_QUEUED, _P.ATTACHED}:
            self.between("engine", decode_worker, _P.ADMITTED, decode_worker, _P.SENT)
        if _P.PREFILL_QUEUED in phases and not any(other.marks for other in others):
            note = "the prefill worker has told no marks"
            self.between("remote", decode_worker, _P.PREFILL_QUEUED, decode_worker, _P.ATTACHED, note=note)
        for other in others:
            self.prefill(frontend, decode_worker, other)

    def prefill(self, frontend: _Worker, decode_worker: _Worker, worker: _Worker) -> None:
        """Those of the prefill worker."""
        by_decode = offset_of(decode_worker.marks, worker.marks, SENT_BY_DECODE, HEARD_BY_DECODE)
        if by_decode is not None:
            both = (by_decode.uncertainty_s, decode_worker.offset.uncertainty_s)
            uncertainty_s = None if None in both else sum(each or 0.0 for each in both)
            worker.offset = Offset(by_decode.seconds + decode_worker.offset.seconds, uncertainty_s)
        self.between("send", frontend, _P.ROUTED, worker, _P.RECEIVED)
        self.between("queue", decode_worker, _P.PREFILL_QUEUED, worker, _P.PULLED)
        self.process(worker, AT_PREFILL)
        num_bytes = sum(mark.value for mark in worker.marks if mark.phase is _P.TRANSFER_POSTED)
        self.between("transfer", worker, _P.TRANSFER_POSTED, decode_worker, _P.TRANSFER_ENDED, num_bytes or None)
        phases = {mark.phase for mark in worker.marks}
        if _P.PREFILL_ENDED in phases and _P.TRANSFER_POSTED not in phases:
            # The engines move the KV: the decode worker hears that it is there.
            self.between("hand_over", worker, _P.PREFILL_ENDED, decode_worker, _P.ATTACHED)
        if _P.RECEIVED in phases:
            self.between("deliver", worker, _P.PREFILL_ENDED, frontend, _P.FIRST_TOKEN)

    def process(self, worker: _Worker, table: Table) -> None:
        """Those within one process: from a phase to the first of those that the table has after it."""
        for begin, after in table.items():
            for end, name in after.items():
                self._follow(worker, begin, end, name, after.keys() - {end})
        waited: Mark | None = None
        for mark in worker.marks:
            at_s = mark.at_s + worker.offset.seconds
            if mark.phase in POINTS:
                self._add(worker, mark.phase.name.lower(), at_s, at_s, mark.value or None)
            elif mark.phase is _P.RUN_QUEUE:
                if waited is not None and (waited_ms := (mark.value - waited.value) * MS) >= SHORTEST_RUN_QUEUE_MS:
                    self._add(worker, "run_queue", waited.at_s + worker.offset.seconds, at_s, waited_ms)
                waited = mark

    def _follow(self, worker: _Worker, begin: Phase, end: Phase, name: str, others: Set[Phase]) -> None:
        """From ``begin`` to ``end``, unless one of ``others`` comes sooner."""
        sooner = [mark for mark in worker.marks if mark.phase in others]
        for start_s, end_s in _next_pairs(worker.marks, begin, end):
            # The phase itself may also be what follows: then not at its own time.
            if not any(start_s <= m.at_s < end_s and (m.phase is not begin or m.at_s > start_s) for m in sooner):
                self._add(worker, name, start_s + worker.offset.seconds, end_s + worker.offset.seconds)

    def between(
        self,
        name: str,
        source: _Worker,
        begin: Phase,
        target: _Worker,
        end: Phase,
        value: float | None = None,
        note: str | None = None,
    ) -> None:
        """From one process to another: the first of each phase, and again for what was sent and heard twice."""
        starts, ends = times(source.marks, begin), times(target.marks, end)
        pairs = zip(starts, ends) if name == "deliver" else list(zip(starts, ends))[:1]
        shown = target if target.name else source
        for start_s, end_s in pairs:
            self._add(shown, name, start_s + source.offset.seconds, end_s + target.offset.seconds, value, note)

    def _add(
        self,
        worker: _Worker,
        name: str,
        start_s: float,
        end_s: float,
        value: float | None = None,
        note: str | None = None,
    ) -> None:
        start_ms, end_ms = (start_s - self._origin_s) * MS, (end_s - self._origin_s) * MS
        if end_s < start_s:
            note = "negative: the clocks of the two processes do not agree better"
        self.spans.append(Span(worker.name, name, start_ms, end_ms, value, note))


def _next_pairs(marks: Iterable[Mark], begin: Phase, end: Phase) -> Iterator[tuple[float, float]]:
    """Each mark of ``end`` with the last one of ``begin`` before it, which it uses up."""
    started: float | None = None
    for mark in marks:
        if mark.phase is end and started is not None:
            yield started, mark.at_s
            started = None
        if mark.phase is begin:
            started = mark.at_s


def phases_until(spans: Iterable[Span], end_ms: float) -> dict[str, float]:
    """Milliseconds of [0, end] by phase. Of phases that overlap, the one that began first counts, so the sum is what
    any span covers. Waiting for a core is part of other spans."""
    found: dict[str, float] = {}
    reached_ms = 0.0
    for span in sorted((span for span in spans if span.phase != "run_queue"), key=lambda span: span.start_ms):
        start_ms, stop_ms = max(span.start_ms, reached_ms), min(span.end_ms, end_ms)
        if stop_ms > start_ms:
            found[span.phase] = found.get(span.phase, 0.0) + stop_ms - start_ms
        reached_ms = max(reached_ms, stop_ms)
    return found


def _place(attempts: Iterable[Sequence[_Worker]]) -> str | None:
    """Of the last prefill that began."""
    place = None
    for worker in (worker for workers in attempts for worker in workers):
        phases = {mark.phase for mark in worker.marks} if worker.role is Role.DECODE else ()
        if _P.ATTACHED in phases or _P.HELD in phases:
            place = "remote"
        elif _P.PREFILL_STARTED in phases:
            place = "local"
    return place


def _estimates(marks: Iterable[Mark]) -> Estimates | None:
    last = {mark.phase: mark.value for mark in marks}
    if _P.LOCAL_ESTIMATE in last and _P.REMOTE_ESTIMATE in last:
        return Estimates(last[_P.LOCAL_ESTIMATE], last[_P.REMOTE_ESTIMATE])
    return None


def _moved(marks: Sequence[Mark]) -> Moved | None:
    num_bytes, num_descriptors = _sum(marks, _P.TRANSFER_POSTED), _sum(marks, _P.DESCRIPTORS)
    return Moved(num_bytes, num_descriptors) if num_descriptors else None


def _drafts(marks: Sequence[Mark]) -> Drafts | None:
    num_drafted = _sum(marks, _P.DRAFTED)
    return Drafts(num_drafted, _sum(marks, _P.ACCEPTED)) if num_drafted else None


def _sum(marks: Sequence[Mark], phase: Phase) -> int:
    return int(sum(mark.value for mark in marks if mark.phase is phase))
