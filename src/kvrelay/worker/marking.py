"""A worker's marks: of the requests that it decodes and of the prefills that it computes.

    decode side     by request id          engine and event loop
                    by hand-off id         claims, grants and transfers, before the request goes on; joined then
    prefill side    by hand-off id         engine, event loop and transfer thread

A worker that makes no marks has a ``WorkerMarks`` without a recorder: every call returns at once. Any thread may call.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from kvrelay.core.latest import Latest
from kvrelay.core.messages import TokenOutput
from kvrelay.core.status import RequestStatus
from kvrelay.engine.request import MoveListener, Request
from kvrelay.handoff.messages import HandoffDone, HandoffReady
from kvrelay.marks.phases import Phase, Role
from kvrelay.marks.recorder import Recorder
from kvrelay.marks.run_queue import RunQueue
from kvrelay.marks.travel import MAX_BYTES, ProcessMarks, encode

_PHASE_OF = {
    RequestStatus.WAITING: Phase.RECOMPUTED,
    RequestStatus.REMOTE_PREFILLING: Phase.PREFILL_QUEUED,
    RequestStatus.KV_HELD: Phase.HELD,
    RequestStatus.LOADING_KV: Phase.LOADING,
    RequestStatus.RUNNING: Phase.PREFILL_STARTED,
    RequestStatus.PREEMPTED: Phase.PREEMPTED,
    RequestStatus.PREFILL_SENDING: Phase.PREFILL_ENDED,
}
Announcement = TypeVar("Announcement", HandoffDone, HandoffReady)
MAX_ARRIVED = 1024
"""Hand-offs whose requests have not told their first token."""


class WorkerMarks:
    """Those of one worker process. ``is_on`` False: none are made."""

    def __init__(self, worker_id: str, *, is_on: bool) -> None:
        self._worker_id = worker_id
        self._recorder = Recorder() if is_on else None
        self._run_queue = RunQueue()
        self._arrived: Latest[str, tuple[Sequence[float], bytes]] = Latest(MAX_ARRIVED)
        """By request id: what we have marked of its hand-off, and what the prefill worker has told."""
        self.listener: MoveListener | None = self._moved if is_on else None

    def __repr__(self) -> str:
        return f"WorkerMarks({self._worker_id}, {self._recorder!r})"

    def watch(self) -> None:
        """The calling thread works on requests: the time that it waits for a core counts."""
        if self._recorder is not None:
            self._run_queue.watch()

    def close(self) -> None:
        self._run_queue.close()

    def add(self, key: str, phase: Phase, value: float = 0.0) -> None:
        """The request or hand-off of this id has reached ``phase``."""
        if self._recorder is not None:
            self._recorder.add(key, phase, time.monotonic(), value)

    def put(self, key: str, numbers: Sequence[float]) -> None:
        """Marks that an engine has made, as the recorder has them."""
        if self._recorder is not None:
            self._recorder.add(key, *numbers)

    def received(self, key: str, phase: Phase = Phase.RECEIVED) -> None:
        """The worker has begun to work for it."""
        if self._recorder is not None:
            now_s = time.monotonic()
            self._recorder.add(key, phase, now_s, 0.0, Phase.RUN_QUEUE, now_s, self._run_queue.waited_s(now_s))

    def posted(self, key: str, num_bytes: int = 0, num_descriptors: int = 0) -> None:
        """A hand-off's transfer is submitted. If it is the last one, with the sums over all of them."""
        self.add(key, Phase.TRANSFER_POSTED, num_bytes)
        if num_descriptors:
            self.add(key, Phase.DESCRIPTORS, num_descriptors)

    def forget(self, key: str) -> None:
        """It is over, and no message about it follows."""
        if self._recorder is not None:
            self._recorder.take(key)

    def _moved(self, request: Request, status: RequestStatus) -> None:
        """On the engine's thread."""
        phase = _PHASE_OF.get(status)
        if self._recorder is None or phase is None:
            return
        now_s, before = time.monotonic(), request.status
        if before is RequestStatus.REMOTE_PREFILLING and status is RequestStatus.RUNNING:
            phase = Phase.ATTACHED
        elif request.held_block_ids and status is RequestStatus.RUNNING:
            phase = Phase.RESUMED
        self._recorder.add(request.request_id, phase, now_s, 0.0)
        if before is RequestStatus.WAITING and request.placement is not None:
            placed = request.placement.decision
            if placed is not None and (placed.local_s or placed.remote_s):
                estimates = (Phase.LOCAL_ESTIMATE, now_s, placed.local_s, Phase.REMOTE_ESTIMATE, now_s, placed.remote_s)
                self._recorder.add(request.request_id, *estimates)

    # -- what travels -------------------------------------------------------------------------------------------------

    def of_prefill(self, message: Announcement) -> Announcement:
        """P: the message with our marks of this prefill."""
        if self._recorder is None:
            return message
        key, now_s = str(message.handoff_id), time.monotonic()
        self._recorder.add(key, Phase.RUN_QUEUE, now_s, self._run_queue.waited_s(now_s))
        marks = encode(ProcessMarks(self._worker_id, Role.PREFILL, self._recorder.read(key)))
        return msgspec.structs.replace(message, marks=marks)

    def arrived(self, request_id: str, message: HandoffDone | HandoffReady) -> None:
        """D: the request goes on with what ``message`` has announced. Before any output that follows."""
        if self._recorder is not None:
            self._arrived[request_id] = (self._recorder.take(str(message.handoff_id)), message.marks)

    def told(self, output: TokenOutput) -> TokenOutput:
        """D: a first or last output with all marks since the one before."""
        if self._recorder is None:
            return output
        key, now_s = output.request_id, time.monotonic()
        numbers = [Phase.SENT, now_s, 0.0, Phase.RUN_QUEUE, now_s, self._run_queue.waited_s(now_s)]
        numbers += self._recorder.take(key)
        others: tuple[bytes, ...] = ()
        if key in self._arrived:
            of_handoff, theirs = self._arrived.pop(key)
            numbers += of_handoff
            others = (theirs,)
        marks = encode(ProcessMarks(self._worker_id, Role.DECODE, numbers), *others)
        return output if len(marks) > MAX_BYTES else msgspec.structs.replace(output, marks=marks)
