"""The differences between the APIs for chats: how a request is parsed, and how its answer is written.

The pipeline does the rest: each API's request becomes one of ``/v1/chat/completions``, and each answer comes from the
same sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvrelay.errors import InvalidInputError
from kvrelay.frontend.openai.answer import AnswerFormat
from kvrelay.frontend.openai.chat import ChatFormat
from kvrelay.frontend.openai.errors import RefusedError
from kvrelay.frontend.openai.logprobs import TokenTexts
from kvrelay.frontend.openai.parsed_chat import ParsedChatFormat
from kvrelay.frontend.openai.plan import GenerationPlan
from kvrelay.frontend.openai.requests import ChatCompletionRequest, FieldsCheck, parse_body
from kvrelay.frontend.prompts import echoed_message
from kvrelay.frontend.tools.base import OutputParser


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """Facts of an answer when its prompt is ready. ``make_parser`` returns a parser per choice; None: the text is the
    content. A call's id has ``call_id_chars``."""

    answer_id: str
    created_unix_s: int
    model: str
    texts: TokenTexts
    plan: GenerationPlan
    make_parser: Callable[[], OutputParser] | None
    call_id_chars: int = 24

    def new_parser(self) -> OutputParser | None:
        """A parser for one more choice, if the text is to be parsed."""
        return self.make_parser() if self.make_parser is not None else None


@dataclass(frozen=True, slots=True)
class ChatTask:
    """A parsed request and the factory of its answer's format."""

    request: ChatCompletionRequest
    make_format: Callable[[AnswerContext], AnswerFormat]


@dataclass(frozen=True, slots=True)
class ChatApi:
    """``read`` and ``check_headers`` raise InvalidInputError. ``params`` maps names of a chat's fields to those of this
    API, for errors."""

    read: Callable[[bytes, FieldsCheck], ChatTask]
    params: Mapping[str, str] = field(default_factory=dict)
    check_headers: Callable[[Mapping[str, str]], None] = lambda headers: None

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """Errors inside name the fields of this API."""
        try:
            yield
        except (InvalidInputError, RefusedError) as exc:
            exc.param = self.params.get(exc.param or "", exc.param)
            raise


def _read_chat(body: bytes, check_fields: FieldsCheck) -> ChatTask:
    request = parse_body(body, ChatCompletionRequest, check_fields)
    return ChatTask(request, lambda context: _chat_format(request, context))


def _chat_format(request: ChatCompletionRequest, context: AnswerContext) -> AnswerFormat:
    plan = context.plan
    options = {
        "return_token_ids": plan.return_token_ids,
        "include_usage": plan.include_usage,
        "continuous_usage": plan.continuous_usage,
        "with_logprobs": bool(request.logprobs),
    }
    if context.make_parser is None:
        return ChatFormat(
            context.answer_id,
            context.created_unix_s,
            context.model,
            context.texts,
            echo=echoed_message(request),
            **options,
        )
    return ParsedChatFormat(
        context.answer_id,
        context.created_unix_s,
        context.model,
        context.texts,
        context.make_parser,
        call_id_chars=context.call_id_chars,
        **options,
    )


CHAT_COMPLETIONS = ChatApi(_read_chat)
