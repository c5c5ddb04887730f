"""The answers of ``/v1/completions`` and ``/v1/chat/completions``, whole and streamed.

A chunk is assembled from bytes that are prepared once per request; only the text is encoded per chunk.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.status import FinishReason
from kvrelay.frontend.openai.answer import (
    AnswerContext,
    AnsweredPrompt,
    CallDelta,
    Choice,
    ChoicePiece,
    ChunkFormat,
    Finish,
    OutputParser,
    ParsedDelta,
    PromptLogprobs,
    Usage,
    encode_json,
    json_list,
)
from kvrelay.frontend.openai.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptTokenLogprob,
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs_json,
    prompt_offsets,
)
from kvrelay.frontend.openai.requests import CalledFunction, ToolCall
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
        make_detokenizer: Callable[[bool, Sequence[int]], Detokenizer],
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
        if self._with_logprobs:
            self._offsets[index] = self._offsets_after(index, prompt.token_ids)
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
        offsets = self._offsets_after(choice.index, choice.prompt_token_ids).of(token_ids)
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
        offsets = self._offsets[index].of(token_ids)
        return encode_json(completion_logprobs(positions, token_ids, self._texts, offsets))

    def _offsets_after(self, index: int, prompt_token_ids: Sequence[int]) -> TextOffsets:
        """Of a choice's tokens, in the text that is returned: after the prompt, if that is echoed."""
        start = len(self._echoes[index]) if self._echoes is not None else 0
        return TextOffsets(self._make_detokenizer(self._context.spec.skip_special_tokens, prompt_token_ids), start)


class AssistantMessage(msgspec.Struct, frozen=True):
    """``content`` is null if there are only calls. The reasoning has two names: vLLM's, and the one before it."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatResponse(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    prompt_logprobs: list[dict[str, PromptTokenLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None


class FunctionDelta(msgspec.Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True):
    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class MessageDelta(msgspec.Struct, frozen=True):
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatFormat(ChunkFormat):
    """Implements ``AnswerFormat``. With a parser, function calls and reasoning are separate from the content.

    ``echo`` is the text before the answer: the message that the answer continues."""

    def __init__(self, context: AnswerContext, echo: str = "") -> None:
        choice = b'{"index":%d,"delta":{"content":'
        super().__init__(context, "chat.completion.chunk", choice, b',"finish_reason":null', b"}" + _NO_LOGPROBS)
        self._echo = echo
        self._texts = context.texts
        self._is_parsed = context.make_parser is not None
        self._parsers: dict[int, OutputParser | None] = {}
        self._callers: set[int] = set()
        """Choices that have called a function."""

    def opening(self, index: int, prompt: AnsweredPrompt) -> bytes:
        """The role; ``prompt_token_ids`` stands beside the choices, as in vLLM."""
        head = b'{"index":%d,"delta":{"role":"assistant","content":' % index
        delta = head + encode_json(self._echo) + b'},"logprobs":null,"finish_reason":null}]'
        ids = b',"prompt_token_ids":' + json_list(prompt.token_ids) if self._return_token_ids else b""
        return self._head + delta + ids + self._end_of_event

    def chunk(self, index: int, piece: ChoicePiece, usage: Usage | None) -> bytes:
        if self._is_parsed:
            return self._parsed_chunk(index, piece, usage)
        start = self._start(index) + encode_json(piece.text)
        if piece.finish is None and usage is None and not piece.logprobs and not self._return_token_ids:
            return start + self._plain_end
        return start + b"}" + self._logprobs(piece) + self._tail(piece, usage)

    def _parsed_chunk(self, index: int, piece: ChoicePiece, usage: Usage | None) -> bytes:
        delta = self._parsed(index, piece)
        if delta.calls:
            self._callers.add(index)
        ids = self._return_token_ids and piece.token_ids
        if not delta and piece.finish is None and usage is None and not piece.logprobs and not ids:
            return b""
        start = self._head + b'{"index":%d,"delta":' % index + encode_json(self._shape(delta))
        reason = _reason(piece.finish, index in self._callers)
        return start + self._logprobs(piece) + self._tail(piece, usage, reason)

    def _parsed(self, index: int, piece: ChoicePiece) -> ParsedDelta:
        if index not in self._parsers:
            self._parsers[index] = self._context.new_parser()
        return _delta(self._parsers[index], piece.text, is_last=piece.finish is not None)

    def _logprobs(self, piece: ChoicePiece) -> bytes:
        if not piece.logprobs:
            return _NO_LOGPROBS
        return b',"logprobs":' + encode_json(chat_logprobs(piece.logprobs, self._texts))

    def _shape(self, delta: ParsedDelta) -> MessageDelta:
        return MessageDelta(
            delta.content or UNSET,
            delta.reasoning or UNSET,
            delta.reasoning or UNSET,
            [self._call_delta(call) for call in delta.calls] or UNSET,
        )

    def _call_delta(self, call: CallDelta) -> ToolCallDelta:
        if call.name is None:
            return ToolCallDelta(call.index, FunctionDelta(call.arguments))
        return ToolCallDelta(call.index, FunctionDelta(call.arguments, call.name), self._call_id(), "function")

    def _call_id(self) -> str:
        return self._context.call_id("call_", uuid.uuid4().hex)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        first = choices[0]
        prompt_logprobs = None
        if first.prompt_logprobs is not None:
            prompt_logprobs = prompt_logprobs_json(first.prompt_logprobs, self._texts)
        return encode_json(
            ChatResponse(
                id=self._context.answer_id,
                created=self._context.created_unix_s,
                model=self._context.model,
                choices=[self._whole_choice(choice) for choice in choices],
                usage=usage,
                prompt_logprobs=prompt_logprobs,
                prompt_token_ids=list(first.prompt_token_ids) if self._return_token_ids else None,
            )
        )

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        delta = _delta(self._context.new_parser(), choice.text, is_last=True)
        calls = [ToolCall(self._call_id(), CalledFunction(name, text)) for name, text in whole_calls(delta)]
        content = None if calls and not delta.content else self._echo + delta.content
        reasoning = delta.reasoning or UNSET
        return ChatChoice(
            index=choice.index,
            message=AssistantMessage(
                content, tool_calls=calls or UNSET, reasoning=reasoning, reasoning_content=reasoning
            ),
            logprobs=chat_logprobs(choice.logprobs, self._texts) if self._with_logprobs else None,
            finish_reason=_reason(choice.finish, bool(calls)),
            stop_reason=choice.finish.stop_reason,
            token_ids=choice.token_ids if self._return_token_ids else None,
        )


def _delta(parser: OutputParser | None, text: str, *, is_last: bool) -> ParsedDelta:
    """The parsed parts of the text; without a parser all of it is content."""
    if parser is None:
        return ParsedDelta(text)
    return parser.push(text) + parser.flush() if is_last else parser.push(text)


def whole_calls(delta: ParsedDelta) -> list[tuple[str, str]]:
    """Name and arguments of each call."""
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    for call in delta.calls:
        if call.name is not None:
            names[call.index] = call.name
        arguments.setdefault(call.index, []).append(call.arguments)
    return [(name, "".join(arguments[index])) for index, name in names.items()]


def _reason(finish: Finish | None, has_called: bool) -> str | None:
    if finish is None:
        return None
    return "tool_calls" if has_called and finish.reason is FinishReason.STOP else str(finish.reason)
