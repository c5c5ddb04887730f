"""The scheduler half: the requests at the backend, and the effect of each piece of an answer.

Everything runs on the host's thread, except for ``check_room`` and the numbers that ``stats`` reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
from kvrelay.engine.contract import EngineFacts
from kvrelay.engine.limits import NONE_PENDING, PendingArrivals
from kvrelay.engine.reports import finish_reason, handed_off_token, report_token, stop_token_ids
from kvrelay.engine.request import PrefillMode, Request, check_tokens
from kvrelay.engine.stats import DraftCounts, EngineStats
from kvrelay.engine.step import HandoffChunk, StepOutput
from kvrelay.engines.hosted.backend import AnswerChunk, AnswerError, Backend, BackendRefusedError, Prefilled
from kvrelay.engines.hosted.cache import MirroredCache, PlacedPrefixes
from kvrelay.engines.hosted.calls import BackendCalls
from kvrelay.engines.hosted.costs import HostedCosts, StepTeller
from kvrelay.engines.hosted.handoffs import Handoffs, MovedHandoffs
from kvrelay.engines.hosted.load import Backoff, HostedLoad
from kvrelay.engines.hosted.moments import (
    Moments,
    answer_marks,
    draft_marks,
    fetch_marks,
    preemption_marks,
    prefill_marks,
)
from kvrelay.engines.hosted.placing import Placing
from kvrelay.engines.hosted.staged import StagedHandoffs
from kvrelay.errors import (
    EngineDeadError,
    IntegrityError,
    InvalidInputError,
    KvrelayError,
    OverloadedError,
    WorkerUnavailableError,
)
from kvrelay.marks.phases import Phase
from kvrelay.placement.base import Decision

TEXT_SLACK_TOKENS = 64


class _Running(msgspec.Struct):
    """A request at the backend."""

    request: Request
    num_sent_tokens: int
    is_probe: bool = False
    """See ``Backoff.tries``."""
    moments: Moments | None = None
    """As told with the last piece, which came at ``heard_s``."""
    heard_s: float = 0.0
    attached_s: float = 0.0
    """When the backend was given KV for it, or the parameters to get some."""


class HostedEngine:
    """An Engine whose requests a backend computes, by ``calls``. Its KV stays there; with ``EngineFacts.moves_kv``
    backends exchange it by themselves, and hand-offs tell them from where. With ``num_staging_blocks``, of a pool that
    peers know as this worker's KV memory, kvrelay's transports move it; a request that the whole pool could not hold is
    then computed here.

    With ``teller`` the backend's steps are known, and with ``sets_pace`` limited by the objectives of the requests.
    Where a prefill runs is decided when it would be given to the backend; those that wait for that stay here, too.

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
        teller: StepTeller | None = None,
        sets_pace: bool = False,
        drafts: DraftCounts | None = None,
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
        self._cache = cache
        self._clock = clock
        self._ended = CompletionRate(clock)
        self._backoff = Backoff(clock)
        self._dead: EngineDeadError | None = None
        self._num_arrived = 0
        self._load_counts = HostedLoad(worker_id, facts, config, drafts)
        step_times = self._load_counts.times.step
        self._costs = HostedCosts(backend.name, teller, clock, step_times, sets_pace=sets_pace)
        self._placing = Placing(self._costs, clock, config.max_num_batched_tokens, self._placed)
        self._handoffs: Handoffs
        self.lends: StagedHandoffs | None = None
        self.moves: MovedHandoffs | None = None
        if num_staging_blocks:
            self._handoffs = self.lends = StagedHandoffs(
                worker_id, self, self._placing.sent, num_staging_blocks, facts.kv_layout, facts.vocab_size
            )
        else:
            self._handoffs = moved = MovedHandoffs(worker_id, self, self._placing.sent)
            self.moves = moved if facts.moves_kv else None

    @property
    def schedules(self) -> None:
        """The backend does."""

    # -- requests -----------------------------------------------------------------------------------------------------

    def check_room(self, num_tokens: int, *, is_new: bool, ahead: PendingArrivals, tenant: str = "") -> None:
        if (wait_s := self._backoff.wait_s) and is_new:
            raise OverloadedError(f"{self._backend.name} is full", retry_after_s=wait_s)
        num_requests = len(self._running) + ahead.num_requests
        excess = num_requests + 1 - self._config.max_num_seqs - self._config.max_num_waiting
        if excess > 0 and not self._shares.may_exceed(tenant, self._config.max_num_waiting):
            raise OverloadedError(
                f"{num_requests} requests are running or waiting already",
                retry_after_s=self._ended.retry_after_s(excess),
                spacing_s=self._ended.spacing_s(1),
            )

    def has_begun(self, request_id: str) -> bool:
        """Perhaps: the backend does not say."""
        return True

    def uses_adapter(self, adapter: str) -> bool:
        """Whether a request is here that is computed with it, also one that waits."""
        return any(running.request.sampling.adapter == adapter for running in self._running.values())

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
        request.num_queued_tokens = max(len(request.token_ids) - self.num_cached_tokens(request), 1)
        if not request.is_resumed:
            self._placing.require_in_time(request)
        self._num_arrived += 1
        request.arrival = self._num_arrived
        request.stop_ids = stop_token_ids(request.sampling, self._eos_token_ids)
        request.length_limit = min(request.num_prompt_tokens + request.sampling.max_tokens, self._facts.max_model_len)
        request.num_cached_tokens = 0
        request.times.append((RequestStatus.WAITING, self._clock.now()))
        if request.length_limit <= len(request.token_ids) and not request.is_prefill_only:
            # A migrated request whose last token was already generated.
            report_token(self.output, request, None, None, FinishReason.LENGTH)
            return
        self._load_counts.num_queried_tokens += len(request.token_ids)
        self._running[request.request_id] = _Running(request, len(request.token_ids))
        self._costs.arrived(request)
        # The other half of a pair may hold a place at its backend for this one: it must not wait for one here.
        if request.tenant and not request.handoff_number:
            request.times.append((request.status, self._clock.now()))
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
        self._placing.forget(running.request)
        self._costs.left(running.request)
        if running.request in self._held:
            self._held.remove(running.request)
        else:
            self._shares.charge(running.request.tenant, running.request.num_output_tokens)
        return running

    def _open(self, request: Request) -> None:
        if request.mode is PrefillMode.LOCAL and request.placement is not None and request.placement.policy is not None:
            self._placing.place(request)
        else:
            self._begin(request)

    def _placed(self, request: Request, decision: Decision) -> None:
        if decision.local_s or decision.remote_s:
            self.mark_now(request, Phase.LOCAL_ESTIMATE, decision.local_s)
            self.mark_now(request, Phase.REMOTE_ESTIMATE, decision.remote_s)
        self._begin(request)

    def _begin(self, request: Request) -> None:
        self._running[request.request_id].is_probe = self._backoff.tries()
        if request.mode is PrefillMode.REMOTE:
            self._handoffs.open(request)
        elif request.mode is PrefillMode.HANDOFF:
            self._handoffs.compute(request)
        else:
            self.ask(request)

    def abort(self, request_id: str) -> None:
        if self._forget_running(request_id) is not None:
            self._handoffs.ended(request_id)
            self._calls.cancel(request_id)
            self._start_held()

    def _validate(self, request: Request) -> None:
        sampling, vocab_size = request.sampling, self._facts.vocab_size
        sampling.validate(vocab_size)
        self._backend.check(sampling)
        can_score = self._backend.scores_prompts or not request.is_prefill_only
        if not can_score or (request.mode is not PrefillMode.LOCAL and not self._facts.hands_over_kv):
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
        self._hear(running, piece.moments)
        # KV that has come from elsewhere is no hit of this cache, whatever the backend calls it.
        is_remote = self._handoffs.came(request)
        if not is_remote and not request.first_output_sent and piece.num_cached_tokens:
            request.num_cached_tokens = min(piece.num_cached_tokens, running.num_sent_tokens)
            self._load_counts.num_hit_tokens += request.num_cached_tokens
        token_ids = piece.token_ids
        self._require_sound(piece)
        self._require_due(running, len(token_ids))
        self._costs.answered(request_id, len(token_ids), len(request.token_ids) + len(token_ids))
        if token_ids and not request.first_output_sent:
            self._first_came(request, is_remote=is_remote)
        self._report(request, piece)

    def _first_came(self, request: Request, *, is_remote: bool) -> None:
        times, now_s = self._load_counts.times, self._clock.now()
        (times.handoff if is_remote else times.prefill).observe(now_s - request.entered_s)
        request.is_late = request.is_late_at(now_s)

    def _report(self, request: Request, piece: AnswerChunk) -> None:
        """The piece's tokens, and the answer's end. A prompt that is only scored has an end, and no tokens."""
        if piece.prompt_logprobs is not None:
            request.prompt_logprobs = list(piece.prompt_logprobs)
        token_ids = () if request.is_prefill_only else piece.token_ids
        for number, token_id in enumerate(token_ids):
            request.token_ids.append(token_id)
            reason = None
            if self._backend.samples_ids:
                # Ids made of text are all text: the token that ended it is not among them.
                reason = finish_reason(request, token_id)
                if reason is None and number == len(token_ids) - 1:
                    reason = piece.finish
            self._load_counts.num_generated_tokens += 1
            logprobs = piece.logprobs[number] if piece.logprobs else None
            report_token(self.output, request, token_id, logprobs, reason)
            if reason is not None:
                self._finished(request, at_backend=piece.finish is not None)
                return
        if piece.finish is not None:
            report_token(
                self.output, request, None, None, FinishReason.LENGTH if request.is_prefill_only else piece.finish
            )
            self._finished(request, at_backend=True)

    def _hear(self, running: _Running, moments: Moments | None) -> None:
        """Mark what the backend has told of the request's phases: with the first piece its way there, and later a
        preemption."""
        before, running.moments = running.moments, moments or running.moments
        heard_s, running.heard_s = running.heard_s, self._clock.now()
        if moments is None:
            return
        request, has_first = running.request, running.request.first_output_sent
        num_preempted = moments.num_preemptions - (before.num_preemptions if before is not None else 0)
        self._load_counts.num_preemptions += max(num_preempted, 0)
        if before is not None:
            if num_preempted > 0:
                self._mark(request, *preemption_marks(heard_s, running.heard_s))
        elif request.mode is PrefillMode.HANDOFF:
            self._mark(request, *prefill_marks(moments))
        elif self._facts.moves_kv and running.attached_s:
            self._mark(request, *fetch_marks(moments, running.attached_s))
        else:
            self._mark(request, *answer_marks(moments, has_first=has_first and running.attached_s > 0))
        if request.mode is not PrefillMode.HANDOFF:  # vLLM pads a prefill's only decode step with drafts
            self._mark(request, *draft_marks(moments, running.heard_s))

    def _mark(self, request: Request, *marks: tuple[Phase, float, float]) -> None:
        if request.listener is not None and self._backend.tells_moments:
            numbers = tuple(float(number) for mark in marks for number in mark)
            self.output.marks.append((request.request_id, numbers))

    def mark_now(self, request: Request, phase: Phase, value: float = 0.0) -> None:
        self._mark(request, (phase, self._clock.now(), value))

    def failed(self, request_id: str, error: KvrelayError) -> None:
        """The backend sends nothing more for this request. Another worker may succeed, unless the request itself is at
        fault."""
        if self._dead is None and self._handoffs.failed(request_id):
            return  # only its KV is lost: its hand-off decides
        running = self._forget_running(request_id)
        if running is None:
            return
        self._handoffs.ended(request_id)
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

    def look(self) -> None:
        """Take in what the backend has told of its steps, and begin requests for which a way has opened."""
        self._costs.look()
        self._placing.serve()

    def take_output(self) -> StepOutput:
        self.look()
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
        numbers = (*(piece.logprobs or ()), *(piece.prompt_logprobs or ()))
        if any(math.isnan(each.chosen.logprob) for each in numbers):
            raise AnswerError(f"the logprobs of {self._backend.name} are not numbers")

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
            self.output.kv_events += self._cache.place(request.sequence_hashes[:num_blocks])

    def _num_placed_blocks(self, request: Request) -> int:
        # The last token is computed in any case: something must be sampled from.
        num_blocks = (len(request.token_ids) - 1) // self._facts.kv_layout.block_size
        request.hash_blocks(num_blocks, self._facts.kv_layout.block_size, self._facts.adapter)
        return self._cache.num_leading(request.sequence_hashes[:num_blocks])

    # -- for hand-offs ------------------------------------------------------------------------------------------------

    def ask(
        self, request: Request, kv_transfer_params: bytes | None = None, at_rest: Callable[[], None] | None = None
    ) -> None:
        num_tokens = request.length_limit - len(request.token_ids)
        if kv_transfer_params is None:
            self._count_prefill(request)
        answer = self._backend.stream(request, num_tokens, kv_transfer_params)
        self._calls.start(request.request_id, answer, self.received, self.failed, at_rest)

    def ask_prefill(
        self, request: Request, kv_transfer_params: bytes | None = None, at_rest: Callable[[], None] | None = None
    ) -> None:
        self._count_prefill(request)
        answer = self._backend.prefill(request, kv_transfer_params, partial(self._saved, request))
        self._calls.start(request.request_id, answer, self.prefilled, self.failed, at_rest)

    def _count_prefill(self, request: Request) -> None:
        num_before = self.num_cached_tokens(request)
        self._costs.asked(request.request_id, max(len(request.token_ids) - num_before, 1), num_before)

    def attach(self, request: Request) -> None:
        running = self._running[request.request_id]
        running.attached_s, running.moments = self._clock.now(), None

    def take_first(self, request: Request, token_id: int, logprobs: PositionLogprobs | None) -> bool:
        self._first_came(request, is_remote=True)
        request.token_ids.append(token_id)
        self._running[request.request_id].num_sent_tokens += 1
        self._load_counts.num_generated_tokens += 1
        reason = finish_reason(request, token_id)
        report_token(self.output, request, token_id, logprobs, reason)
        if reason is not None:
            self._finished(request, at_backend=True)
        return reason is not None

    def discard(self, kv_transfer_params: bytes) -> None:
        # If that fails, the KV is kept for a while longer, then its engine frees it by itself.
        discard = partial(self._backend.discard, kv_transfer_params)
        self._calls.ask(discard, "discard KV that no request needs")

    def num_cached_blocks(self, request: Request) -> int:
        return self._num_placed_blocks(request) if isinstance(self._cache, MirroredCache) else 0

    # -- hand-offs ----------------------------------------------------------------------------------------------------

    def compute_handoff_here(self, handoff_id: HandoffId) -> None:
        request = self._handoffs.take(handoff_id)
        if request is None:
            return
        request_id = request.request_id
        self._calls.cancel(request_id)
        self._placing.forget(request)
        if not self._facts.prefills_here:
            self.failed(request_id, AnswerError(f"no KV has come, and {self._backend.name} computes no prompts"))
            return
        running = self._running[request_id]
        running.attached_s, running.moments = 0.0, None
        self.mark_now(request, Phase.RECOMPUTED)
        if request.leave_pair():
            self._open(request)
        else:
            self.ask(request)

    def keep_prefills_here(self) -> None:
        """Requests that are held here open no hand-off."""
        for request in self._held.members():
            if request.mode is PrefillMode.REMOTE and self._facts.prefills_here:
                request.mode = PrefillMode.LOCAL
        self._placing.serve()
        self._handoffs.keep_here()

    def _saved(self, request: Request, num_blocks: int) -> None:
        """The backend has saved the KV of the first ``num_blocks`` blocks of this prefill."""
        if self.lends is not None and request.request_id in self._running and self.lends.saved(request, num_blocks):
            self._calls.changed()

    def prefilled(self, request_id: str, prefilled: Prefilled) -> None:
        """The backend keeps the KV of this request, or will. Raises AnswerError for an impossible first token."""
        running = self._running.get(request_id)
        if running is None:
            return
        self._backoff.answered(is_probe=running.is_probe)
        request, piece, first = running.request, prefilled.piece, None
        self._hear(running, None if piece is None else piece.moments)
        self._costs.answered(request_id, 1, len(request.token_ids))
        self._costs.answers.ended(request_id)
        self._load_counts.times.prefill.observe(self._clock.now() - request.entered_s)
        if piece is not None and piece.token_ids:
            self._require_sound(piece)
            request.num_cached_tokens = min(piece.num_cached_tokens or 0, running.num_sent_tokens)
            self._load_counts.num_hit_tokens += request.num_cached_tokens
            first = handed_off_token(request, piece.token_ids[0], piece.logprobs[0] if piece.logprobs else None)
        self._place(request, len(request.token_ids))
        if self.lends is not None and first is None:
            raise AnswerError(f"{self._backend.name} has saved the KV of a prompt without its first token")
        sent, params = request.num_sent_blocks, prefilled.kv_transfer_params
        block_ids = self._handoffs.rest(request)
        self.output.handoff_chunks.append(
            HandoffChunk(request_id, sent, block_ids, last=True, first_output=first, kv_transfer_params=params)
        )

    def sending_finished(self, request_id: str) -> None:
        """The decode worker's backend has the KV, or none will get it. The answer may still be ending."""
        if (running := self._forget_running(request_id)) is not None:
            if running.heard_s:
                self._load_counts.times.sending.observe(self._clock.now() - running.heard_s)
            self._ended.add(1)
            self._start_held()
        self._handoffs.sent(request_id)

    # -- what can be seen ---------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self._running)

    def metrics(self) -> LoadMetrics:
        """From any thread."""
        num_waiting_tokens = self._placing.num_waiting_tokens()
        return self._load_counts.load(len(self._running), self._num_active_blocks(), self._costs, num_waiting_tokens)

    def stats(self) -> EngineStats:
        return self._load_counts.stats(self.metrics(), self._costs)

    def _num_active_blocks(self) -> int:
        """Of the backend's pool, or of the staging pool in proportion if that one is fuller."""
        size = self._facts.kv_layout.block_size
        num_active = sum(-(-len(running.request.token_ids) // size) for running in list(self._running.values()))
        return max(num_active, self._handoffs.num_active_blocks(self._facts.num_blocks))

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
        self._handoffs.check_integrity()
