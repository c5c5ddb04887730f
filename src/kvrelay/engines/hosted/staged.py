"""Hand-offs whose KV goes through blocks of this worker, which its peers know as its KV memory.

    decode side     blocks are lent to the hand-off ── peer writes ──> resume_handoff ── backend loads ──> first piece
    prefill side    backend computes and saves ──> HandoffChunks ── peer gets them ──> sending_finished

A request that needs more blocks than are free waits for them, first come, first served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from kvrelay.core.handoff import HandoffId
from kvrelay.core.layout import KVLayout
from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.engine.loans import remote_prefill
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engine.scheduler import RemotePrefills as SentPrefills
from kvrelay.engine.step import HandoffChunk
from kvrelay.engines.connector.terms import StagedKv, encode_request
from kvrelay.engines.hosted.handoffs import Handoffs, Requests
from kvrelay.engines.hosted.staging import StagedBlocks, StagingBlocks
from kvrelay.marks.phases import Phase


class StagedHandoffs(Handoffs):
    """A ``HandsOver``. ``layout``: of the ``num_blocks`` blocks. ``vocab_size``: of first tokens."""

    def __init__(
        self,
        worker_id: str,
        requests: Requests,
        prefills: SentPrefills,
        num_blocks: int,
        layout: KVLayout,
        vocab_size: int,
    ) -> None:
        super().__init__(worker_id, requests, prefills)
        self.pool = StagingBlocks(num_blocks)
        self._layout = layout
        self._vocab_size = vocab_size
        self._waiting: deque[Request] = deque()
        self._loans: dict[tuple[HandoffId, int], StagedBlocks] = {}
        self._loading: dict[str, StagedBlocks] = {}
        """Decode side: requests at the backend, until it has their KV."""
        self._sending: dict[str, StagedBlocks] = {}
        """Prefill side: until the hand-off's ledger says that no transfer touches them."""
        self._at_backend: set[StagedBlocks] = set()
        """Those that the backend loads from, or saves to."""

    # -- decode side --------------------------------------------------------------------------------------------------

    def open(self, request: Request) -> None:
        """A request that the whole pool could not hold is computed here."""
        if self._num_blocks_of(request) <= self.pool.num_blocks:
            self._remote.open(request)
            self._requests.mark_now(request, Phase.PREFILL_QUEUED)
            self._wait(request)
            return
        if request.handoff_number:
            # Its prefill worker may claim it.
            self._requests.output.closed_handoffs.append(self._remote.id_of(request))
        self._requests.ask(request)

    def lend_fresh(self, handoff_id: HandoffId, loan: int) -> tuple[int, ...] | None:
        request = self._remote.request_of(handoff_id)
        blocks = None if request is None else self.pool.take(self._num_blocks_of(request))
        if blocks is None:
            return None
        self._loans[handoff_id, loan] = blocks
        return blocks.block_ids

    def end_loan(self, handoff_id: HandoffId, loan: int) -> None:
        self.pool.release(self._loans.pop((handoff_id, loan)))
        self._serve()

    def writable_blocks(self) -> Mapping[tuple[HandoffId, int], tuple[int, ...]]:
        return {loan: blocks.block_ids for loan, blocks in self._loans.copy().items()}

    def resume_handoff(
        self, handoff_id: HandoffId, loan: int, token_id: int | None, logprobs: PositionLogprobs | None
    ) -> bool:
        blocks, request = self._loans.get((handoff_id, loan)), self._remote.request_of(handoff_id)
        if blocks is None or request is None:
            return False
        if token_id is None or not 0 <= token_id < self._vocab_size:
            self._requests.compute_handoff_here(handoff_id)
            return False
        self.take(handoff_id)
        self._prefills.came_back(request)
        num_tokens = len(request.token_ids)
        self._requests.attach(request)
        self._requests.mark_now(request, Phase.ATTACHED)
        if _goes_on_from(request) and self._requests.take_first(request, token_id, logprobs):
            return True
        self._loading[request.request_id] = blocks
        staged = StagedKv("load", blocks.block_ids, num_tokens, request.num_cached_blocks)
        self._requests.ask(request, encode_request(staged), self._use(blocks))
        return True

    def came(self, request: Request) -> bool:
        """The backend does not read KV again that it has loaded."""
        blocks = self._loading.pop(request.request_id, None)
        if blocks is not None:
            self._at_rest(blocks)
        return blocks is not None

    def ended(self, request_id: str) -> None:
        super().ended(request_id)
        self._loading.pop(request_id, None)
        self._waiting = deque(request for request in self._waiting if request.request_id != request_id)
        self._serve()

    def keep_here(self) -> None:
        """Those that wait for blocks are known to no one."""
        unknown = [request for request in self._waiting if request.mode is PrefillMode.REMOTE]
        self._waiting = deque(request for request in self._waiting if request.mode is not PrefillMode.REMOTE)
        for request in unknown:
            handoff_id = self._remote.id_of(request)
            self._requests.output.closed_handoffs.append(handoff_id)
            self._requests.compute_handoff_here(handoff_id)
        self._serve()

    # -- prefill side -------------------------------------------------------------------------------------------------

    def compute(self, request: Request) -> None:
        self._wait(request)

    def saved(self, request: Request, num_blocks: int) -> bool:
        """The first ``num_blocks`` blocks of this prefill hold their KV. The last one leaves with the first token.
        Whether some can be sent now."""
        block_ids = self._sending[request.request_id].block_ids
        first, end = request.num_sent_blocks, min(num_blocks, len(block_ids) - 1)
        if end <= first:
            return False
        request.num_sent_blocks = end
        self._requests.mark_now(request, Phase.SAVED, (end - first) * self._layout.block_bytes)
        chunk = HandoffChunk(request.request_id, first, block_ids[first:end], last=False)
        self._requests.output.handoff_chunks.append(chunk)
        return True

    def rest(self, request: Request) -> tuple[int, ...]:
        block_ids = self._sending[request.request_id].block_ids[request.num_sent_blocks :]
        if block_ids:
            self._requests.mark_now(request, Phase.SAVED, len(block_ids) * self._layout.block_bytes)
        return block_ids

    def sent(self, request_id: str) -> None:
        blocks = self._sending.pop(request_id, None)
        if blocks is not None:
            self.pool.release(blocks)
            self._serve()

    # -- both sides ---------------------------------------------------------------------------------------------------

    def num_active_blocks(self, num_blocks: int) -> int:
        return (self.pool.num_blocks - self.pool.num_free) * num_blocks // self.pool.num_blocks

    def check_integrity(self) -> None:
        self.pool.check_integrity()

    def _wait(self, request: Request) -> None:
        self._waiting.append(request)
        self._serve()

    def _serve(self) -> None:
        """Blocks may be free: give them to the requests that wait for some."""
        while self._waiting and (blocks := self.pool.take(self._num_blocks_of(self._waiting[0]))) is not None:
            request = self._waiting.popleft()
            if request.mode is PrefillMode.HANDOFF:
                self._save(request, blocks)
            else:
                self._lend(request, blocks)

    def _save(self, request: Request, blocks: StagedBlocks) -> None:
        """The backend saves to the blocks; a peer may read them until ``sent``."""
        self._sending[request.request_id] = blocks
        request.num_sent_blocks = min(request.num_load_tokens // self._layout.block_size, len(blocks.block_ids) - 1)
        staged = StagedKv("save", blocks.block_ids, len(request.token_ids), request.num_sent_blocks)
        self._requests.ask_prefill(request, encode_request(staged), self._use(blocks))

    def _lend(self, request: Request, blocks: StagedBlocks) -> None:
        """Have a peer fill the blocks, all but those for what the backend's own cache has, which stay empty."""
        handoff_id = self._remote.id_of(request)
        self._loans[handoff_id, 1] = blocks
        # Of a model with windows or states beside its KV, vLLM may have a block and not be able to go on after it.
        if len(self._layout.regions) == 1:
            request.num_cached_blocks = self._requests.num_cached_blocks(request)
        num_cached_tokens = request.num_cached_blocks * self._layout.block_size
        prefill = remote_prefill(request, handoff_id, request.sampling, blocks.block_ids, num_cached_tokens)
        self._requests.output.remote_prefills.append(prefill)

    def _use(self, blocks: StagedBlocks) -> Callable[[], None]:
        """The backend uses the blocks until what is returned is called."""
        self._at_backend.add(self.pool.use(blocks))
        return partial(self._at_rest, blocks)

    def _at_rest(self, blocks: StagedBlocks) -> None:
        """The backend does not use them any more. Idempotent."""
        if blocks in self._at_backend:
            self._at_backend.remove(blocks)
            self.pool.release(blocks)
            self._serve()

    def _num_blocks_of(self, request: Request) -> int:
        return -(-len(request.token_ids) // self._layout.block_size)


def _goes_on_from(request: Request) -> bool:
    """Whether the backend can continue after the prefill worker's first token as if it had sampled it itself: a grammar
    and the penalties of generated tokens would count it as prompt, and a seed would draw other numbers."""
    sampling = request.sampling
    has_memory = sampling.grammar is not None or sampling.presence_penalty or sampling.frequency_penalty
    return not has_memory and (sampling.temperature == 0 or sampling.seed is None)
