"""The answers of ``/v1/completions``, whole and streamed.

A chunk is assembled from bytes that are prepared once per request; only the text is encoded per chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.frontend.openai.answer import (
    AnswerContext,
    AnsweredPrompt,
    Choice,
    ChoicePiece,
    PromptLogprobs,
    Usage,
    encode_json,
    json_list,
)
from kvrelay.frontend.openai.frame import ChunkFormat
from kvrelay.frontend.openai.logprobs import (
    CompletionLogprobs,
    PromptTokenLogprob,
    TextOffsets,
    completion_logprobs,
    prompt_logprobs_json,
    prompt_offsets,
)
from kvrelay.frontend.tokens.detokenizer import Detokenizer

_NO_LOGPROBS = b',"logprobs":null'
_UNFINISHED = b',"finish_reason":null,"stop_reason":null'


class CompletionChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptTokenLogprob] | None] | None = None


class CompletionResponse(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: str = "text_completion"


class CompletionFormat(ChunkFormat):
    """Implements ``AnswerFormat``. ``echoes`` are the prompts' texts, by choice, if they must be repeated."""

    def __init__(
        self,
        context: AnswerContext,
        make_detokenizer: Callable[[bool], Detokenizer],
        *,
        with_prompt_logprobs: bool = False,
        echoes: Sequence[str] | None = None,
    ) -> None:
        super().__init__(context, "text_completion", b'{"index":%d,"text":', _UNFINISHED, _NO_LOGPROBS)
        self._texts = context.texts
        self._with_prompt_logprobs = with_prompt_logprobs
        self._echoes = echoes
        self._make_detokenizer = make_detokenizer
        self._offsets: dict[int, TextOffsets] = {}

    def opening(self, index: int, prompt: AnsweredPrompt) -> bytes:
        echo = self._echoes[index] if self._echoes is not None else ""
        if not echo and not self._return_token_ids:
            return b""
        pieces = [self._start(index), encode_json(echo), b',"logprobs":']
        pieces.append(self._echoed_logprobs(prompt.token_ids, prompt.logprobs if echo else None, echo))
        pieces.append(_UNFINISHED)
        if self._return_token_ids:
            pieces += (b',"token_ids":[],"prompt_token_ids":', json_list(prompt.token_ids))
        return b"".join((*pieces, b"}]", self._end_of_event))

    def chunk(self, index: int, piece: ChoicePiece, usage: Usage | None) -> bytes:
        start = self._start(index) + encode_json(piece.text)
        if piece.finish is None and usage is None and not piece.logprobs and not self._return_token_ids:
            return start + self._plain_end
        shape = _NO_LOGPROBS
        if piece.logprobs:
            shape = b',"logprobs":' + self._logprobs(index, piece.token_ids, piece.logprobs)
        return start + shape + self._tail(piece, usage)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        context, shapes = self._context, [self._whole_choice(choice) for choice in choices]
        return encode_json(CompletionResponse(context.answer_id, context.created_unix_s, context.model, shapes, usage))

    def _whole_choice(self, choice: Choice) -> CompletionChoice:
        echo = self._echoes[choice.index] if self._echoes is not None else ""
        logprobs = self._whole_logprobs(choice, echo) if self._with_logprobs else None
        prompt_logprobs = None
        if choice.prompt_logprobs is not None and self._with_prompt_logprobs:
            prompt_logprobs = prompt_logprobs_json(choice.prompt_logprobs, self._texts)
        return CompletionChoice(
            index=choice.index,
            text=echo + choice.text,
            logprobs=logprobs,
            finish_reason=choice.finish.reason,
            stop_reason=choice.finish.stop_reason,
            token_ids=choice.token_ids if self._return_token_ids else None,
            prompt_token_ids=list(choice.prompt_token_ids) if self._return_token_ids else None,
            prompt_logprobs=prompt_logprobs,
        )

    def _whole_logprobs(self, choice: Choice, echo: str) -> CompletionLogprobs:
        positions: list[PositionLogprobs | None] = list(choice.logprobs)
        token_ids = choice.token_ids
        offsets = self._answer_offsets(choice.index, token_ids)
        if self._echoes is not None and choice.prompt_logprobs is not None:
            prompt = choice.prompt_token_ids
            positions = [*choice.prompt_logprobs, *positions]
            token_ids = [*prompt, *token_ids]
            offsets = prompt_offsets(prompt, echo, self._make_detokenizer) + offsets
        return completion_logprobs(positions, token_ids, self._texts, offsets)

    def _echoed_logprobs(self, token_ids: Sequence[int], positions: PromptLogprobs | None, echo: str) -> bytes:
        if positions is None or not self._with_logprobs:
            return b"null"
        offsets = prompt_offsets(token_ids, echo, self._make_detokenizer)
        return encode_json(completion_logprobs(positions, token_ids, self._texts, offsets))

    def _logprobs(self, index: int, token_ids: Sequence[int], positions: PromptLogprobs) -> bytes:
        """Those of a choice's next tokens."""
        return encode_json(
            completion_logprobs(positions, token_ids, self._texts, self._answer_offsets(index, token_ids))
        )

    def _answer_offsets(self, index: int, token_ids: Sequence[int]) -> list[int]:
        """Of a choice's next tokens, in the text that is returned: behind the prompt, if that is echoed."""
        offsets = self._offsets.get(index)
        if offsets is None:
            start = len(self._echoes[index]) if self._echoes is not None else 0
            offsets = self._offsets[index] = TextOffsets(
                self._make_detokenizer(self._context.spec.skip_special_tokens), start
            )
        return offsets.of(token_ids)
