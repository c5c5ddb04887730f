"""The answers of ``/v1/chat/completions``, whole and streamed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.frontend.openai.answer import Choice, Finish, PromptLogprobs, Usage, encode_json, json_list
from kvrelay.frontend.openai.errors import Failure
from kvrelay.frontend.openai.frame import ChunkFrame
from kvrelay.frontend.openai.logprobs import (
    ChatLogprobs,
    PromptTokenLogprob,
    TokenTexts,
    chat_logprobs,
    prompt_logprobs_json,
)
from kvrelay.frontend.openai.tool_fields import ToolCall

_NO_LOGPROBS = b'},"logprobs":null'


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


class ChatFormat:
    """Implements ``AnswerFormat``."""

    def __init__(
        self,
        answer_id: str,
        created_unix_s: int,
        model: str,
        texts: TokenTexts,
        *,
        return_token_ids: bool = False,
        include_usage: bool = False,
        continuous_usage: bool = False,
        with_logprobs: bool = False,
        echo: str = "",
    ) -> None:
        """``echo`` is the text before the answer: the message that the answer continues."""
        self._echo = echo
        self._id, self._created, self._model, self._texts = answer_id, created_unix_s, model, texts
        self._return_token_ids = return_token_ids
        self._with_logprobs = with_logprobs
        head = {"id": answer_id, "object": "chat.completion.chunk", "created": created_unix_s, "model": model}
        choice = b'{"index":%d,"delta":{"content":'
        self._frame = ChunkFrame(
            head, choice, b',"finish_reason":null', include_usage=include_usage, continuous_usage=continuous_usage
        )
        self._plain_end = _NO_LOGPROBS + self._frame.plain_tail

    def opening(
        self,
        index: int,
        prompt_token_ids: Sequence[int],
        prompt_logprobs: PromptLogprobs | None,
        num_cached_tokens: int,
    ) -> bytes:
        """The role; ``prompt_token_ids`` stands beside the choices, as in vLLM."""
        head = b'{"index":%d,"delta":{"role":"assistant","content":' % index
        delta = head + encode_json(self._echo) + b'},"logprobs":null,"finish_reason":null}]'
        ids = b',"prompt_token_ids":' + json_list(prompt_token_ids) if self._return_token_ids else b""
        return self._frame.head + delta + ids + self._frame.end_of_event

    def chunk(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[PositionLogprobs] | None,
        finish: Finish | None,
        usage: Usage | None,
    ) -> bytes:
        start = self._frame.start(index) + encode_json(text)
        if finish is None and usage is None and not logprobs and not self._return_token_ids:
            return start + self._plain_end
        shape = b'},"logprobs":' + encode_json(chat_logprobs(logprobs, self._texts)) if logprobs else _NO_LOGPROBS
        return start + shape + self._frame.tail(finish, token_ids if self._return_token_ids else None, usage)

    def closing(self, usage: Usage) -> bytes:
        return self._frame.closing(usage)

    def broken(self, failure: Failure) -> bytes:
        return self._frame.broken(failure)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        shapes = [self._whole_choice(choice) for choice in choices]
        first = choices[0]
        prompt_logprobs = None
        if first.prompt_logprobs is not None:
            prompt_logprobs = prompt_logprobs_json(first.prompt_logprobs, self._texts)
        prompt_ids = list(first.prompt_token_ids) if self._return_token_ids else None
        return encode_json(
            ChatResponse(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=shapes,
                usage=usage,
                prompt_logprobs=prompt_logprobs,
                prompt_token_ids=prompt_ids,
            )
        )

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        assert choice.finish is not None
        return ChatChoice(
            index=choice.index,
            message=AssistantMessage(self._echo + "".join(choice.text)),
            logprobs=chat_logprobs(choice.logprobs, self._texts) if self._with_logprobs else None,
            finish_reason=choice.finish.reason,
            stop_reason=choice.finish.stop_reason,
            token_ids=choice.token_ids if self._return_token_ids else None,
        )
