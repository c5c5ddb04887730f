"""The scheduler half: the requests at the backend, and the effect of each piece of an answer.

Everything runs on the host's thread, except for ``check_room`` and the numbers that ``stats`` reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from kvrelay.config import EngineConfig
from kvrelay.core.clock import Clock
from kvrelay.core.completion_rate import CompletionRate
from kvrelay.core.events import KvEvent, LoadMetrics
from kvrelay.core.handoff import HandoffId
from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.messages import TokenOutput
from kvrelay.core.status import FinishReason, RequestStatus
from kvrelay.engine.admission.fair import FairQueue, Shares
from kvrelay.engine.contract import EngineFacts, HandsOver, MovesKv
from kvrelay.engine.limits import NONE_PENDING, PendingArrivals
from kvrelay.engine.loans import remote_prefill
from kvrelay.engine.reports import finish_reason, handed_off_token, report_token, stop_token_ids
from kvrelay.engine.request import PrefillMode, Request, check_tokens
from kvrelay.engine.stats import EngineStats
from kvrelay.engine.step import HandoffChunk, StepOutput
from kvrelay.engines.connector.terms import StagedKv, encode_request
from kvrelay.engines.hosted.backend import AnswerChunk, AnswerError, Backend, BackendRefusedError, Prefilled
from kvrelay.engines.hosted.cache import MirroredCache, PlacedPrefixes
from kvrelay.engines.hosted.calls import BackendCalls
from kvrelay.engines.hosted.handoffs import RemotePrefills, StagedHandoffs
from kvrelay.engines.hosted.load import Backoff, HostedLoad
from kvrelay.engines.hosted.staging import StagedBlocks
from kvrelay.errors import (
    EngineDeadError,
    IntegrityError,
    InvalidInputError,
    KvrelayError,
    OverloadedError,
    WorkerUnavailableError,
)

TEXT_SLACK_TOKENS = 64


class _Running(msgspec.Struct):
    """A request at the backend."""

    request: Request
    num_sent_tokens: int
    is_probe: bool = False
    """See ``Backoff.tries``."""


class HostedEngine:
    """An Engine whose requests a backend computes, by ``calls``. Its KV stays there; with ``EngineFacts.moves_kv``
    backends exchange it by themselves, and hand-offs tell them from where. With ``num_staging_blocks``, of a pool that
    peers know as this worker's KV memory, kvrelay's transports move it; a request that the whole pool could not hold is
    then computed here.

    The backend knows no API keys. With keys it gets at most ``max_num_seqs`` requests at once; the others wait here,
    where keys take turns. Requests without a key go to the backend at once, which orders them by priority.
    """

    def __init__(
        self,
        facts: EngineFacts,
        config: EngineConfig,
        backend: Backend,
        calls: BackendCalls,
        cache: PlacedPrefixes | MirroredCache,
        clock: Clock,
        *,
        worker_id: str,
        eos_token_ids: tuple[int, ...],
        num_staging_blocks: int = 0,
    ) -> None:
        self.worker_id = worker_id
        self.output = StepOutput()
        self._facts = facts
        self._config = config
        self._backend = backend
        self._eos_token_ids = eos_token_ids
        self._calls = calls
        self._running: dict[str, _Running] = {}
        """With the requests in ``_held``."""
        self._shares = Shares()
        self._held = FairQueue(config.priority_ageing_s, self._shares)
        self._remote = RemotePrefills(worker_id)
        self.staging = StagedHandoffs(num_staging_blocks, facts.kv_layout.block_size) if num_staging_blocks else None
        self._cache = cache
        self._clock = clock
        self._ended = CompletionRate(clock)
        self._backoff = Backoff(clock)
        self._dead: EngineDeadError | None = None
        self._num_arrived = 0
        self._load_counts = HostedLoad(worker_id, facts, config)

    @property
    def lends(self) -> HandsOver | None:
        """Staging blocks, if it has any."""
        return None if self.staging is None else self

    @property
    def moves(self) -> MovesKv | None:
        return self if self._facts.moves_kv else None

    @property
    def schedules(self) -> None:
        """The backend does."""

    # -- requests -----------------------------------------------------------------------------------------------------

    def check_room(self, num_tokens: int, *, is_new: bool, ahead: PendingArrivals, tenant: str = "") -> None:
        if (wait_s := self._backoff.wait_s) and is_new:
            raise OverloadedError(f"{self._backend.name} is full", retry_after_s=wait_s)
        num_running = len(self._running) + ahead.num_requests
        excess = num_running + 1 - self._config.max_num_seqs - self._config.max_num_waiting
        if excess > 0 and not self._shares.may_exceed(tenant, self._config.max_num_waiting):
            raise OverloadedError(
                f"{num_running} requests are running or waiting already",
                retry_after_s=self._ended.retry_after_s(excess),
                spacing_s=self._ended.spacing_s(1),
            )

    def num_cached_tokens(self, request: Request) -> int:
        """By the backend's cache events, or by the requests that it was sent before."""
        return self._num_placed_blocks(request) * self._facts.kv_layout.block_size

    def add_request(self, request: Request) -> None:
        if self._dead is not None:
            raise self._dead
        self._validate(request)
        if not self._running:
            self._ended.restart()
        self.check_room(
            len(request.token_ids), is_new=not request.is_resumed, ahead=NONE_PENDING, tenant=request.tenant
        )
        self._num_arrived += 1
        request.arrival = self._num_arrived
        request.stop_ids = stop_token_ids(request.sampling, self._eos_token_ids)
        request.length_limit = min(request.num_prompt_tokens + request.sampling.max_tokens, self._facts.max_model_len)
        request.num_cached_tokens = 0
        request.times.append((RequestStatus.WAITING, self._clock.now()))
        if request.length_limit <= len(request.token_ids):
            # A migrated request whose last token was already generated.
            report_token(self.output, request, None, None, FinishReason.LENGTH)
            return
        self._load_counts.num_queried_tokens += len(request.token_ids)
        self._running[request.request_id] = _Running(request, len(request.token_ids))
        # The other half of a pair may hold a place at its backend for this one: it must not wait for one here.
        if request.tenant and not request.handoff_number:
            request.times.append((request.status, self._clock.now()))
            request.num_queued_tokens = max(len(request.token_ids) - self.num_cached_tokens(request), 1)
            self._held.push(request)
            self._start_held()
        else:
            self._open(request)

    def _start_held(self) -> None:
        """Give requests to the backend while it has room for them."""
        while self._held and len(self._running) - len(self._held) < self._config.max_num_seqs:
            request = self._held.candidates(self._clock.now(), 1)[0].request
            self._held.remove(request, is_admitted=True)
            self._open(request)

    def _forget_running(self, request_id: str) -> _Running | None:
        """The request is over at the backend, or has not begun there; None if it was over before."""
        running = self._running.pop(request_id, None)
        if running is None:
            return None
        if running.request in self._held:
            self._held.remove(running.request)
        else:
            self._shares.charge(running.request.tenant, running.request.num_output_tokens)
        return running

    def _open(self, request: Request) -> None:
        self._running[request.request_id].is_probe = self._backoff.tries()
        if request.mode is PrefillMode.REMOTE:
            self._open_remote(request)
        elif request.mode is PrefillMode.HANDOFF:
            self._open_prefill(request)
        else:
            self._ask(request)

    def _ask(
        self, request: Request, kv_transfer_params: bytes | None = None, staged: StagedBlocks | None = None
    ) -> None:
        """Have the backend generate the rest of the answer. ``staged``: from the KV in these blocks."""
        num_tokens = request.length_limit - len(request.token_ids)
        answer = self._backend.stream(request, num_tokens, kv_transfer_params)
        at_rest = None if staged is None else partial(self._at_rest, staged)
        self._calls.start(request.request_id, answer, self.received, self.failed, at_rest)

    def abort(self, request_id: str) -> None:
        if self._forget_running(request_id) is not None:
            self._handoff_ended(request_id)
            self._calls.cancel(request_id)
            self._start_held()

    def _validate(self, request: Request) -> None:
        sampling, vocab_size = request.sampling, self._facts.vocab_size
        sampling.validate(vocab_size)
        self._backend.check(sampling)
        if request.is_prefill_only or (request.mode is not PrefillMode.LOCAL and not self._facts.hands_over_kv):
            raise InvalidInputError("this engine only generates", param="max_tokens")
        if request.mode is PrefillMode.LOCAL and not self._facts.prefills_here:
            raise WorkerUnavailableError(f"{self._backend.name} computes no prompts, and no prefill worker is there")
        check_tokens(
            request,
            is_running=request.request_id in self._running,
            vocab_size=vocab_size,
            max_model_len=self._facts.max_model_len,
        )

    # -- what comes from the backend ----------------------------------------------------------------------------------

    def received(self, request_id: str, piece: AnswerChunk) -> None:
        """A piece of an answer. Raises AnswerError for an impossible piece; the caller then calls
        ``failed``."""
        running = self._running.get(request_id)
        if running is None:
            return
        request = running.request
        if piece.num_prompt_tokens not in (None, 0, running.num_sent_tokens):
            raise AnswerError(
                f"{self._backend.name} counts {piece.num_prompt_tokens} prompt tokens, "
                f"{running.num_sent_tokens} were sent"
            )
        self._backoff.answered(is_probe=running.is_probe)
        # KV that has come from elsewhere is no hit of this cache, whatever the backend calls it.
        if self.staging is None:
            is_remote = self._remote.arrived(request_id, self.output)
        else:
            is_remote = self.staging.loaded(request_id)
            self._serve_waiting()
        if not is_remote and not request.first_output_sent and piece.num_cached_tokens:
            request.num_cached_tokens = min(piece.num_cached_tokens, running.num_sent_tokens)
            self._load_counts.num_hit_tokens += request.num_cached_tokens
        token_ids, logprobs = piece.token_ids, piece.logprobs
        self._require_sound(piece)
        self._require_due(running, len(token_ids))
        if token_ids and not request.first_output_sent:
            times = self._load_counts.times
            (times.handoff if is_remote else times.prefill).observe(self._clock.now() - request.entered_s)
        for number, token_id in enumerate(token_ids):
            request.token_ids.append(token_id)
            reason = finish_reason(request, token_id) if self._backend.samples_ids else None
            if reason is None and number == len(token_ids) - 1:
                reason = piece.finish
            self._load_counts.num_generated_tokens += 1
            report_token(self.output, request, token_id, logprobs[number] if logprobs else None, reason)
            if reason is not None:
                return self._finished(request, at_backend=piece.finish is not None)
        if piece.finish is not None:
            report_token(self.output, request, None, None, piece.finish)
            self._finished(request, at_backend=True)
        return None

    def failed(self, request_id: str, error: KvrelayError) -> None:
        """The backend sends nothing more for this request. Another worker may succeed, unless the request itself is at
        fault."""
        if self._dead is None and self._remote.failed(request_id, self.output):
            return  # only its KV is lost: its hand-off decides
        running = self._forget_running(request_id)
        if running is None:
            return
        self._handoff_ended(request_id)
        status = error.status if isinstance(error, BackendRefusedError) else 0
        if isinstance(error, BackendRefusedError) and status in (429, 503):
            self._backoff.refused(error.retry_after_s, is_probe=running.is_probe)
        elif not status and isinstance(self._cache, PlacedPrefixes):
            # Perhaps the backend was restarted and its cache is empty.
            self.forget_cache()
        self.output.outputs.append(
            TokenOutput(
                request_id,
                finish_reason=FinishReason.ERROR,
                error=error.message,
                position=running.request.num_output_tokens,
                is_final=status in (400, 413, 422),
            )
        )
        if self._dead is None:
            self._start_held()

    def die(self, error: EngineDeadError) -> None:
        """The backend is gone: every request ends here. The reason is for the log, not for clients."""
        self._dead = error = EngineDeadError(f"{self._backend.name} is gone")
        for request_id in list(self._running):
            self._calls.cancel(request_id)
            self.failed(request_id, error)

    def cache_changed(self, events: list[KvEvent]) -> None:
        """The backend has reported the contents of its cache."""
        self.output.kv_events += events

    def take_output(self) -> StepOutput:
        output, self.output = self.output, StepOutput()
        return output

    def _require_sound(self, piece: AnswerChunk) -> None:
        """Raise AnswerError for tokens that this model does not have, or that do not fit their logprobs."""
        if any(not 0 <= token_id < self._facts.vocab_size for token_id in piece.token_ids):
            raise AnswerError(
                f"{self._backend.name} answers with a token that is not in the vocabulary: another model?"
            )
        if piece.logprobs is not None and len(piece.logprobs) != len(piece.token_ids):
            raise AnswerError(f"the logprobs of {self._backend.name} do not belong to its tokens")

    def _require_due(self, running: _Running, num_tokens: int) -> None:
        """Raise AnswerError for text far longer than what was asked for. Its token ids are ours, so they may be a few
        more than the backend's."""
        request = running.request
        num_asked = request.length_limit - running.num_sent_tokens
        num_sent = len(request.token_ids) + num_tokens - running.num_sent_tokens
        if not self._backend.samples_ids and num_sent > 2 * num_asked + TEXT_SLACK_TOKENS:
            raise AnswerError(f"{self._backend.name} answers with more tokens than the {num_asked} it was asked for")

    def _finished(self, request: Request, *, at_backend: bool) -> None:
        self._forget_running(request.request_id)
        if not at_backend:
            self._calls.cancel(request.request_id)
        self._ended.add(1)
        # The last token's KV was never needed, so it was not computed.
        self._place(request, len(request.token_ids) - 1)
        self._start_held()

    def _place(self, request: Request, num_tokens: int) -> None:
        """The backend has computed, or got, the KV of the first ``num_tokens``."""
        if self._config.enable_prefix_caching:
            num_blocks = num_tokens // self._facts.kv_layout.block_size
            request.hash_blocks(num_blocks, self._facts.kv_layout.block_size, self._facts.adapter)
            self.output.kv_events += self._cache.place(
                request.sequence_hashes[:num_blocks], request.local_hashes[:num_blocks], request.token_ids
            )

    def _num_placed_blocks(self, request: Request) -> int:
        # The last token is computed in any case: something must be sampled from.
        num_blocks = (len(request.token_ids) - 1) // self._facts.kv_layout.block_size
        request.hash_blocks(num_blocks, self._facts.kv_layout.block_size, self._facts.adapter)
        return self._cache.num_leading(request.sequence_hashes[:num_blocks])

    # -- hand-offs, decode side ---------------------------------------------------------------------------------------

    def _open_remote(self, request: Request) -> None:
        """The request waits for its KV."""
        if self.staging is not None and not self.staging.can_hold(request):
            if request.handoff_number:
                # Its prefill worker may claim it.
                self.output.closed_handoffs.append(HandoffId(self.worker_id, request.handoff_number))
            self._ask(request)
            return
        handoff_id = self._remote.open(request)
        if self.staging is None:
            self.output.remote_prefills.append(remote_prefill(request, handoff_id, request.sampling))
        else:
            self.staging.wait(request)
            self._serve_waiting()

    def _handoff_ended(self, request_id: str) -> None:
        """The request has ended by itself, perhaps in its hand-off."""
        self._remote.ended(request_id, self.output)
        if self.staging is not None:
            self.staging.forget(request_id)
            self._serve_waiting()

    def fetch_handoff(self, handoff_id: HandoffId, kv_transfer_params: bytes) -> bool:
        request_id = self._remote.fetch(handoff_id)
        if request_id is None:
            return False
        self._ask(self._running[request_id].request, kv_transfer_params)
        return True

    def discard_kv(self, kv_transfer_params: bytes) -> None:
        # If that fails, the KV is kept for a while longer, then its engine frees it by itself.
        discard = partial(self._backend.discard, kv_transfer_params)
        self._calls.ask(discard, "discard KV that no request needs")

    def compute_handoff_here(self, handoff_id: HandoffId) -> None:
        request_id = self._remote.take(handoff_id, self.output)
        if request_id is None:
            return
        self._calls.cancel(request_id)
        if not self._facts.prefills_here:
            self.failed(request_id, AnswerError(f"no KV has come, and {self._backend.name} computes no prompts"))
            return
        self._ask(self._running[request_id].request)

    def keep_prefills_here(self) -> None:
        """Requests that are held here open no hand-off. Those that no one has claimed are computed here one by one, and
        those that wait for blocks at once."""
        for request in self._held.members():
            if request.mode is PrefillMode.REMOTE and self._facts.prefills_here:
                request.mode = PrefillMode.LOCAL
        if self.staging is None:
            return
        for request in self.staging.waiting(PrefillMode.REMOTE):
            self.staging.forget(request.request_id)
            handoff_id = self._remote.handoff_of(request.request_id)
            self.output.closed_handoffs.append(handoff_id)
            self.compute_handoff_here(handoff_id)
        self._serve_waiting()

    def resume_handoff(
        self, handoff_id: HandoffId, loan: int, token_id: int | None, logprobs: PositionLogprobs | None
    ) -> bool:
        blocks = None if self.staging is None else self.staging.lent(handoff_id, loan)
        if self.staging is None or blocks is None or self._remote.request_of(handoff_id) is None:
            return False
        if token_id is None or not 0 <= token_id < self._facts.vocab_size:
            self.compute_handoff_here(handoff_id)
            return False
        request_id = self._remote.take(handoff_id, self.output)
        assert request_id is not None
        running = self._running[request_id]
        request = running.request
        num_tokens = len(request.token_ids)
        if _goes_on_from(request):
            request.token_ids.append(token_id)
            running.num_sent_tokens += 1
            self._load_counts.num_generated_tokens += 1
            reason = finish_reason(request, token_id)
            report_token(self.output, request, token_id, logprobs, reason)
            if reason is not None:
                self._finished(request, at_backend=True)
                return True
        self.staging.load(request_id, blocks)
        self._ask(request, encode_request(StagedKv("load", blocks.block_ids, num_tokens)), blocks)
        return True

    def lend_fresh(self, handoff_id: HandoffId, loan: int) -> tuple[int, ...] | None:
        request_id = self._remote.request_of(handoff_id)
        if self.staging is None or request_id is None:
            return None
        return self.staging.lend_fresh(handoff_id, loan, self._running[request_id].request)

    def end_loan(self, handoff_id: HandoffId, loan: int) -> None:
        if self.staging is None:
            raise KeyError(handoff_id, loan)
        self.staging.end_loan(handoff_id, loan)
        self._serve_waiting()

    def writable_blocks(self) -> Mapping[tuple[HandoffId, int], tuple[int, ...]]:
        return {} if self.staging is None else self.staging.writable()

    # -- staging blocks -----------------------------------------------------------------------------------------------

    def _serve_waiting(self) -> None:
        """Staging blocks may be free: give them to the requests that wait for some."""
        while self.staging is not None and (served := self.staging.serve()) is not None:
            request, blocks = served
            if request.mode is PrefillMode.HANDOFF:
                self.staging.save(request.request_id, blocks)
                params = encode_request(StagedKv("save", blocks.block_ids, len(request.token_ids)))
                self._ask_prefill(request, params, blocks)
            else:
                handoff_id = self._remote.handoff_of(request.request_id)
                self.staging.lend(handoff_id, 1, blocks)
                remote = remote_prefill(request, handoff_id, request.sampling, blocks.block_ids)
                self.output.remote_prefills.append(remote)

    def _at_rest(self, blocks: StagedBlocks) -> None:
        """The backend does not use the blocks any more."""
        assert self.staging is not None
        self.staging.at_rest(blocks)
        self._serve_waiting()

    # -- hand-offs, prefill side --------------------------------------------------------------------------------------

    def _open_prefill(self, request: Request) -> None:
        if self.staging is None:
            self._ask_prefill(request)
        else:
            self.staging.wait(request)
            self._serve_waiting()

    def _ask_prefill(
        self, request: Request, kv_transfer_params: bytes | None = None, staged: StagedBlocks | None = None
    ) -> None:
        """Have the backend compute the KV of a prompt. ``staged``: and save it in these blocks."""
        answer = self._backend.prefill(request, kv_transfer_params)
        at_rest = None if staged is None else partial(self._at_rest, staged)
        self._calls.start(request.request_id, answer, self.prefilled, self.failed, at_rest)

    def prefilled(self, request_id: str, prefilled: Prefilled) -> None:
        """The backend keeps the KV of this request, or will. Raises AnswerError for an impossible first token."""
        running = self._running.get(request_id)
        if running is None:
            return
        self._backoff.answered(is_probe=running.is_probe)
        request, piece, first = running.request, prefilled.piece, None
        self._load_counts.times.prefill.observe(self._clock.now() - request.entered_s)
        if piece is not None and piece.token_ids:
            self._require_sound(piece)
            request.num_cached_tokens = min(piece.num_cached_tokens or 0, running.num_sent_tokens)
            self._load_counts.num_hit_tokens += request.num_cached_tokens
            first = handed_off_token(request, piece.token_ids[0], piece.logprobs[0] if piece.logprobs else None)
        self._place(request, len(request.token_ids))
        if self.staging is not None and first is None:
            raise AnswerError(f"{self._backend.name} has saved the KV of a prompt without its first token")
        block_ids = () if self.staging is None else self.staging.saved(request_id)
        params = prefilled.kv_transfer_params
        self.output.handoff_chunks.append(
            HandoffChunk(request_id, 0, block_ids, last=True, first_output=first, kv_transfer_params=params)
        )

    def sending_finished(self, request_id: str) -> None:
        """The decode worker's backend has the KV, or none will get it. The answer may still be ending."""
        if self._forget_running(request_id) is not None:
            self._ended.add(1)
            self._start_held()
        if self.staging is not None:
            self.staging.sent(request_id)
            self._serve_waiting()

    # -- what can be seen ---------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self._running)

    def metrics(self) -> LoadMetrics:
        return self._load_counts.load(len(self._running), self._num_active_blocks())

    def stats(self) -> EngineStats:
        return self._load_counts.stats(len(self._running), self._num_active_blocks())

    def _num_active_blocks(self) -> int:
        """Of the backend's pool, or of the staging pool in proportion if that one is fuller."""
        size = self._facts.kv_layout.block_size
        num_active = sum(-(-len(running.request.token_ids) // size) for running in list(self._running.values()))
        if self.staging is None:
            return num_active
        pool = self.staging.pool
        num_staged = pool.num_blocks - pool.num_free
        return max(num_active, num_staged * self._facts.num_blocks // pool.num_blocks)

    def cached_hashes(self) -> Sequence[int]:
        return self._cache.hashes()

    def clear_cache(self) -> None:
        """Forget the known state of the backend's cache, and tell the backend to clear it."""
        self._calls.ask(self._backend.clear_cache, "clear its cache")
        self.forget_cache()

    def forget_cache(self) -> None:
        """Forget the known state of the backend's cache."""
        self.output.kv_events += self._cache.clear()

    def check_integrity(self) -> None:
        if isinstance(self._cache, PlacedPrefixes) and len(self._cache) > self._facts.num_blocks:
            raise IntegrityError(f"{len(self._cache)} blocks are known, {self._facts.num_blocks} may be")
        if self.staging is not None:
            self.staging.pool.check_integrity()


def _goes_on_from(request: Request) -> bool:
    """Whether the backend can continue after the prefill worker's first token as if it had sampled it itself: a grammar
    and the penalties of generated tokens would count it as prompt, and a seed would draw other numbers."""
    sampling = request.sampling
    has_memory = sampling.grammar is not None or sampling.presence_penalty or sampling.frequency_penalty
    return not has_memory and (sampling.temperature == 0 or sampling.seed is None)
