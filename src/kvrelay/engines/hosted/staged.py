"""A StreamedEngine whose KV passes through a staging pool in this worker's memory: kvrelay's transports move it.

    decode side     blocks are lent to the hand-off ── peer writes ──> resume_handoff ── backend loads ──> first piece
    prefill side    backend computes and saves ──> HandoffChunk ── peer gets it ──> sending_finished

A request that needs more blocks than are free waits for them, first come, first served. On the decode side a request
that the whole pool could not hold is computed here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

from kvrelay.core.handoff import HandoffId
from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.messages import TokenOutput
from kvrelay.engine.contract import EngineFacts
from kvrelay.engine.loans import HandoffIds, remote_prefill
from kvrelay.engine.reports import finish_reason, report_token
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engine.step import HandoffChunk
from kvrelay.engines.connector.terms import StagedKv, encode_request
from kvrelay.engines.hosted.backend import AnswerError
from kvrelay.engines.hosted.engine import StreamedEngine
from kvrelay.engines.hosted.staging import StagedBlocks, StagingBlocks


class StagedEngine(StreamedEngine):
    """``num_staging_blocks``: of the pool, which peers know as this worker's KV memory."""

    def __init__(self, facts: EngineFacts, *args: Any, num_staging_blocks: int, **kwargs: Any) -> None:
        super().__init__(facts, *args, **kwargs)
        self._pool = StagingBlocks(num_staging_blocks)
        self._unit = facts.kv_layout.block_size
        self._waiting: deque[Request] = deque()
        """For blocks, in order."""
        self._ids = HandoffIds(self.worker_id)
        self._opened: dict[HandoffId, str] = {}
        """Decode side: requests whose KV has not come yet."""
        self._handoffs: dict[str, HandoffId] = {}
        self._loans: dict[tuple[HandoffId, int], StagedBlocks] = {}
        self._loading: dict[str, StagedBlocks] = {}
        """Decode side: requests at the backend, until it has their KV."""
        self._used: set[StagedBlocks] = set()
        """Those that the backend loads from, or saves to."""
        self._sending: dict[str, StagedBlocks] = {}
        """Prefill side: until the ledger says that no transfer touches them."""

    # -- requests that wait for blocks ---------------------------------------------------------------------------------

    def _open_remote(self, request: Request) -> None:
        if self._num_units(request) > self._pool.num_blocks:
            if request.handoff_number:
                # Its prefill worker may claim it.
                self.output.closed_handoffs.append(HandoffId(self.worker_id, request.handoff_number))
            self._ask(request)
            return
        handoff_id = self._ids.of(request)
        self._opened[handoff_id] = request.request_id
        self._handoffs[request.request_id] = handoff_id
        self._waiting.append(request)
        self._serve_waiting()

    def _open_prefill(self, request: Request) -> None:
        self._waiting.append(request)
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            blocks = self._pool.take(self._num_units(request))
            if blocks is None:
                return
            self._waiting.popleft()
            if request.mode is PrefillMode.HANDOFF:
                self._compute_for_another(request, blocks)
            else:
                self._lend(request, blocks)

    def _release(self, blocks: StagedBlocks) -> None:
        self._pool.release(blocks)
        self._serve_waiting()

    def _num_units(self, request: Request) -> int:
        return -(-len(request.token_ids) // self._unit)

    def _num_active_blocks(self) -> int:
        """Of vLLM's pool, or of the staging pool in proportion if that one is fuller."""
        num_staged = self._pool.num_blocks - self._pool.num_free
        return max(super()._num_active_blocks(), num_staged * self._facts.num_blocks // self._pool.num_blocks)

    def check_integrity(self) -> None:
        super().check_integrity()
        self._pool.check_integrity()

    # -- decode side --------------------------------------------------------------------------------------------------

    def _lend(self, request: Request, blocks: StagedBlocks) -> None:
        handoff_id = self._handoffs[request.request_id]
        self._loans[handoff_id, 1] = blocks
        self.output.remote_prefills.append(remote_prefill(request, handoff_id, request.sampling, blocks.block_ids))

    @property
    def lends(self) -> StagedEngine:
        """The staging memory's blocks."""
        return self

    def lend_fresh(self, handoff_id: HandoffId, loan: int) -> tuple[int, ...] | None:
        request_id = self._opened.get(handoff_id)
        if request_id is None:
            return None
        blocks = self._pool.take(self._num_units(self._running[request_id].request))
        if blocks is None:
            return None
        self._loans[handoff_id, loan] = blocks
        return blocks.block_ids

    def end_loan(self, handoff_id: HandoffId, loan: int) -> None:
        self._release(self._loans.pop((handoff_id, loan)))

    def writable_blocks(self) -> Mapping[tuple[HandoffId, int], tuple[int, ...]]:
        return {loan: blocks.block_ids for loan, blocks in self._loans.copy().items()}

    def resume_handoff(
        self, handoff_id: HandoffId, loan: int, token_id: int, logprobs: PositionLogprobs | None
    ) -> bool:
        blocks = self._loans.get((handoff_id, loan))
        if handoff_id not in self._opened or blocks is None:
            return False
        if not 0 <= token_id < self._facts.vocab_size:
            self.compute_handoff_here(handoff_id)
            return False
        running = self._running[self._forget(handoff_id)]
        request = running.request
        num_tokens = len(request.token_ids)
        if _goes_on_from(request):
            request.token_ids.append(token_id)
            running.num_sent_tokens += 1
            self._tally.num_generated_tokens += 1
            reason = finish_reason(request, token_id)
            report_token(self.output, request, token_id, logprobs, reason)
            if reason is not None:
                self._finished(request, at_backend=True)
                return True
        self._loading[request.request_id] = self._at_backend(blocks)
        params = encode_request(StagedKv("load", blocks.block_ids, num_tokens))
        self._ask(request, params, partial(self._at_rest, blocks))
        return True

    def _at_backend(self, blocks: StagedBlocks) -> StagedBlocks:
        self._used.add(self._pool.use(blocks))
        return blocks

    def _at_rest(self, blocks: StagedBlocks) -> None:
        """The backend does not use the blocks any more. Idempotent."""
        if blocks in self._used:
            self._used.remove(blocks)
            self._release(blocks)

    def _kv_arrived(self, request_id: str) -> bool:
        blocks = self._loading.pop(request_id, None)
        if blocks is not None:
            self._at_rest(blocks)
        return blocks is not None

    def _fetch_failed(self, request_id: str) -> bool:
        """A backend that could not load has computed the KV."""
        return False

    def _handoff_ended(self, request_id: str) -> None:
        self._loading.pop(request_id, None)
        self._waiting = deque(request for request in self._waiting if request.request_id != request_id)
        handoff_id = self._handoffs.get(request_id)
        if handoff_id is not None:
            self.output.closed_handoffs.append(handoff_id)
            self._forget(handoff_id)
        self._serve_waiting()

    def keep_prefills_here(self) -> None:
        super().keep_prefills_here()
        for request in [request for request in self._waiting if request.mode is PrefillMode.REMOTE]:
            self._waiting.remove(request)
            handoff_id = self._handoffs[request.request_id]
            self.output.closed_handoffs.append(handoff_id)
            self.compute_handoff_here(handoff_id)
        self._serve_waiting()

    def compute_handoff_here(self, handoff_id: HandoffId) -> None:
        if handoff_id in self._opened:
            self._ask(self._running[self._forget(handoff_id)].request)

    def _forget(self, handoff_id: HandoffId) -> str:
        request_id = self._opened.pop(handoff_id)
        del self._handoffs[request_id]
        return request_id

    # -- prefill side -------------------------------------------------------------------------------------------------

    def _compute_for_another(self, request: Request, blocks: StagedBlocks) -> None:
        self._sending[request.request_id] = self._at_backend(blocks)
        params = encode_request(StagedKv("save", blocks.block_ids, len(request.token_ids)))
        self._begin_prefill(request, params, partial(self._at_rest, blocks))

    def _report_prefill(self, request_id: str, first: TokenOutput | None, kv_transfer_params: bytes | None) -> None:
        if first is None:
            raise AnswerError(f"{self._backend.name} has saved the KV of a prompt without its first token")
        block_ids = self._sending[request_id].block_ids
        self.output.handoff_chunks.append(HandoffChunk(request_id, 0, block_ids, last=True, first_output=first))

    def sending_finished(self, request_id: str) -> None:
        super().sending_finished(request_id)
        blocks = self._sending.pop(request_id, None)
        if blocks is not None:
            self._release(blocks)


def _goes_on_from(request: Request) -> bool:
    """Whether the backend can continue after the prefill worker's first token as if it had sampled it itself: a grammar
    and the penalties of generated tokens would count it as prompt, and a seed would draw other numbers."""
    sampling = request.sampling
    has_memory = sampling.grammar is not None or sampling.presence_penalty or sampling.frequency_penalty
    return not has_memory and (sampling.temperature == 0 or sampling.seed is None)
