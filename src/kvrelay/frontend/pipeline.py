"""A request's way through the frontend, on one page:

    body ──parse──> fields ──plan──> prompts ──tokenize──> sequences ──admit, route, call──> outputs ──> answer

Everything after the call is driven by the workers' messages: a token goes from the connection through its sequence to
the client's socket without a task or a queue in between. The coroutine here only waits for the end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as Items

from kvrelay.config import FrontendConfig
from kvrelay.errors import InvalidInputError, KvrelayError
from kvrelay.frontend.answers import ClientGoneError, StreamedAnswer, WholeAnswer
from kvrelay.frontend.api_keys import ApiKeys
from kvrelay.frontend.cluster import Cluster
from kvrelay.frontend.http import Exchange, Response
from kvrelay.frontend.in_flight import InFlight
from kvrelay.frontend.metrics import FrontendMetrics
from kvrelay.frontend.models import Model
from kvrelay.frontend.openai.answer import AnswerFormat
from kvrelay.frontend.openai.chat import ChatFormat
from kvrelay.frontend.openai.completions import CompletionFormat
from kvrelay.frontend.openai.errors import DeadlineError, error_event
from kvrelay.frontend.openai.plan import TIMEOUT_HEADER, GenerationPlan, check_timeout, plan_chat, plan_completion
from kvrelay.frontend.openai.requests import ChatCompletionRequest, CompletionRequest, parse_body
from kvrelay.frontend.prompts import Prompt, chat_prompt, completion_prompts
from kvrelay.frontend.sequence import Sequence, SequenceSpec
from kvrelay.frontend.stop_strings import StopStrings


class Pipeline:
    """Generates answers for ``/v1/completions`` and ``/v1/chat/completions``."""

    def __init__(
        self, config: FrontendConfig, cluster: Cluster, metrics: FrontendMetrics, keys: ApiKeys, in_flight: InFlight
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._metrics = metrics
        self._keys = keys
        self._in_flight = in_flight

    async def complete(self, exchange: Exchange, request_id: str) -> None:
        """``/v1/completions``. Raises KvrelayError before the answer has begun."""
        request = parse_body(exchange.request.body, CompletionRequest)
        model = self._cluster.model(request.model)
        plan = plan_completion(request, model.tokenizer.default_sampling, self._config.max_n)
        prompts = await completion_prompts(request.prompt, model, plan.add_special_tokens, self._config.max_prompts)
        echoes = None
        if plan.echo:
            echoes = [prompt.text_of(model.tokenizer) for prompt in prompts for _ in range(plan.n)]
        form = CompletionFormat(
            request_id,
            int(time.time()),
            model.name,
            model.tokenizer,
            return_token_ids=plan.return_token_ids,
            include_usage=plan.include_usage,
            continuous_usage=plan.continuous_usage,
            with_logprobs=request.logprobs is not None,
            with_prompt_logprobs=request.prompt_logprobs is not None,
            echoes=echoes,
        )
        await self._generate(exchange, request_id, model, plan, prompts, form)

    async def chat(self, exchange: Exchange, request_id: str) -> None:
        """``/v1/chat/completions``. Raises KvrelayError before the answer has begun."""
        request = parse_body(exchange.request.body, ChatCompletionRequest)
        model = self._cluster.model(request.model)
        plan = plan_chat(request, model.tokenizer.default_sampling, self._config.max_n)
        prompt = await chat_prompt(request, model)
        form = ChatFormat(
            request_id,
            int(time.time()),
            model.name,
            model.tokenizer,
            return_token_ids=plan.return_token_ids,
            include_usage=plan.include_usage,
            continuous_usage=plan.continuous_usage,
            with_logprobs=bool(request.logprobs),
        )
        await self._generate(exchange, request_id, model, plan, [prompt], form)

    async def _generate(
        self,
        exchange: Exchange,
        request_id: str,
        model: Model,
        plan: GenerationPlan,
        prompts: Items[Prompt],
        form: AnswerFormat,
    ) -> None:
        plan = plan.within(self._keys.limits_of(exchange.request.client), [len(prompt.token_ids) for prompt in prompts])
        timeout_s = self._timeout_s(exchange, plan)
        specs = _specs(request_id, model, plan, prompts)
        headers = [(b"x-request-id", request_id.encode())]
        answer: StreamedAnswer | WholeAnswer
        answer = StreamedAnswer(plan, form, exchange, headers) if plan.stream else WholeAnswer(plan, form)
        with self._in_flight.admitted(len(specs)):
            try:
                await self._run(
                    answer, exchange, [self._sequence(spec, model, plan, answer) for spec in specs], timeout_s
                )
            except ClientGoneError:
                raise
            except KvrelayError as exc:
                if not exchange.is_started or not isinstance(answer, StreamedAnswer):
                    raise
                answer.finish_broken(error_event(exc))
                raise BrokenStreamError(exc.message) from exc
        if isinstance(answer, StreamedAnswer):
            answer.finish()
        else:
            headers.append((b"x-kvrelay-worker", answer.worker_id.encode()))
            exchange.respond(Response(200, answer.body(), headers=headers))

    async def _run(
        self,
        answer: StreamedAnswer | WholeAnswer,
        exchange: Exchange,
        sequences: list[Sequence],
        timeout_s: float | None,
    ) -> None:
        """Until every sequence has finished; ends all of them when one fails, the client leaves or time is up."""
        if exchange.is_gone:
            raise ClientGoneError("the client went away")
        exchange.on_gone(answer.gone)
        try:
            async with asyncio.timeout(timeout_s):
                answer.start(sequences)
                await answer.done
        except TimeoutError as exc:
            raise DeadlineError(f"the request ran past its deadline of {timeout_s:g} s") from exc
        finally:
            answer.cancel()

    def _sequence(
        self, spec: SequenceSpec, model: Model, plan: GenerationPlan, answer: StreamedAnswer | WholeAnswer
    ) -> Sequence:
        return Sequence(
            spec,
            model,
            model.tokenizer.detokenizer(plan.skip_special_tokens),
            StopStrings(plan.stops, plan.include_stop) if plan.stops else None,
            answer,
            self._metrics,
            self._config.migration_limit,
        )

    def _timeout_s(self, exchange: Exchange, plan: GenerationPlan) -> float | None:
        """The body's field, else the header, else the configured deadline."""
        if plan.timeout_s is not None:
            return plan.timeout_s
        text = exchange.request.headers.get(TIMEOUT_HEADER)
        if text is None:
            return self._config.request_timeout_s or None
        try:
            return check_timeout(float(text))
        except ValueError as exc:
            raise InvalidInputError(f"{TIMEOUT_HEADER} is not a number", param=TIMEOUT_HEADER) from exc


class BrokenStreamError(KvrelayError):
    """The answer had begun and ended with an error event: nothing more can be said to the client."""


def _specs(request_id: str, model: Model, plan: GenerationPlan, prompts: Items[Prompt]) -> list[SequenceSpec]:
    """All choices in order: those of the first prompt, those of the second, ..."""
    specs: list[SequenceSpec] = []
    for prompt in prompts:
        for number in range(plan.n):
            sampling = plan.sampling_for(len(prompt.token_ids), number, model.max_model_len, model.vocab_size)
            specs.append(
                SequenceSpec(
                    request_id=request_id,
                    index=len(specs),
                    prompt_token_ids=prompt.token_ids,
                    sampling=sampling,
                    priority=plan.priority,
                    include_stop=plan.include_stop,
                )
            )
    return specs
