"""The hand-offs of a hosted engine, by what waits for what. Pure; not thread-safe.

``RemotePrefills``, decode side: requests whose prompts a prefill worker's backend computes, until the KV has come or is
computed here.

    open ──> WAITING ──fetch──> FETCHING ──arrived──> (forgotten: a request like any other)
                ^  │                │
                │  └──── take ──────┴──> (forgotten: the KV is in the staging pool, or is computed here)
                └────── failed ─────┘    the ledger then has it computed here

``StagedHandoffs``: with a staging pool, the blocks through which the KV of a request goes.

    decode side     blocks are lent to the hand-off ── peer writes ──> resume_handoff ── backend loads ──> first piece
    prefill side    backend computes and saves ──> HandoffChunks ── peer gets them ──> sending_finished
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from kvrelay.core.handoff import HandoffId
from kvrelay.engine.loans import HandoffIds
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engine.step import StepOutput
from kvrelay.engines.hosted.staging import StagedBlocks, StagingBlocks


class RemotePrefills:
    """``worker_id``: this worker's, which names its hand-offs. Every ``fetch`` is followed by exactly one entry in
    ``StepOutput.fetched_handoffs``."""

    def __init__(self, worker_id: str) -> None:
        self._ids = HandoffIds(worker_id)
        self._requests: dict[HandoffId, str] = {}
        self._handoffs: dict[str, HandoffId] = {}
        self._fetching: set[HandoffId] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def open(self, request: Request) -> HandoffId:
        """The request waits for its KV."""
        handoff_id = self._ids.of(request)
        self._requests[handoff_id] = request.request_id
        self._handoffs[request.request_id] = handoff_id
        return handoff_id

    def handoff_of(self, request_id: str) -> HandoffId:
        return self._handoffs[request_id]

    def request_of(self, handoff_id: HandoffId) -> str | None:
        """The request that waits; None if none does."""
        return self._requests.get(handoff_id)

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

    def take(self, handoff_id: HandoffId, output: StepOutput) -> str | None:
        """The request goes on without a fetch; None if none waits. A fetch is over."""
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


class StagedHandoffs:
    """A request that needs more blocks than are free waits for them, first come, first served: after blocks were freed
    ``serve`` is called until it gives None. ``block_size``: tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = StagingBlocks(num_blocks)
        self._block_size = block_size
        self._waiting: deque[Request] = deque()
        self._loans: dict[tuple[HandoffId, int], StagedBlocks] = {}
        self._loading: dict[str, StagedBlocks] = {}
        """Decode side: requests at the backend, until it has their KV."""
        self._sending: dict[str, StagedBlocks] = {}
        """Prefill side: until the hand-off's ledger says that no transfer touches them."""
        self._at_backend: set[StagedBlocks] = set()
        """Those that the backend loads from, or saves to."""

    def can_hold(self, request: Request) -> bool:
        return self._num_blocks_of(request) <= self.pool.num_blocks

    def wait(self, request: Request) -> None:
        self._waiting.append(request)

    def serve(self) -> tuple[Request, StagedBlocks] | None:
        """The next request that waits, with its blocks; None if there is none, or too few blocks are free."""
        blocks = self.pool.take(self._num_blocks_of(self._waiting[0])) if self._waiting else None
        return None if blocks is None else (self._waiting.popleft(), blocks)

    def waiting(self, mode: PrefillMode) -> list[Request]:
        return [request for request in self._waiting if request.mode is mode]

    def forget(self, request_id: str) -> None:
        """The request waits for no blocks and for no load any more."""
        self._loading.pop(request_id, None)
        self._waiting = deque(request for request in self._waiting if request.request_id != request_id)

    # -- decode side --------------------------------------------------------------------------------------------------

    def lend(self, handoff_id: HandoffId, loan: int, blocks: StagedBlocks) -> None:
        self._loans[handoff_id, loan] = blocks

    def lend_fresh(self, handoff_id: HandoffId, loan: int, request: Request) -> tuple[int, ...] | None:
        """Other blocks for the same request; None if too few are free."""
        blocks = self.pool.take(self._num_blocks_of(request))
        if blocks is None:
            return None
        self._loans[handoff_id, loan] = blocks
        return blocks.block_ids

    def lent(self, handoff_id: HandoffId, loan: int) -> StagedBlocks | None:
        return self._loans.get((handoff_id, loan))

    def end_loan(self, handoff_id: HandoffId, loan: int) -> None:
        self.pool.release(self._loans.pop((handoff_id, loan)))

    def writable(self) -> Mapping[tuple[HandoffId, int], tuple[int, ...]]:
        """From any thread."""
        return {loan: blocks.block_ids for loan, blocks in self._loans.copy().items()}

    def load(self, request_id: str, blocks: StagedBlocks) -> None:
        """The backend loads from them until ``at_rest``."""
        self._loading[request_id] = blocks
        self._at_backend.add(self.pool.use(blocks))

    def loaded(self, request_id: str) -> bool:
        """The backend's first piece is there. Whether it has loaded KV for it, which it does not read again."""
        blocks = self._loading.pop(request_id, None)
        if blocks is not None:
            self.at_rest(blocks)
        return blocks is not None

    # -- prefill side -------------------------------------------------------------------------------------------------

    def save(self, request_id: str, blocks: StagedBlocks) -> None:
        """The backend saves to them until ``at_rest``; a peer may read them until ``sent``."""
        self._sending[request_id] = blocks
        self._at_backend.add(self.pool.use(blocks))

    def saved(self, request_id: str) -> tuple[int, ...]:
        return self._sending[request_id].block_ids

    def sent(self, request_id: str) -> None:
        blocks = self._sending.pop(request_id, None)
        if blocks is not None:
            self.pool.release(blocks)

    # -- both sides ---------------------------------------------------------------------------------------------------

    def at_rest(self, blocks: StagedBlocks) -> None:
        """The backend does not use them any more. Idempotent."""
        if blocks in self._at_backend:
            self._at_backend.remove(blocks)
            self.pool.release(blocks)

    def _num_blocks_of(self, request: Request) -> int:
        return -(-len(request.token_ids) // self._block_size)
