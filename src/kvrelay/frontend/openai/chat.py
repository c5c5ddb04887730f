"""The answers of ``/v1/chat/completions``, whole and streamed."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from kvrelay.core.status import FinishReason
from kvrelay.frontend.openai.answer import (
    AnswerContext,
    AnsweredPrompt,
    CallDelta,
    Choice,
    ChoicePiece,
    Finish,
    OutputParser,
    ParsedDelta,
    Usage,
    encode_json,
    json_list,
)
from kvrelay.frontend.openai.frame import ChunkFormat
from kvrelay.frontend.openai.logprobs import ChatLogprobs, PromptTokenLogprob, chat_logprobs, prompt_logprobs_json
from kvrelay.frontend.openai.tool_fields import ToolCall, function_call

_NO_LOGPROBS = b',"logprobs":null'


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
        calls = [function_call(self._call_id(), name, text) for name, text in whole_calls(delta)]
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
