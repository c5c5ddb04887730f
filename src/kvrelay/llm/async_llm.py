"""The asynchronous API: prompts in, answers or pieces of answers out, on the caller's event loop."""

from __future__ import annotations

import asyncio
import operator
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.core.messages import AdminRequest
from kvrelay.errors import EngineDeadError, InvalidInputError, KvrelayError, WorkerUnavailableError
from kvrelay.frontend.cluster.metrics import FrontendMetrics
from kvrelay.frontend.cluster.models import Model
from kvrelay.frontend.generate.answers import Answer, CollectedAnswer
from kvrelay.frontend.generate.prompts import Prompt, completion_prompts, render_chat
from kvrelay.frontend.generate.sequence import Asked, Sequence, SequenceListener, sequences_of
from kvrelay.frontend.loop_turns import LoopTurns
from kvrelay.frontend.openai.answer import Choice, ChoicePiece
from kvrelay.frontend.openai.answer_spec import AnswerSpec
from kvrelay.frontend.openai.requests import ChatMessage
from kvrelay.frontend.side_threads import INLINE_SIZE, complete
from kvrelay.llm.embedded import EmbeddedCluster, embedded_cluster
from kvrelay.llm.outputs import CompletionOutput, RequestOutput, TextDelta
from kvrelay.llm.params import SamplingParams, recommended, spec_of

TextOrTokens = str | Items[int]
Message = Mapping[str, Any]

MIGRATION_LIMIT = 3
TOKENS_AT_ONCE = 64
"""Of an answer that is returned as a whole; each piece wakes the event loop beside the engine's threads."""


class AsyncLLM:
    """A model, its engines and the hand-off between them, in this process.

    ``model`` is a checkpoint directory or hub id (default: the bundled checkpoint). ``prefill`` and ``decode`` are
    numbers of engines; with ``prefill=0`` each engine prefills its own requests. ``engine`` is an engine's name.
    ``settings`` are the options of ``kvrelay worker`` and of the router, by field name: ``num_blocks=512``,
    ``dtype="float32"``, ``max_local_prefill_length=0``.

        async with AsyncLLM("./my-checkpoint") as llm:
            output = await llm.generate("Once upon a time")
            async for delta in llm.stream("Once upon a time"):
                print(delta.text, end="")

    Raises ConfigError for wrong or unknown settings; ``start`` raises CheckpointError and related errors.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        prefill: int = 0,
        decode: int = 1,
        engine: str = "torch",
        **settings: object,
    ) -> None:
        self._cluster = embedded_cluster(model, prefill, decode, engine, settings)
        self._metrics = FrontendMetrics()
        self._turns = LoopTurns()

    async def start(self) -> AsyncLLM:
        """Load the model. Returns self."""
        await self._cluster.start()
        return self

    async def close(self) -> None:
        """Finish running requests, then free everything. Idempotent."""
        await self._cluster.close()

    async def __aenter__(self) -> AsyncLLM:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def cluster(self) -> EmbeddedCluster:
        """The engines, for measurements and tests."""
        return self._cluster

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus answer, in tokens."""
        return self._cluster.model.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._cluster.model.vocab_size

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, with the special tokens that the tokenizer adds."""
        return self._cluster.model.tokenizer.encode(text)

    def decode(self, token_ids: Items[int]) -> str:
        return self._cluster.model.tokenizer.decode(token_ids)

    async def generate(self, prompt: TextOrTokens, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """All answers to one prompt (text or token ids). Cancelling the call ends its work.

        Raises InvalidInputError, PromptTooLongError, EngineDeadError.
        """
        return await self.answer(prompt, self.spec(sampling_params))

    async def answer(self, prompt: TextOrTokens, spec: AnswerSpec) -> RequestOutput:
        """``generate`` with settings that are checked already: one ``spec`` serves any number of prompts."""
        model = self._cluster.model
        return await self._collect(await self._prompt(model, prompt), model, spec)

    async def chat(
        self, messages: Items[Message], sampling_params: SamplingParams | None = None, **template_arguments: object
    ) -> RequestOutput:
        """The answers to a conversation: ``{"role": ..., "content": ...}`` each, rendered by the chat template.

        Raises InvalidInputError, also if the checkpoint has no chat template.
        """
        model, spec = self._cluster.model, self.spec(sampling_params)
        return await self._collect(await self._chat_prompt(model, messages, template_arguments), model, spec)

    async def stream(
        self, prompt: TextOrTokens, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[TextDelta]:
        """The answers to one prompt as they are generated. Leaving the loop early ends the work (``aclose``)."""
        model, spec = self._cluster.model, self.spec(sampling_params)
        given = await self._prompt(model, prompt)
        answer = _StreamedAnswer(spec)
        try:
            with _engines_lost():
                await answer.start(self._sequences(given, model, spec, answer), spec.n, self._turns)
            while answer.num_open:
                with _engines_lost():
                    delta = await answer.next()
                yield delta
        finally:
            answer.cancel()

    async def status(self) -> list[dict[str, object]]:
        """The status of each engine, as in ``kvrelay status --json``: load, requests, hand-offs, bytes moved."""
        return [await worker.status() for worker in self._cluster.workers]

    async def clear_prefix_cache(self) -> None:
        """Forget the KV of finished requests in every engine."""
        for worker in self._cluster.workers:
            await worker.run_admin_command(AdminRequest(0, "clear_cache"))

    def spec(self, params: SamplingParams | None) -> AnswerSpec:
        """The settings (None: the checkpoint's) as the engines get them. Raises InvalidInputError, EngineDeadError."""
        model = self._cluster.model
        spec = spec_of(params or recommended(model.tokenizer.default_sampling))
        spec.check(model.vocab_size)
        return spec

    async def _collect(self, prompt: Prompt, model: Model, spec: AnswerSpec) -> RequestOutput:
        answer, start_s = CollectedAnswer(spec), time.monotonic()
        answer.tokens_at_once = TOKENS_AT_ONCE
        try:
            with _engines_lost():
                await answer.start(self._sequences(prompt, model, spec, answer), spec.n, self._turns)
                await answer.done
        finally:
            answer.cancel()
        choices, first = answer.choices, answer.sequences[0]
        return RequestOutput(
            prompt=prompt.text,
            prompt_token_ids=tuple(prompt.token_ids),
            outputs=tuple(_completion(choice, spec) for choice in choices),
            num_cached_tokens=first.num_cached_tokens,
            first_token_s=min(sequence.ttft_s or 0.0 for sequence in answer.sequences),
            duration_s=time.monotonic() - start_s,
            prompt_logprobs=first.prompt_logprobs,
        )

    def _sequences(
        self, prompt: Prompt, model: Model, spec: AnswerSpec, answer: SequenceListener
    ) -> Iterator[Sequence]:
        return sequences_of(Asked(secrets.token_hex(16), spec, model, answer, self._metrics, MIGRATION_LIMIT), [prompt])

    async def _prompt(self, model: Model, prompt: TextOrTokens) -> Prompt:
        given = prompt if isinstance(prompt, str) else list(map(operator.index, prompt))
        if not given:
            raise InvalidInputError("the prompt is empty", param="prompt")
        return await _aside(len(given), lambda: complete(completion_prompts([given], model, True))[0])

    async def _chat_prompt(self, model: Model, messages: Items[Message], arguments: dict[str, object]) -> Prompt:
        try:
            typed = msgspec.convert(list(messages), list[ChatMessage])
        except msgspec.ValidationError as exc:
            raise InvalidInputError(f"malformed messages: {exc}", param="messages") from exc

        def rendered() -> Prompt:
            text = render_chat(typed, model, True, arguments)
            return complete(completion_prompts([text], model, False))[0]

        return await _aside(sum(len(str(message)) for message in messages), rendered)


async def _aside(size: int, work: Callable[[], Prompt]) -> Prompt:
    """Tokenize; long prompts in a thread, because the event loop is the caller's."""
    return work() if size <= INLINE_SIZE else await asyncio.to_thread(work)


class _StreamedAnswer(Answer):
    """Passes the pieces of all sequences on, in order of arrival."""

    def __init__(self, spec: AnswerSpec) -> None:
        super().__init__(spec)
        self.num_open = spec.n
        self._pieces: asyncio.Queue[TextDelta | KvrelayError] = asyncio.Queue()

    def deliver(self, sequence: Sequence, piece: ChoicePiece) -> None:
        finish = piece.finish
        reason = None if finish is None else finish.reason.value
        stop_reason = None if finish is None else finish.stop_reason
        logprobs = tuple(piece.logprobs) if piece.logprobs else None
        delta = TextDelta(sequence.index, piece.text, tuple(piece.token_ids), reason, stop_reason, logprobs)
        self._pieces.put_nowait(delta)

    def failed(self, sequence: Sequence, error: KvrelayError) -> None:
        self._pieces.put_nowait(error)

    async def next(self) -> TextDelta:
        piece = await self._pieces.get()
        if isinstance(piece, KvrelayError):
            raise piece
        self.num_open -= piece.finish_reason is not None
        return piece


@contextmanager
def _engines_lost() -> Iterator[None]:
    """Embedded engines are never restarted: if none is left to take a request, all have failed."""
    try:
        yield
    except WorkerUnavailableError as exc:
        raise EngineDeadError(exc.message) from exc


def _completion(choice: Choice, spec: AnswerSpec) -> CompletionOutput:
    return CompletionOutput(
        index=choice.index,
        text=choice.text,
        token_ids=tuple(chain.from_iterable([piece.token_ids for piece in choice.pieces])),
        finish_reason=choice.finish.reason.value,
        stop_reason=choice.finish.stop_reason,
        logprobs=tuple(choice.logprobs) if spec.sampling.logprobs is not None else None,
    )
