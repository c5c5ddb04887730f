"""Decode side: requests whose prompts a prefill worker's backend computes, until the KV has come or is computed here.

    open ──> WAITING ──fetch──> FETCHING ──arrived──> (forgotten: a request like any other)
                ^  │                │
                │  └─ compute_here ─┴──> (forgotten: the backend computes the prompt)
                └────── failed ─────┘    the ledger then has it computed here

Every ``fetch`` is followed by exactly one entry in ``StepOutput.fetched_handoffs``. Not thread-safe; pure.
"""

from __future__ import annotations

from kvrelay.core.handoff import HandoffId
from kvrelay.engine.loans import HandoffIds, remote_prefill
from kvrelay.engine.request import Request
from kvrelay.engine.step import StepOutput


class RemotePrefills:
    """``worker_id``: this worker's, which names its hand-offs."""

    def __init__(self, worker_id: str) -> None:
        self._ids = HandoffIds(worker_id)
        self._requests: dict[HandoffId, str] = {}
        self._handoffs: dict[str, HandoffId] = {}
        self._fetching: set[HandoffId] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def open(self, request: Request, output: StepOutput) -> None:
        """The request waits for its KV. Its hand-off has no blocks."""
        handoff_id = self._ids.of(request)
        self._requests[handoff_id] = request.request_id
        self._handoffs[request.request_id] = handoff_id
        output.remote_prefills.append(remote_prefill(request, handoff_id, request.sampling))

    def fetch(self, handoff_id: HandoffId) -> str | None:
        """The request that is to be given to the backend, with the parameters of its KV; None if none waits."""
        request_id = self._requests.get(handoff_id)
        if request_id is None or handoff_id in self._fetching:
            return None
        self._fetching.add(handoff_id)
        return request_id

    def arrived(self, request_id: str, output: StepOutput) -> bool:
        """The backend has the KV: its first token is there. False if it did not fetch any."""
        handoff_id = self._fetched_by(request_id)
        if handoff_id is None:
            return False
        self._forget(handoff_id, output, ok=True)
        return True

    def failed(self, request_id: str, output: StepOutput) -> bool:
        """The backend has not got the KV. The request waits again; False if the backend did not fetch any."""
        handoff_id = self._fetched_by(request_id)
        if handoff_id is None:
            return False
        self._end_fetch(handoff_id, output, ok=False)
        return True

    def compute_here(self, handoff_id: HandoffId, output: StepOutput) -> str | None:
        """The request that is to be computed here; None if none waits. A fetch is over."""
        request_id = self._requests.get(handoff_id)
        if request_id is not None:
            self._forget(handoff_id, output, ok=False)
        return request_id

    def ended(self, request_id: str, output: StepOutput) -> None:
        """The request has ended by itself."""
        handoff_id = self._handoffs.get(request_id)
        if handoff_id is not None:
            output.closed_handoffs.append(handoff_id)
            self._forget(handoff_id, output, ok=False)

    def _fetched_by(self, request_id: str) -> HandoffId | None:
        """The hand-off whose KV the backend gets for this request."""
        handoff_id = self._handoffs.get(request_id)
        return handoff_id if handoff_id in self._fetching else None

    def _forget(self, handoff_id: HandoffId, output: StepOutput, *, ok: bool) -> None:
        self._end_fetch(handoff_id, output, ok=ok)
        del self._handoffs[self._requests.pop(handoff_id)]

    def _end_fetch(self, handoff_id: HandoffId, output: StepOutput, *, ok: bool) -> None:
        if handoff_id in self._fetching:
            self._fetching.discard(handoff_id)
            output.fetched_handoffs.append((handoff_id, ok))
