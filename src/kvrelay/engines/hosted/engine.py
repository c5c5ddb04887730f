"""The scheduler half: the requests at the backend, and the effect of each piece of an answer.

Everything runs on the host's thread, except for ``check_room`` and the numbers that ``stats`` reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice

import msgspec

from kvrelay.config import EngineConfig
from kvrelay.core.clock import Clock
from kvrelay.core.completion_rate import CompletionRate
from kvrelay.core.events import KvEvent, LoadMetrics
from kvrelay.core.handoff import HandoffId
from kvrelay.core.latest import Latest
from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.messages import TokenOutput
from kvrelay.core.status import FinishReason, RequestStatus
from kvrelay.core.step_cost import StepCost
from kvrelay.engine.admission.fair import FairQueue, Shares
from kvrelay.engine.admission.queue import MAX_CANDIDATES
from kvrelay.engine.contract import EngineFacts, HandsOver, MovesKv
from kvrelay.engine.limits import NONE_PENDING, PendingArrivals, require_in_time
from kvrelay.engine.loans import remote_prefill
from kvrelay.engine.reports import finish_reason, handed_off_token, report_token, stop_token_ids
from kvrelay.engine.request import PrefillMode, Request, check_tokens
from kvrelay.engine.scheduler import RemotePrefills as TimedPrefills
from kvrelay.engine.stats import DraftCounts, EngineStats
from kvrelay.engine.step import HandoffChunk, StepOutput
from kvrelay.engines.connector.terms import StagedKv, encode_request
from kvrelay.engines.hosted.backend import AnswerChunk, AnswerError, Backend, BackendRefusedError, Prefilled
from kvrelay.engines.hosted.cache import MirroredCache, PlacedPrefixes
from kvrelay.engines.hosted.calls import BackendCalls
from kvrelay.engines.hosted.costs import HostedCosts, StepTeller
from kvrelay.engines.hosted.handoffs import RemotePrefills, StagedHandoffs
from kvrelay.engines.hosted.load import Backoff, HostedLoad
from kvrelay.engines.hosted.moments import (
    Moments,
    answer_marks,
    draft_marks,
    fetch_marks,
    preemption_marks,
    prefill_marks,
)
from kvrelay.engines.hosted.staging import StagedBlocks
from kvrelay.errors import (
    EngineDeadError,
    IntegrityError,
    InvalidInputError,
    KvrelayError,
    OverloadedError,
    WorkerUnavailableError,
)
from kvrelay.marks.phases import Phase
from kvrelay.placement.base import Decision, PrefillPlace, Situation
from kvrelay.placement.cost import CostPlacement, stay_here

TEXT_SLACK_TOKENS = 64
UNKNOWN_COST = StepCost(math.nan)
"""Not sound, so that thresholds decide."""
MAX_UNREPORTED = 1024


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
        self._remote = RemotePrefills(worker_id)
        self.staging = StagedHandoffs(num_staging_blocks, facts.kv_layout.block_size) if num_staging_blocks else None
        self._cache = cache
        self._clock = clock
        self._ended = CompletionRate(clock)
        self._backoff = Backoff(clock)
        self._dead: EngineDeadError | None = None
        self._num_arrived = 0
        self._load_counts = HostedLoad(worker_id, facts, config, drafts)
        step_times = self._load_counts.times.step
        self._costs = HostedCosts(backend.name, teller, clock, step_times, sets_pace=sets_pace)
        self._unplaced: dict[str, Request] = {}
        """Requests for which neither way is open, in order of arrival."""
        self._timed = TimedPrefills(clock)
        self._unreported: Latest[str, Callable[[], None]] = Latest(MAX_UNREPORTED)
        """Prefills that have come back, until the worker has told how long they were computed."""

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
        if not request.is_resumed and request.placement is not None and request.placement.refuses_late:
            self._require_in_time(request, request.placement.policy)
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
        self._unplaced.pop(request_id, None)
        self._timed.forget(running.request)
        self._costs.left(running.request)
        if running.request in self._held:
            self._held.remove(running.request)
        else:
            self._shares.charge(running.request.tenant, running.request.num_output_tokens)
        return running

    def _open(self, request: Request) -> None:
        if request.mode is PrefillMode.LOCAL and request.placement is not None and request.placement.policy is not None:
            self._unplaced[request.request_id] = request
            self._place_waiting()
        else:
            self._begin(request)

    def _begin(self, request: Request) -> None:
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
        if kv_transfer_params is None:
            self._count_prefill(request)
        answer = self._backend.stream(request, num_tokens, kv_transfer_params)
        at_rest = None if staged is None else partial(self._at_rest, staged)
        self._calls.start(request.request_id, answer, self.received, self.failed, at_rest)

    def _count_prefill(self, request: Request) -> None:
        num_before = self.num_cached_tokens(request)
        self._costs.asked(request.request_id, max(len(request.token_ids) - num_before, 1), num_before)

    # -- where a prefill runs -----------------------------------------------------------------------------------------

    def _place_waiting(self) -> None:
        """Begin the first requests for which a way is open, until there are none."""
        while any([self._place_now(request) for request in list(islice(self._unplaced.values(), MAX_CANDIDATES))]):
            pass

    def _place_now(self, request: Request) -> bool:
        placement = request.placement
        assert placement is not None
        assert placement.policy is not None, "else it is placed already"
        decision = self._decide(request, placement.policy)
        if decision.place is None or self._unplaced.pop(request.request_id, None) is None:
            return False
        placement.decision = decision
        placement.policy.placed(decision)
        if decision.local_s or decision.remote_s:
            self._mark_now(request, Phase.LOCAL_ESTIMATE, decision.local_s)
            self._mark_now(request, Phase.REMOTE_ESTIMATE, decision.remote_s)
        if decision.place is PrefillPlace.REMOTE:
            request.mode = PrefillMode.REMOTE
            self._timed.send(request)
        self._begin(request)
        return True

    def _decide(self, request: Request, policy: CostPlacement) -> Decision:
        """The backend takes any number of prompts, so the way here is always open."""
        if not policy.has_choice or request.objectives is None:
            return stay_here(is_here_open=True)
        answers, num_tokens = self._costs.answers, request.num_queued_tokens
        decodes, context = answers.num_decodes, answers.num_context
        most = max(self._config.max_num_batched_tokens - decodes, 1)
        num_line = sum(other.num_queued_tokens for other in self._unplaced.values()) - num_tokens
        situation = Situation(
            num_tokens=num_tokens,
            waited_s=max(self._clock.now() - request.waiting_since_s, 0.0),
            num_here=answers.num_prefill_tokens,
            num_remote_tokens=self._timed.num_tokens,
            num_remote_prefills=len(self._timed),
            num_line=max(num_line, 0),
            chunk=self._costs.pace().prefill_budget(
                most, num_before=num_tokens // 2, num_decodes=decodes, num_context=context
            ),
            num_decodes=decodes,
            num_context=context,
            is_here_open=True,
            cost=self._costs.cost or UNKNOWN_COST,
            objectives=request.objectives,
            spread=self._costs.model.spread,
        )
        return policy.decide(situation)

    def _require_in_time(self, request: Request, policy: CostPlacement | None) -> None:
        """Raise ObjectiveMissedError if even the fastest way is too late for the request's first token."""
        cost, objectives = self._costs.cost, request.objectives
        if cost is None or objectives is None:
            return
        own, waiting = request.num_queued_tokens, sum(other.num_queued_tokens for other in self._unplaced.values())
        before = self._costs.answers.num_prefill_tokens + waiting
        require_in_time(objectives, cost, policy, own, before)

    def handoff_told(self, request_id: str) -> None:
        report = self._unreported.pop(request_id, None)
        if report is not None:
            report()

    def abort(self, request_id: str) -> None:
        if self._forget_running(request_id) is not None:
            self._handoff_ended(request_id)
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
        if self.staging is None:
            is_remote = self._remote.arrived(request_id, self.output)
            if is_remote and (report := self._timed.arrived(request)) is not None:
                self._unreported[request_id] = report
        else:
            is_remote = self.staging.loaded(request_id)
            self._serve_waiting()
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

    def _mark_now(self, request: Request, phase: Phase, value: float = 0.0) -> None:
        self._mark(request, (phase, self._clock.now(), value))

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

    def look(self) -> None:
        """Take in what the backend has told of its steps, and begin requests for which a way has opened."""
        self._costs.look()
        if self._unplaced:
            self._place_waiting()

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
        self._mark_now(request, Phase.PREFILL_QUEUED)
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
        running = self._running[request_id]
        running.attached_s, running.moments = self._clock.now(), None
        self._ask(running.request, kv_transfer_params)
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
        self._timed.forget(self._running[request_id].request)
        if not self._facts.prefills_here:
            self.failed(request_id, AnswerError(f"no KV has come, and {self._backend.name} computes no prompts"))
            return
        running = self._running[request_id]
        running.attached_s, running.moments = 0.0, None
        self._mark_now(running.request, Phase.RECOMPUTED)
        if running.request.leave_pair():
            self._open(running.request)
        else:
            self._ask(running.request)

    def keep_prefills_here(self) -> None:
        """Requests that are held here open no hand-off. Those that no one has claimed are computed here one by one, and
        those that wait for blocks at once."""
        for request in self._held.members():
            if request.mode is PrefillMode.REMOTE and self._facts.prefills_here:
                request.mode = PrefillMode.LOCAL
        self._place_waiting()
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
        self._timed.came_back(request)
        num_tokens = len(request.token_ids)
        running.attached_s = self._clock.now()
        self._mark_now(request, Phase.ATTACHED)
        if _goes_on_from(request):
            self._first_came(request, is_remote=True)
            request.token_ids.append(token_id)
            running.num_sent_tokens += 1
            self._load_counts.num_generated_tokens += 1
            reason = finish_reason(request, token_id)
            report_token(self.output, request, token_id, logprobs, reason)
            if reason is not None:
                self._finished(request, at_backend=True)
                return True
        self.staging.load(request_id, blocks)
        staged = StagedKv("load", blocks.block_ids, num_tokens, request.num_cached_blocks)
        self._ask(request, encode_request(staged), blocks)
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
                size = self._facts.kv_layout.block_size
                request.num_sent_blocks = min(request.num_load_tokens // size, len(blocks.block_ids) - 1)
                num_tokens, first = len(request.token_ids), request.num_sent_blocks
                params = encode_request(StagedKv("save", blocks.block_ids, num_tokens, first))
                self._ask_prefill(request, params, blocks)
            else:
                self._lend(request, blocks)

    def _lend(self, request: Request, blocks: StagedBlocks) -> None:
        """Have a peer fill ``blocks``, all but those for what the backend's own cache has, which stay empty."""
        assert self.staging is not None
        handoff_id = self._remote.handoff_of(request.request_id)
        self.staging.lend(handoff_id, 1, blocks)
        # Of a model with windows or states beside its KV, vLLM may have a block and not be able to go on after it.
        if isinstance(self._cache, MirroredCache) and len(self._facts.kv_layout.regions) == 1:
            request.num_cached_blocks = self._num_placed_blocks(request)
        num_cached_tokens = request.num_cached_blocks * self._facts.kv_layout.block_size
        remote = remote_prefill(request, handoff_id, request.sampling, blocks.block_ids, num_cached_tokens)
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
        self._count_prefill(request)
        answer = self._backend.prefill(request, kv_transfer_params, partial(self.saved, request.request_id))
        at_rest = None if staged is None else partial(self._at_rest, staged)
        self._calls.start(request.request_id, answer, self.prefilled, self.failed, at_rest)

    def saved(self, request_id: str, num_blocks: int) -> None:
        """The first ``num_blocks`` staging blocks of this prefill hold their KV. The last one leaves with the first
        token."""
        running = self._running.get(request_id)
        if self.staging is None or running is None:
            return
        request, block_ids = running.request, self.staging.saved(request_id)
        first, end = request.num_sent_blocks, min(num_blocks, len(block_ids) - 1)
        if end > first:
            request.num_sent_blocks = end
            self._mark_now(request, Phase.SAVED, (end - first) * self._facts.kv_layout.block_bytes)
            self.output.handoff_chunks.append(HandoffChunk(request_id, first, block_ids[first:end], last=False))
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
        if self.staging is not None and first is None:
            raise AnswerError(f"{self._backend.name} has saved the KV of a prompt without its first token")
        sent = request.num_sent_blocks
        block_ids = () if self.staging is None else self.staging.saved(request_id)[sent:]
        if block_ids:
            self._mark_now(request, Phase.SAVED, len(block_ids) * self._facts.kv_layout.block_bytes)
        params = prefilled.kv_transfer_params
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
        if self.staging is not None:
            self.staging.sent(request_id)
            self._serve_waiting()

    # -- what can be seen ---------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self._running)

    def metrics(self) -> LoadMetrics:
        """From any thread."""
        num_waiting_tokens = sum(request.num_queued_tokens for request in list(self._unplaced.values()))
        return self._load_counts.load(len(self._running), self._num_active_blocks(), self._costs, num_waiting_tokens)

    def stats(self) -> EngineStats:
        return self._load_counts.stats(self.metrics(), self._costs)

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
