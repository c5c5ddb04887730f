"""A request's path through the frontend, on one page:

    body ──parse──> fields ──spec, admit──> prompts ──tokenize──> sequences ──route, call──> outputs ──> answer

Large bodies are parsed and tokenized on the side threads, and large answers are put together there, so that other
requests do not wait. After the call, the workers' messages drive everything: a token goes from the connection through
its sequence to the client's socket without a task or a queue in between. The coroutine here only waits for the end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import closing
from functools import partial

import msgspec
from msgspec.structs import replace

from kvrelay.config import FrontendConfig
from kvrelay.core.handoff import OrderPolicy
from kvrelay.errors import InvalidInputError, KvrelayError, WorkerUnavailableError
from kvrelay.frontend.access.access_log import AccessLog
from kvrelay.frontend.access.admission import Admission
from kvrelay.frontend.cluster.metrics import FrontendMetrics
from kvrelay.frontend.cluster.models import Model
from kvrelay.frontend.cluster.pairs import ORDER_HEADER, read_order
from kvrelay.frontend.cluster.view import ClusterView
from kvrelay.frontend.generate.answers import (
    ClientGoneError,
    CollectedAnswer,
    StreamedAnswer,
    origin_headers,
    require_client,
)
from kvrelay.frontend.generate.chat_api import ChatApi, ChatTask
from kvrelay.frontend.generate.prompts import Prompt, chat_prompt, completion_prompts, counted_chat, read_completion
from kvrelay.frontend.generate.sequence import Asked, Sequence, sequences_of
from kvrelay.frontend.openai.answer import AnswerContext, AnswerFormat, encode_json, with_extra
from kvrelay.frontend.openai.answer_spec import TIMEOUT_HEADER, AnswerSpec, chat_spec, check_timeout, completion_spec
from kvrelay.frontend.openai.completions import CompletionFormat
from kvrelay.frontend.openai.logprobs import TokenIdTexts, TokenTexts
from kvrelay.frontend.openai.requests import (
    ChatCompletionRequest,
    FieldsCheck,
    GenerationFields,
    KvHints,
    has_short_fields,
)
from kvrelay.frontend.side_threads import INLINE_SIZE, SideThreads
from kvrelay.frontend.tools.chat_form import ChatForm, OutputParsers, chat_form
from kvrelay.frontend.tools.dialects import known_markers
from kvrelay.http import Exchange, Response
from kvrelay.http.api_keys import ApiKeys, cache_salt_of
from kvrelay.http.errors import DeadlineError, failure_of
from kvrelay.marks.kept import Kept
from kvrelay.marks.trace import Trace
from kvrelay.marks.waterfall import waterfall

MAX_KIND_CHARS = 128
WATERFALL_HEADER = "x-kvrelay-waterfall"


class Pipeline(msgspec.Struct, eq=False):
    """Generates answers for ``/v1/completions`` and for all APIs for chats."""

    _config: FrontendConfig
    _order: OrderPolicy
    _cluster: ClusterView
    _metrics: FrontendMetrics
    _keys: ApiKeys
    _admission: Admission
    _threads: SideThreads
    _access_log: AccessLog
    _check_fields: FieldsCheck
    _kept: Kept | None
    """Has a trace of each running request; None: no marks are made."""
    _reading: OutputParsers

    async def complete(self, exchange: Exchange, request_id: str) -> None:
        """``/v1/completions``. Raises KvrelayError before the answer has begun."""
        size = len(exchange.request.body)
        request, items = await self._threads.parse(
            size, read_completion, exchange.request.body, self._config.max_prompts, self._check_fields
        )
        exchange.drop_body()
        model = self._model(exchange, request.model)
        spec_size = 0 if size > INLINE_SIZE and has_short_fields(request) else size
        spec = await self._threads.call(
            spec_size, completion_spec, request, model.tokenizer.default_sampling, self._config.max_n
        )
        spec.check(model.vocab_size)
        client = exchange.request.client
        with self._admission.admitted(spec.n * len(items), client, self._keys.limits_of(client)):
            work = completion_prompts(items, model, spec.add_special_tokens, spec.echo, spec.keep_last)
            is_light = not spec.echo and all(isinstance(item, list) for item in items)
            prompts = await self._threads.run(size, work, partial(require_client, exchange), is_light=is_light)
            echoes = None
            if spec.echo:
                echoes = [prompt.text or "" for prompt in prompts for _ in range(spec.n)]
            form = CompletionFormat(
                AnswerContext(request_id, int(time.time()), exchange.request.model, _texts(request, model), spec),
                model.tokenizer.detokenizer,
                with_prompt_logprobs=request.prompt_logprobs is not None,
                echoes=echoes,
            )
            del request, items  # the ids as Python's integers; the answer may stream for minutes
            await self._generate(exchange, request_id, model, spec, prompts, form)

    async def chat(self, api: ChatApi, exchange: Exchange, request_id: str) -> None:
        """Any API for chats. Raises KvrelayError before the answer has begun."""
        task, model, size = await self._read_chat(api, exchange)
        request = task.request
        with api.own_names():
            form, spec = await self._threads.call(size, self._chat_spec, request, model)
            spec.check(model.vocab_size)
            client = exchange.request.client
            with self._admission.admitted(spec.n, client, self._keys.limits_of(client)):
                work = chat_prompt(request, model, form.functions, spec.keep_last)
                prompts = await self._threads.run(size, work, partial(require_client, exchange))
                context = AnswerContext(
                    request_id,
                    int(time.time()),
                    exchange.request.model,
                    _texts(request, model),
                    spec,
                    self._reading.parser(form, prompts[0].text or ""),
                    form.tools.dialect.call_id_chars if form.tools else 0,
                )
                await self._generate(
                    exchange, request_id, model, spec, prompts, task.make_format(context), context.called
                )

    async def count_tokens(self, api: ChatApi, exchange: Exchange, request_id: str) -> None:
        """How many tokens the prompt of a chat has, as ``input_tokens``. Raises InvalidInputError."""
        task, model, size = await self._read_chat(api, exchange)
        with api.own_names():
            form = await self._threads.call(size, self._chat_form, task.request, model)
            work = counted_chat(task.request, model, form.functions)
            num_tokens = await self._threads.run(size, work, partial(require_client, exchange))
            exchange.respond(Response(200, encode_json({**api.counted, "input_tokens": num_tokens})))

    async def _read_chat(self, api: ChatApi, exchange: Exchange) -> tuple[ChatTask, Model, int]:
        """The request, its model, and how many bytes it had."""
        api.check_headers(exchange.request.headers)
        size = len(exchange.request.body)
        task = await self._threads.call(size, api.read, exchange.request.body, self._check_fields)
        exchange.drop_body()
        return task, self._model(exchange, task.request.model), size

    def _model(self, exchange: Exchange, name: str | None) -> Model:
        """The model of that name, as which the request is counted and answered. Raises ModelNotFoundError,
        WorkerUnavailableError."""
        try:
            model = self._cluster.model(name)
        except WorkerUnavailableError:
            exchange.request.model = self._cluster.counted_as(name)
            raise
        exchange.request.model = model.called(name)
        return model

    def _chat_spec(self, request: ChatCompletionRequest, model: Model) -> tuple[ChatForm, AnswerSpec]:
        """Raises InvalidInputError."""
        form = self._chat_form(request, model)
        spec = chat_spec(request, model.tokenizer.default_sampling, self._config.max_n, form.constraint)
        shown = self._reading.markers(form)
        return form, replace(spec, shown_tokens=shown) if shown else spec

    def _chat_form(self, request: ChatCompletionRequest, model: Model) -> ChatForm:
        tokenizer = model.tokenizer
        markers = known_markers(tokenizer.markers, model.vocab_size)
        return chat_form(request, self._reading.dialect(tokenizer.chat_template), markers)

    def _with_own_blocks(self, spec: AnswerSpec, client: str, adapter: str) -> AnswerSpec:
        """With everything on which the names of its KV blocks depend, beside its tokens."""
        salt = cache_salt_of(client, spec.sampling.cache_salt, is_shared=self._config.share_prefix_cache)
        if (salt, adapter) == (spec.sampling.cache_salt, spec.sampling.adapter):
            return spec
        return replace(spec, sampling=replace(spec.sampling, cache_salt=salt, adapter=adapter))

    async def _generate(
        self,
        exchange: Exchange,
        request_id: str,
        model: Model,
        spec: AnswerSpec,
        prompts: Items[Prompt],
        form: AnswerFormat,
        called: list[str] | None = None,
    ) -> None:
        """``called``: has the functions that the answer has called, once it is delivered."""
        lengths = [len(prompt.token_ids) for prompt in prompts]
        trace = self._kept.running.get(request_id) if self._kept is not None else None
        if trace is not None:
            trace.tokenised(model.name, sum(lengths))
        client = exchange.request.client
        limits = self._keys.limits_of(client)
        spec = spec.within(limits, lengths).asked_by(client, exchange.request.headers)
        spec = self._with_own_blocks(spec, client, model.adapter_of(exchange.request.model))
        spec.check_prompts(lengths)
        timeout_s = self._timeout_s(exchange, spec)
        order = read_order(exchange.request.headers.get(ORDER_HEADER), self._order)
        headers = [(b"x-request-id", request_id.encode())]
        answer: StreamedAnswer | CollectedAnswer
        shown = partial(self._waterfall, exchange, trace)
        answer = StreamedAnswer(spec, form, exchange, headers, shown) if spec.stream else CollectedAnswer(spec)
        limit = self._config.migration_limit
        sequences = sequences_of(Asked(request_id, spec, model, answer, self._metrics, limit, order, trace), prompts)
        if trace is not None:
            trace.answering(lambda: sum(len(sequence.output_token_ids) for sequence in answer.sequences))
        tokens_per_minute = limits.tokens_per_minute or 0
        self._admission.count_tokens(client, tokens_per_minute, sum(lengths))
        with closing(answer):
            try:
                await self._run(answer, exchange, sequences, spec.n * len(prompts), timeout_s)
            except ClientGoneError:
                raise
            except KvrelayError as exc:
                if not exchange.is_started or not isinstance(answer, StreamedAnswer):
                    raise
                answer.finish_broken(failure_of(exc))
                raise BrokenStreamError(exc.message) from exc
            finally:
                if tokens_per_minute:
                    self._admission.count_tokens(client, tokens_per_minute, answer.generated().output_tokens or 0)
                if self._access_log.is_on:
                    self._access_log.note(request_id, answer.generated())
                if trace is not None:
                    trace.answered()
            if isinstance(answer, CollectedAnswer):
                headers += origin_headers(answer.sequences[0])
                whole = await self._threads.call(answer.size, form.whole, answer.choices, answer.usage())
                extra = shown()
                exchange.respond(Response(200, with_extra(whole, extra) if extra else whole, headers=headers))
            _tell_pause(answer.sequences, called or [], spec.kv_hints)

    def _waterfall(self, exchange: Exchange, trace: Trace | None) -> bytes:
        """The answer's extra field, if the client has asked for it."""
        is_asked = exchange.request.headers.get(WATERFALL_HEADER, "") not in ("", "0")
        if self._kept is None or trace is None or not is_asked:
            return b""
        return b',"kvrelay_waterfall":' + encode_json(waterfall(trace, self._kept.frontend))

    async def _run(
        self,
        answer: StreamedAnswer | CollectedAnswer,
        exchange: Exchange,
        sequences: Iterator[Sequence],
        num_sequences: int,
        timeout_s: float | None,
    ) -> None:
        """Wait until every sequence has finished. End all of them if one fails, the client leaves or time is up."""
        require_client(exchange)
        exchange.on_gone(answer.gone)
        try:
            async with asyncio.timeout(timeout_s):
                await answer.start(sequences, num_sequences, self._threads.turns)
                await answer.done
        except TimeoutError as exc:
            if not exchange.is_done:  # else a stream has ended at this moment
                raise DeadlineError(f"the request ran past its deadline of {timeout_s:g} s") from exc
        finally:
            answer.cancel()

    def _timeout_s(self, exchange: Exchange, spec: AnswerSpec) -> float | None:
        """The body's field, else the header, else the configured deadline."""
        if spec.timeout_s is not None:
            return spec.timeout_s
        text = exchange.request.headers.get(TIMEOUT_HEADER)
        if text is None:
            return self._config.request_timeout_s or None
        try:
            return check_timeout(float(text))
        except ValueError as exc:
            raise InvalidInputError(f"{TIMEOUT_HEADER} is not a number", param=TIMEOUT_HEADER) from exc


def _tell_pause(sequences: Items[Sequence], called: list[str], hints: KvHints | None) -> None:
    """What the session waits for: the functions that it has called, else what the client says. With several answers no
    one knows which of them continues."""
    if len(sequences) != 1 or not (called or hints is not None) or sequences[0].sampling.is_prefetch:
        return
    told = hints.tool or "" if hints is not None else ""
    sequences[0].pause("+".join(sorted(set(called)))[:MAX_KIND_CHARS] if called else told, hints)


def _texts(request: GenerationFields, model: Model) -> TokenTexts:
    """How logprobs name tokens."""
    return TokenIdTexts(model.tokenizer) if request.return_tokens_as_token_ids else model.tokenizer


class BrokenStreamError(KvrelayError):
    """The answer had begun and ended with an error event, so the client cannot be told more."""
