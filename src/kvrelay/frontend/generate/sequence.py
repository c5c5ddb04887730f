"""One sequence's life: placed on a worker, its tokens turned to text, continued on another worker if its own is lost.

    PLACED ──> RUNNING ──────────────────────────> ENDED       finish reason, stop string, failure, cancelled
      │ ^         │ ^
      v │         v │
     WAITING <── (worker lost or gave up; placed again with prompt + tokens so far, at most migration_limit times)

With order auto or prefill-first, an attempt may run on a pair: the first token comes from the prefill worker, and
again, in case that one fails, from the decode worker, which goes on from it.

A worker needs only the tokens to continue a sequence, and every delivered token is kept here. So no token is repeated
or missing. Text, stop strings and logprobs continue in this object, whichever worker samples. It does not know how
answers are sent.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from kvrelay.core.handoff import OrderPolicy, PrefixHolder
from kvrelay.core.histogram import Histogram
from kvrelay.core.messages import GenerateRequest, RequestRefused, SessionPaused, TokenOutput
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason, RefusalKind
from kvrelay.core.token_ids import to_bytes
from kvrelay.errors import (
    InvalidInputError,
    KvrelayError,
    OverloadedError,
    ProtocolError,
    RetryElsewhereError,
    WorkerUnavailableError,
)
from kvrelay.frontend.cluster.cold_start import RETRY_AFTER_S
from kvrelay.frontend.cluster.metrics import FrontendMetrics, ModelMetrics
from kvrelay.frontend.cluster.models import Model
from kvrelay.frontend.cluster.pairs import PrefillHalf, paired_request
from kvrelay.frontend.cluster.worker_link import WorkerLink, contradicts, unseen_part
from kvrelay.frontend.generate.answer_text import AnswerText
from kvrelay.frontend.generate.prompts import Prompt
from kvrelay.frontend.loop_turns import START_COST
from kvrelay.frontend.openai.answer import ChoicePiece, PromptLogprobs
from kvrelay.frontend.openai.answer_spec import AnswerSpec, choice_sampling
from kvrelay.frontend.openai.requests import KvHints
from kvrelay.http.errors import RequestRefusedError
from kvrelay.marks.phases import LATE_S
from kvrelay.marks.trace import Trace
from kvrelay.placement.ways import Ways
from kvrelay.router import RoutingRequest

_log = logging.getLogger(__name__)

REPLACEMENT_WAIT_S = 10.0
"""How long a request that has lost its worker waits for one. A refusal does not begin the wait anew, a loss does."""
RETRY_INTERVAL_S = 0.5
"""While it waits, workers that failed it are asked again: one that froze, or was full, may be well."""


class SequenceListener(Protocol):
    """The object that sends the answer. No call follows ``failed`` or a ``deliver`` with a finish.

    ``tokens_at_once``: the tokens of a piece, where nobody waits for each of them. ``is_begun``: its client has got a
    part of the answer, so no status can refuse the request any more.
    """

    tokens_at_once: int

    @property
    def is_begun(self) -> bool: ...

    def deliver(self, sequence: Sequence, piece: ChoicePiece) -> None: ...

    def failed(self, sequence: Sequence, error: KvrelayError) -> None: ...


class Asked(NamedTuple):
    """What all sequences of a request have in common."""

    request_id: str
    spec: AnswerSpec
    model: Model
    listener: SequenceListener
    metrics: FrontendMetrics
    migration_limit: int
    order: OrderPolicy = OrderPolicy.DECODE_FIRST
    trace: Trace | None = None


class Sequence:
    """One choice of a request's answer, with the number ``index``. Implements ``OutputReceiver``.

    ``sampling`` is the spec's, with this choice's seed and limit on tokens.
    """

    def __init__(self, asked: Asked, index: int, prompt: Prompt, sampling: SamplingParams) -> None:
        spec, model, metrics = asked.spec, asked.model, asked.metrics
        self.index = index
        self.prompt_token_ids = prompt.token_ids
        self.sampling = sampling
        self.output_token_ids: list[int] = []
        self.num_cached_tokens = 0
        self.prompt_logprobs: PromptLogprobs | None = None
        self.worker_id = ""
        self.decision = ""
        """Where the prefill ran, if the request asked."""
        self.num_migrations = 0
        self.ttft_s: float | None = None
        """From its start to its first token."""
        self._request_id, self._spec, self._model = asked.request_id, spec, model
        self._text = AnswerText(spec, model.tokenizer, sampling.min_tokens, prompt.token_ids)
        self._listener, self._metrics = asked.listener, metrics
        # No prompt is computed for a prefetch, and no one waits for an answer: its counts are thrown away.
        self._counts = ModelMetrics(metrics.objectives) if sampling.is_prefetch else metrics.of(model.name)
        self._counts.traffic.arrived(len(prompt.token_ids))
        self._gaps: Histogram
        """Where the times between its tokens count: of the worker that computes it, once it has told a token."""
        self._gap_s, self._num_gaps = 0.0, 0
        """Of the latest tokens that came at another time than those before, how many, and the time of each."""
        self._migration_limit, self._trace = asked.migration_limit, asked.trace
        self._order = OrderPolicy.DECODE_FIRST if sampling.is_prefetch else asked.order
        self._tokens_at_once = 1 if spec.stops else asked.listener.tokens_at_once
        self._traced = 0
        """The attempt's number in the trace."""
        self._must_be_local = sampling.must_prefill_locally
        self._link: WorkerLink | None = None
        self._ended_on: WorkerLink | None = None
        """Where it ran when its answer had ended."""
        self._prefill: PrefillHalf | None = None
        self._ways: Ways | None = None
        """The estimates of the attempt."""
        self._attempt = 0
        self._placement_id = ""
        """The attempt's name in the router."""
        self._attempt_id = ""
        """The attempt's name on its workers: with a pair, an id that carries both addresses."""
        self._has_output = self._is_prefilled = self._is_ended = False
        self._started_s = self._last_s = time.monotonic()
        self._failed_workers: set[str] = set()
        self._retry_after_s = math.inf
        self._waiting: asyncio.Task[None] | None = None
        self._waiting_until_s: float | None = None
        """The loop's time until which it may be without a worker; None if it has not waited since the last loss."""

    # -- where it runs ------------------------------------------------------------------------------------------------

    def start_or_wait(self) -> None:
        """Place it; without any worker, wait for one that a planner starts, or that is connected again. Raises as
        ``start``."""
        try:
            self.start()
        except WorkerUnavailableError as exc:
            if not (wait_s := self._model.wait_s):
                raise
            if self._model.cold_start.wait_s:
                self._wait(_none_came(self._model.name, wait_s))
            else:
                self._waiting_until_s = asyncio.get_running_loop().time() + wait_s
                self._wait(exc)

    def start(self) -> None:
        """Place it on a worker. Raises WorkerUnavailableError, OverloadedError, and PayloadTooLargeError for a request
        that no message can carry; after the latter it still has to be ended."""
        while True:
            placement = self._model.place(self._routing_request(), self._order, must_be_local=self._must_be_local)
            link, self._ways = placement.decode, placement.ways
            request = self._generate_request(link, placement.holder if placement.prefill is None else None)
            if self._trace is not None:
                half = placement.prefill
                self._traced = self._trace.routed(link.info.worker_id, half.info.worker_id if half is not None else "")
            if placement.prefill is not None:
                request = self._submit_prefill(placement.prefill, link, request, placement.holder)
            try:
                link.submit(request, self)
            except WorkerUnavailableError:
                self._leave_router()
                self._failed_workers.add(link.info.worker_id)
                continue
            self._link = link
            self.worker_id = link.info.worker_id
            return

    def _submit_prefill(
        self, prefill: WorkerLink, decode: WorkerLink, request: GenerateRequest, holder: PrefixHolder | None
    ) -> GenerateRequest:
        """Send the prefill worker its half, and return the decode worker's: the request as it was if there is no way
        to send the other half."""
        try:
            begins_within_s = 0.0 if self._ways is None else self._ways.begins_within_s
            paired = paired_request(request, prefill.info, decode.info, begins_within_s)
            half = PrefillHalf(
                prefill,
                decode,
                paired.request_id,
                self._deliver_first,
                partial(self._model.pairs.prefilled, self._placement_id),
                self.broken,
            )
            half.submit(paired if holder is None else msgspec.structs.replace(paired, holder=holder))
        except (ProtocolError, WorkerUnavailableError) as exc:
            _log.warning("%s: no pair with %s: %s", self._placement_id, prefill.info.worker_id, exc)
            self._model.pairs.prefilled(self._placement_id)
            return request
        _log.debug("%s is %s", self._placement_id, paired.request_id)
        self._attempt_id = paired.request_id
        self._prefill = half
        return paired

    def pause(self, kind: str, hints: KvHints | None) -> None:
        """The answer has been delivered; tell its worker what the session does next. ``kind``: see SessionPaused."""
        link, self._ended_on = self._ended_on, None
        if link is not None:
            link.session_paused(
                SessionPaused(
                    self._attempt_id,
                    kind,
                    within_s=(hints.retain_s or 0.0) if hints is not None else 0.0,
                    is_over=hints is not None and bool(hints.release),
                )
            )

    def cancel(self) -> None:
        """The client has gone, or another choice has failed."""
        self._end(abort=True)

    def refused(self, refusal: RequestRefused) -> None:
        """The worker refuses the sequence: try the next worker, until none is left."""
        self._link = None
        self._leave_router()
        self._metrics.refused(self._model.name, refusal.kind)
        if self._trace is not None:
            self._trace.refused()
        if refusal.status == OverloadedError.status:
            # A worker that refuses for another reason, e.g. because it leaves, does not know when a worker is free.
            self._retry_after_s = min(self._retry_after_s, refusal.retry_after_s)
        error = _refusal_error(refusal, self._retry_after_s, self._spec.grammar_param)
        if not refusal.retryable:
            self._fail(error)
            return
        self._failed_workers.add(self.worker_id)
        is_leaving = refusal.kind is RefusalKind.DRAINING or refusal.kind is RefusalKind.GONE
        has_begun = bool(self.output_token_ids) or self._listener.is_begun
        may_wait = has_begun or (is_leaving and self._model.cold_start.wait_s > 0.0)
        self._place_again(error, may_wait)

    def worker_lost(self, worker_id: str) -> None:
        """The connection to the worker is lost."""
        self._migrate(f"worker {worker_id} was lost", may_wait=True)

    def broken(self) -> None:
        # Even if the sequence had ended by itself: the waiting sink must be told.
        self._end(abort=True)
        self._listener.failed(self, KvrelayError("internal error"))

    def _migrate(self, reason: str, may_wait: bool) -> None:
        self._failed_workers.add(self.worker_id)
        self._continue(reason, may_wait)

    def _continue(self, reason: str, may_wait: bool) -> None:
        """Begin the next attempt, within the migration limit."""
        self._link = None
        self._leave_router()
        error = WorkerUnavailableError(f"the request could not be continued: {reason}")
        if self.num_migrations >= self._migration_limit:
            self._fail(error)
            return
        self.num_migrations += 1
        self._waiting_until_s = None
        if self._trace is not None:
            self._trace.migrated(len(self.output_token_ids))
        self._counts.num_migrations += 1
        _log.info("%s: %s; migrating after %d tokens", self._attempt_id, reason, len(self.output_token_ids))
        self._place_again(error, may_wait)

    def _place_again(self, error: KvrelayError, may_wait: bool) -> None:
        self._attempt += 1
        try:
            self.start()
        except RetryElsewhereError:
            if may_wait or self._model.wait_s:
                self._wait(error)
            else:
                self._fail(error)
        except KvrelayError as exc:
            self._fail(exc)

    def _wait(self, error: KvrelayError) -> None:
        """For a worker; fail with ``error`` if none comes."""
        waiting = self._wait_and_start(error, self._model.next_change())
        self._waiting = asyncio.get_running_loop().create_task(waiting)

    async def _wait_and_start(self, error: KvrelayError, change: asyncio.Event) -> None:
        """No worker is left: wait for one."""
        if self._waiting_until_s is None:
            wait_s = max(self._model.cold_start.wait_s, REPLACEMENT_WAIT_S)
            self._waiting_until_s = asyncio.get_running_loop().time() + wait_s
        try:
            async with asyncio.timeout_at(self._waiting_until_s):
                while True:
                    with suppress(TimeoutError), self._model.cold_start.waiting():
                        async with asyncio.timeout(RETRY_INTERVAL_S if self._model.is_available else None):
                            await change.wait()
                    await self._model.turns.take(START_COST + len(self.prompt_token_ids) + len(self.output_token_ids))
                    self._failed_workers.clear()
                    change = self._model.next_change()
                    try:
                        self.start()
                        return
                    except RetryElsewhereError as exc:
                        _log.debug("%s: %s", self._attempt_id, exc)
        except TimeoutError:
            self._waiting = None
            self._fail(error)
        except KvrelayError as exc:
            self._waiting = None
            self._fail(exc)
        except Exception:  # noqa: BLE001 - its client would wait for ever
            _log.exception("%s could not be started again", self._attempt_id)
            self._waiting = None
            self.broken()

    def _routing_request(self) -> RoutingRequest:
        self._placement_id = f"{self._request_id}-{self.index}" + (f"~{self._attempt}" if self._attempt else "")
        self._attempt_id = self._placement_id
        known = self.output_token_ids
        return RoutingRequest(
            request_id=self._placement_id,
            token_ids=(*self.prompt_token_ids, *known) if known else self.prompt_token_ids,
            max_tokens=self.sampling.max_tokens,
            slo_ttft_ms=self._spec.slo_ttft_ms,
            slo_itl_ms=self._spec.slo_itl_ms,
            exclude=tuple(self._failed_workers),
            cache_salt=self.sampling.cache_salt,
            adapter=self.sampling.adapter or self._model.adapter,
        )

    def _generate_request(self, link: WorkerLink, holder: PrefixHolder | None) -> GenerateRequest:
        return GenerateRequest(
            request_id=self._attempt_id,
            worker_id=link.info.worker_id,
            prompt=to_bytes(self.prompt_token_ids),
            sampling=self.sampling,
            output_token_ids=tuple(self.output_token_ids),
            priority=self._spec.priority,
            order=self._order.unpaired,
            tenant=self._spec.tenant,
            slo_ttft_ms=self._spec.slo_ttft_ms,
            slo_itl_ms=self._spec.slo_itl_ms,
            explain=self._spec.explain,
            traceparent="" if self._trace is None else self._trace.traceparent,
            report_interval=self._tokens_at_once,
            holder=holder,
            remote_wait_s=None if self._ways is None else self._ways.wait_s,
        )

    def _leave_router(self) -> None:
        """The attempt is over, on both workers of a pair."""
        if self._prefill is not None:
            self._prefill.drop(abort=True)
            self._prefill = None
        self._model.leave(self._placement_id, len(self.output_token_ids))
        self._is_prefilled = False

    # -- what it says -------------------------------------------------------------------------------------------------

    def deliver(self, output: TokenOutput, now_s: float) -> None:
        """Take new tokens from the worker. Raises MissingTokensError and then changes nothing."""
        reason = output.finish_reason
        if reason is not None and (reason is FinishReason.ABORT or reason is FinishReason.ERROR):
            self._gave_up(output)
            return
        if self._prefill is not None:
            if contradicts(output, self.output_token_ids):
                self._disagreed()
                return
            self._prefill.drop(abort=False)
        self._take(output, now_s, self._link)

    def _deliver_first(self, output: TokenOutput, now_s: float) -> None:
        """The first token of a pair, from its prefill worker."""
        if not self._is_ended and self._prefill is not None:
            self._take(output, now_s, self._prefill.link)

    def _take(self, output: TokenOutput, now_s: float, link: WorkerLink | None) -> None:
        """Add what is new in an output of ``link``'s worker to the answer."""
        known = self.output_token_ids
        if output.position != len(known):
            unseen = unseen_part(output, len(known))
            if unseen is None:
                self._heard(output)
                return
            output = unseen
        num_new = len(output.token_ids)
        if not self._is_prefilled:
            self._on_prefilled(output, now_s, link)
            if num_new > 1:
                self._share_gap(num_new - 1)
        elif num_new:
            gap_s = (now_s - self._last_s) / num_new
            if gap_s:
                self._gap_s, self._num_gaps = gap_s, num_new
                self._gaps.observe(gap_s, num_new)
            else:
                self._share_gap(num_new)
            if gap_s > LATE_S and self._trace is not None:
                self._trace.late_token(now_s, gap_s)
        self._last_s = now_s
        if link is not None:
            link.counts.generated_tokens += num_new
        piece = self._text.push(output, len(known))
        known += piece.token_ids
        if piece.finish is not None:
            self._heard(output)
            # A decode worker whose prefill worker has brought the end knows nothing of it.
            is_told = output.finish_reason is not None and link is self._link
            self._end(abort=not is_told, duration_s=now_s - self._started_s)
        self._listener.deliver(self, piece)

    def _share_gap(self, num_new: int) -> None:
        """These tokens came with those before, from one step: the time before is that of all of them."""
        self._gaps.observe(self._gap_s, -self._num_gaps)
        num_gaps = self._num_gaps + num_new
        self._gap_s, self._num_gaps = self._gap_s * self._num_gaps / num_gaps, num_gaps
        self._gaps.observe(self._gap_s, num_gaps)

    def _on_prefilled(self, output: TokenOutput, now_s: float, link: WorkerLink | None) -> None:
        """Handle the first output of an attempt. On the first attempt it also carries the prompt's cached tokens."""
        if self._trace is not None:
            self._trace.heard(self._traced, output.marks)
            self._trace.first_token(now_s)
        self._is_prefilled = True
        self._model.pairs.first_token(self._placement_id)
        if link is not None and not self.sampling.is_prefetch:
            num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)
            link.counts.prefilled(num_tokens, output.num_cached_tokens or 0)
        self._gaps, self._num_gaps = self._counts.of_worker(self.worker_id).itl, 0
        if self._has_output:
            self._gap_s, self._num_gaps = now_s - self._last_s, 1
            self._gaps.observe(self._gap_s)
            return
        self._has_output = True
        self.ttft_s = now_s - self._started_s
        self.num_cached_tokens = output.num_cached_tokens or 0
        if self._spec.explain:
            self.decision = output.decision if self._ways is None else self._ways.explained(output.decision)
        self.prompt_logprobs = output.prompt_logprobs
        told_by = self.worker_id if link is None else link.info.worker_id
        self._counts.first_token(self.ttft_s, len(self.prompt_token_ids), self.num_cached_tokens, told_by)

    def _heard(self, output: TokenOutput) -> None:
        """Keep the marks that came with a first or last output."""
        if self._trace is not None:
            self._trace.heard(self._traced, output.marks)

    def _disagreed(self) -> None:
        """The decode worker has computed another first token than the prefill worker, whose token was delivered.

        Equal only in exact arithmetic, they may differ where two tokens are nearly as likely. The delivered one counts:
        the answer is continued from it, on one worker.
        """
        self._must_be_local = True
        if self._link is not None:
            self._link.abort(self._attempt_id)
        self._continue("its workers disagree on a token", may_wait=True)

    def _gave_up(self, output: TokenOutput) -> None:
        """The worker ended the sequence on its own: another worker may succeed."""
        if self._link is not None:
            self._link.release(self._attempt_id)
        if output.is_final:
            self._link = None
            self._leave_router()
            param = self._spec.grammar_param if output.status == 400 else None
            self._fail(RequestRefusedError(output.error or "the request failed", output.status, param=param))
            return
        reason = output.error or f"worker {self.worker_id} gave it up"
        self._migrate(reason, may_wait=bool(self.output_token_ids))

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end(self, abort: bool, duration_s: float | None = None) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        if self._waiting is not None:
            self._waiting.cancel()
        if self._link is not None:
            if abort:
                self._link.abort(self._attempt_id)
            else:
                self._link.release(self._attempt_id)
            if duration_s is not None:
                self._ended_on = self._link
            self._link = None
        self._leave_router()
        num_tokens, ttft_s = len(self.output_token_ids), self.ttft_s
        self._counts.ended(num_tokens, duration_s)
        if duration_s is not None and ttft_s is not None:
            mean_gap_s = (duration_s - ttft_s) / max(num_tokens - 1, 1)
            self._counts.judge(ttft_s, mean_gap_s, self._spec.slo_ttft_ms, self._spec.slo_itl_ms)

    def _fail(self, error: KvrelayError) -> None:
        self._end(abort=True)
        self._listener.failed(self, error)


def _none_came(model: str, wait_s: float) -> WorkerUnavailableError:
    message = f"no worker serves the model `{model}`, and none was started within {wait_s:g} s"
    return WorkerUnavailableError(message, retry_after_s=RETRY_AFTER_S)


def sequences_of(asked: Asked, prompts: Items[Prompt]) -> Iterator[Sequence]:
    """All choices in order: those of the first prompt, those of the second, ... Every prompt is checked at once.

    Raises PromptTooLongError, InvalidInputError.
    """
    spec = asked.spec
    samplings = [spec.sampling_of(len(prompt.token_ids), asked.model.max_model_len) for prompt in prompts]
    return (
        Sequence(asked, number * spec.n + choice, prompt, choice_sampling(sampling, choice))
        for number, (prompt, sampling) in enumerate(zip(prompts, samplings))
        for choice in range(spec.n)
    )


def _refusal_error(refusal: RequestRefused, retry_after_s: float, grammar_param: str | None) -> KvrelayError:
    """The error for the client if no other worker takes the sequence. ``retry_after_s`` is the shortest of the
    overloaded workers, or infinite if there is none."""
    if refusal.status == OverloadedError.status:
        return OverloadedError(refusal.reason, retry_after_s=retry_after_s)
    if refusal.status == WorkerUnavailableError.status:
        wait_s = retry_after_s if retry_after_s < math.inf else refusal.retry_after_s
        return WorkerUnavailableError(refusal.reason, retry_after_s=wait_s)
    param = grammar_param if refusal.status == InvalidInputError.status else None
    return RequestRefusedError(refusal.reason, refusal.status, param=param)
