"""The answers of ``/v1/chat/completions`` whose text is parsed: function calls and reasoning are separate from the
content."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.status import FinishReason
from kvrelay.frontend.openai.answer import Choice, Finish, Usage, encode_json
from kvrelay.frontend.openai.chat import AssistantMessage, ChatChoice, ChatFormat
from kvrelay.frontend.openai.logprobs import TokenTexts, chat_logprobs
from kvrelay.frontend.openai.tool_fields import CalledFunction, ToolCall
from kvrelay.frontend.tools.base import CallDelta, Delta, OutputParser

CALLED = "tool_calls"


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


class ParsedChatFormat(ChatFormat):
    """Implements ``AnswerFormat``. ``make_parser`` returns a parser per choice; a call's id has ``call_id_chars``
    characters."""

    def __init__(
        self,
        answer_id: str,
        created_unix_s: int,
        model: str,
        texts: TokenTexts,
        make_parser: Callable[[], OutputParser],
        *,
        call_id_chars: int = 24,
        return_token_ids: bool = False,
        include_usage: bool = False,
        continuous_usage: bool = False,
        with_logprobs: bool = False,
    ) -> None:
        super().__init__(
            answer_id,
            created_unix_s,
            model,
            texts,
            return_token_ids=return_token_ids,
            include_usage=include_usage,
            continuous_usage=continuous_usage,
            with_logprobs=with_logprobs,
        )
        self._make_parser = make_parser
        self._call_id_chars = call_id_chars
        self._parsers: dict[int, OutputParser] = {}
        self._callers: set[int] = set()
        """Choices that have called a function."""

    def chunk(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[PositionLogprobs] | None,
        finish: Finish | None,
        usage: Usage | None,
    ) -> bytes:
        parser = self._parsers.get(index) or self._parsers.setdefault(index, self._make_parser())
        delta = parser.push(text)
        if finish is not None:
            delta += parser.flush()
        if delta.calls:
            self._callers.add(index)
        ids = token_ids if self._return_token_ids else None
        if not delta and finish is None and usage is None and not logprobs and not ids:
            return b""
        shape = b"null" if not logprobs else encode_json(chat_logprobs(logprobs, self._texts))
        reason = _reason(finish, index in self._callers)
        return b"".join(
            (
                self._frame.head,
                b'{"index":%d,"delta":' % index,
                encode_json(self._shape(delta)),
                b',"logprobs":',
                shape,
                self._frame.tail(finish, ids, usage, reason),
            )
        )

    def _shape(self, delta: Delta) -> MessageDelta:
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
        """Some templates accept only ids of nine letters and digits."""
        prefix = "call_" if self._call_id_chars > 9 else ""
        return prefix + uuid.uuid4().hex[: self._call_id_chars]

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        assert choice.finish is not None
        parser = self._make_parser()
        delta = parser.push("".join(choice.text)) + parser.flush()
        calls = [ToolCall(self._call_id(), CalledFunction(name, text)) for name, text in whole_calls(delta)]
        content = None if calls and not delta.content else delta.content
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


def whole_calls(delta: Delta) -> list[tuple[str, str]]:
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
    return CALLED if has_called and finish.reason is FinishReason.STOP else str(finish.reason)
