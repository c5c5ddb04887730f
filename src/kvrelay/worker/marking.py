"""A worker's marks: of the requests that it decodes and of the prefills that it computes, in one ring.

    decode side     by request id          engine and event loop
                    by hand-off id         claims, grants and transfers, before the request goes on; joined then
    prefill side    by hand-off id         engine, event loop and transfer thread

A worker that makes no marks has a ``WorkerMarks`` without a ring: every call returns at once. Any thread may call.
"""

from __future__ import annotations

import msgspec

from kvrelay.core.latest import Latest
from kvrelay.core.messages import TokenOutput
from kvrelay.core.status import RequestStatus
from kvrelay.engine.request import MoveListener, Request
from kvrelay.handoff.messages import HandoffDone, HandoffReady
from kvrelay.marks.phases import Phase, Role
from kvrelay.marks.ring import Ring
from kvrelay.marks.run_queue import RunQueue
from kvrelay.marks.travel import MAX_BYTES, ProcessMarks, decode, encode

_PHASE_OF = {
    RequestStatus.WAITING: Phase.RECOMPUTED,
    RequestStatus.REMOTE_PREFILLING: Phase.PREFILL_QUEUED,
    RequestStatus.LOADING_KV: Phase.LOADING,
    RequestStatus.RUNNING: Phase.PREFILL_STARTED,
    RequestStatus.PREEMPTED: Phase.PREEMPTED,
    RequestStatus.PREFILL_SENDING: Phase.PREFILL_ENDED,
}
MAX_ARRIVED = 1024
"""Hand-offs whose requests have not told their first token."""


class WorkerMarks:
    """Those of one worker process. ``is_on`` False: none are made."""

    def __init__(self, worker_id: str, *, is_on: bool) -> None:
        self._worker_id = worker_id
        self._ring = Ring() if is_on else None
        self._run_queue = RunQueue()
        self._arrived: Latest[str, tuple[bytes, bytes]] = Latest(MAX_ARRIVED)
        """By request id: what we have marked of its hand-off, and what the prefill worker has told."""
        self.listener: MoveListener | None = self._moved if is_on else None

    def __repr__(self) -> str:
        return f"WorkerMarks({self._worker_id}, {self._ring!r})"

    @property
    def is_on(self) -> bool:
        return self._ring is not None

    def watch(self) -> None:
        """The calling thread works on requests: the time that it waits for a core counts."""
        if self._ring is not None:
            self._run_queue.watch()

    def close(self) -> None:
        self._run_queue.close()

    def add(self, key: str, phase: Phase, value: float = 0.0) -> None:
        """The request or hand-off of this id has reached ``phase``."""
        if self._ring is not None:
            self._ring.add(key, phase, value)

    def received(self, key: str, phase: Phase = Phase.RECEIVED) -> None:
        """The worker has begun to work for it."""
        if self._ring is not None:
            self._ring.add(key, phase)
            self._ring.add(key, Phase.RUN_QUEUE, self._run_queue.waited_s())

    def posted(self, key: str, num_bytes: int = 0, num_descriptors: int = 0) -> None:
        """A hand-off's transfer is submitted. If it is the last one, with the sums over all of them."""
        self.add(key, Phase.TRANSFER_POSTED, num_bytes)
        if num_descriptors:
            self.add(key, Phase.DESCRIPTORS, num_descriptors)

    def forget(self, key: str) -> None:
        """It is over, and no message about it follows."""
        if self._ring is not None:
            self._ring.take(key)

    def _moved(self, request: Request, status: RequestStatus) -> None:
        """On the engine's thread."""
        phase = _PHASE_OF.get(status)
        if self._ring is None or phase is None:
            return
        key, before = request.request_id, request.status
        if before is RequestStatus.WAITING and request.placement is not None:
            decision = request.placement.decision
            self._ring.add(key, Phase.PLACED, float(status is RequestStatus.REMOTE_PREFILLING))
            if decision is not None and (decision.local_s or decision.remote_s):
                self._ring.add(key, Phase.LOCAL_ESTIMATE, decision.local_s)
                self._ring.add(key, Phase.REMOTE_ESTIMATE, decision.remote_s)
        is_attached = before is RequestStatus.REMOTE_PREFILLING and status is RequestStatus.RUNNING
        self._ring.add(key, Phase.ATTACHED if is_attached else phase)

    # -- what travels -------------------------------------------------------------------------------------------------

    def of_prefill(self, message: HandoffDone | HandoffReady) -> HandoffDone | HandoffReady:
        """P: the message with our marks of this prefill."""
        if self._ring is None:
            return message
        key = str(message.handoff_id)
        self._ring.add(key, Phase.RUN_QUEUE, self._run_queue.waited_s())
        ours = ProcessMarks(self._worker_id, Role.PREFILL, self._ring.read(key))
        return msgspec.structs.replace(message, marks=encode((ours,)))

    def arrived(self, request_id: str, message: HandoffDone | HandoffReady) -> None:
        """D: the request goes on with what ``message`` has announced."""
        if self._ring is not None:
            self._arrived[request_id] = (self._ring.take(str(message.handoff_id)), message.marks)

    def told(self, output: TokenOutput) -> TokenOutput:
        """D: a first or last output with all marks since the one before."""
        if self._ring is None:
            return output
        key = output.request_id
        self._ring.add(key, Phase.SENT)
        self._ring.add(key, Phase.RUN_QUEUE, self._run_queue.waited_s())
        of_handoff, theirs = self._arrived.pop(key, (b"", b""))
        ours = ProcessMarks(self._worker_id, Role.DECODE, of_handoff + self._ring.take(key))
        marks = encode((ours, *decode(theirs)))
        return output if len(marks) > MAX_BYTES else msgspec.structs.replace(output, marks=marks)
