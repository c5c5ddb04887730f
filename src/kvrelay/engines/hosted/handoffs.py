"""The hand-offs of a hosted engine: what they share, and those whose KV the backends move by themselves.

``RemotePrefills``, decode side: requests whose prompts a prefill worker's backend computes, until the KV has come or is
computed here. Pure; not thread-safe.

    open ──> WAITING ──fetch──> FETCHING ──arrived──> (forgotten: a request like any other)
                ^  │                │
                │  └──── take ──────┴──> (forgotten: the KV is in the staging pool, or is computed here)
                └────── failed ─────┘    the ledger then has it computed here

Hand-offs whose KV goes through blocks of this worker are in ``staged.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from kvrelay.core.handoff import HandoffId
from kvrelay.core.latest import Latest
from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.engine.loans import HandoffIds, remote_prefill
from kvrelay.engine.request import Request
from kvrelay.engine.scheduler import RemotePrefills as SentPrefills
from kvrelay.engine.step import StepOutput
from kvrelay.marks.phases import Phase

MAX_UNREPORTED = 1024


class Requests(Protocol):
    """What hand-offs need of the engine that has the requests."""

    output: StepOutput

    def attach(self, request: Request) -> None:
        """The backend gets KV for this request now, or the parameters to get some."""

    def ask(
        self, request: Request, kv_transfer_params: bytes | None = None, at_rest: Callable[[], None] | None = None
    ) -> None:
        """Have the backend generate the rest of the answer. ``at_rest``: as in ``BackendCalls.start``."""

    def ask_prefill(
        self, request: Request, kv_transfer_params: bytes | None = None, at_rest: Callable[[], None] | None = None
    ) -> None:
        """Have the backend compute the KV of a prompt."""

    def take_first(self, request: Request, token_id: int, logprobs: PositionLogprobs | None) -> bool:
        """The prefill worker's first token, before those of the backend. Whether the answer ends with it."""

    def compute_handoff_here(self, handoff_id: HandoffId) -> None: ...

    def discard(self, kv_transfer_params: bytes) -> None:
        """Have the backend that keeps this KV free it."""

    def num_cached_blocks(self, request: Request) -> int:
        """With which the backend, if a peer fills the blocks after them, can go on."""

    def mark_now(self, request: Request, phase: Phase, value: float = 0.0) -> None: ...


class RemotePrefills:
    """``worker_id``: this worker's, which names its hand-offs. Every ``fetch`` is followed by exactly one entry in
    ``StepOutput.fetched_handoffs``."""

    def __init__(self, worker_id: str) -> None:
        self._ids = HandoffIds(worker_id)
        self._requests: dict[HandoffId, Request] = {}
        self._handoffs: dict[str, HandoffId] = {}
        """By request id."""
        self._fetching: set[HandoffId] = set()

    def id_of(self, request: Request) -> HandoffId:
        return self._handoffs.get(request.request_id) or self._ids.of(request)

    def open(self, request: Request) -> HandoffId:
        """The request waits for its KV."""
        handoff_id = self._ids.of(request)
        self._requests[handoff_id] = request
        self._handoffs[request.request_id] = handoff_id
        return handoff_id

    def request_of(self, handoff_id: HandoffId) -> Request | None:
        """The request that waits; None if none does."""
        return self._requests.get(handoff_id)

    def fetch(self, handoff_id: HandoffId) -> Request | None:
        """The request that is to be given to the backend, with the parameters of its KV; None if none waits."""
        request = self._requests.get(handoff_id)
        if request is None or handoff_id in self._fetching:
            return None
        self._fetching.add(handoff_id)
        return request

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

    def take(self, handoff_id: HandoffId, output: StepOutput) -> Request | None:
        """The request goes on without a fetch; None if none waits. A fetch is over."""
        request = self._requests.get(handoff_id)
        if request is not None:
            self._forget(handoff_id, output, ok=False)
        return request

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
        del self._handoffs[self._requests.pop(handoff_id).request_id]

    def _end_fetch(self, handoff_id: HandoffId, output: StepOutput, *, ok: bool) -> None:
        if handoff_id in self._fetching:
            self._fetching.discard(handoff_id)
            output.fetched_handoffs.append((handoff_id, ok))


class Handoffs(ABC):
    """Decode side: a request waits for its KV from ``open`` until ``came``, ``take`` or ``ended``. Prefill side: a
    prompt is computed from ``compute`` on, and its KV is kept until ``sent``. ``prefills``: those that this worker's
    own queue has sent away."""

    def __init__(self, worker_id: str, requests: Requests, prefills: SentPrefills) -> None:
        self._remote = RemotePrefills(worker_id)
        self._requests = requests
        self._prefills = prefills

    # -- decode side --------------------------------------------------------------------------------------------------

    @abstractmethod
    def open(self, request: Request) -> None:
        """The request waits for its KV."""

    @abstractmethod
    def came(self, request: Request) -> bool:
        """A piece of its answer is there. Whether it is the first one after KV that has come from elsewhere."""

    def failed(self, request_id: str) -> bool:
        """The backend answers this request with an error. Whether only its KV is lost: its hand-off decides then."""
        return self._remote.failed(request_id, self._requests.output)

    def take(self, handoff_id: HandoffId) -> Request | None:
        """The request goes on without a fetch; None if none waits."""
        return self._remote.take(handoff_id, self._requests.output)

    def ended(self, request_id: str) -> None:
        """The request has ended by itself, perhaps in its hand-off."""
        self._remote.ended(request_id, self._requests.output)

    def keep_here(self) -> None:  # noqa: B027 - nothing, where workers have no blocks
        """No prefill worker is left. Requests that no one can have claimed are computed here at once, others one by
        one."""

    # -- prefill side -------------------------------------------------------------------------------------------------

    @abstractmethod
    def compute(self, request: Request) -> None: ...

    def rest(self, request: Request) -> tuple[int, ...]:
        """The backend has the whole prompt's KV. The blocks with what was not sent yet."""
        return ()

    def sent(self, request_id: str) -> None:  # noqa: B027 - nothing, where workers have no blocks
        """No transfer touches the KV of this hand-off any more."""

    # -- both sides ---------------------------------------------------------------------------------------------------

    def num_active_blocks(self, num_blocks: int) -> int:
        """As many of the backend's ``num_blocks`` blocks as hand-offs make busy."""
        return 0

    def check_integrity(self) -> None:  # noqa: B027 - nothing, where workers have no blocks
        """Raise IntegrityError unless every block is where it belongs."""


class MovedHandoffs(Handoffs):
    """The KV goes from backend to backend, which get ``kv_transfer_params``. A ``MovesKv``."""

    def __init__(self, worker_id: str, requests: Requests, prefills: SentPrefills) -> None:
        super().__init__(worker_id, requests, prefills)
        self._unreported: Latest[str, Callable[[], None]] = Latest(MAX_UNREPORTED)
        """Prefills that have come back, until the worker has told how long they were computed."""

    def open(self, request: Request) -> None:
        handoff_id = self._remote.open(request)
        self._requests.mark_now(request, Phase.PREFILL_QUEUED)
        self._requests.output.remote_prefills.append(remote_prefill(request, handoff_id, request.sampling))

    def came(self, request: Request) -> bool:
        is_remote = self._remote.arrived(request.request_id, self._requests.output)
        if is_remote and (report := self._prefills.arrived(request)) is not None:
            self._unreported[request.request_id] = report
        return is_remote

    def fetch_handoff(self, handoff_id: HandoffId, kv_transfer_params: bytes) -> bool:
        request = self._remote.fetch(handoff_id)
        if request is None:
            return False
        self._requests.attach(request)
        self._requests.ask(request, kv_transfer_params)
        return True

    def handoff_told(self, request_id: str) -> None:
        report = self._unreported.pop(request_id, None)
        if report is not None:
            report()

    def discard_kv(self, kv_transfer_params: bytes) -> None:
        self._requests.discard(kv_transfer_params)

    def compute(self, request: Request) -> None:
        self._requests.ask_prefill(request)
