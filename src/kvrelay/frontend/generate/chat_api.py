"""The differences between the APIs for chats: how a request is parsed, and how its answer is written.

The pipeline does the rest: each API's request becomes one of ``/v1/chat/completions``, and each answer comes from the
same sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from kvrelay.errors import InvalidInputError
from kvrelay.frontend.generate.prompts import echoed_message
from kvrelay.frontend.openai.answer import AnswerContext, AnswerFormat
from kvrelay.frontend.openai.completions import ChatFormat
from kvrelay.frontend.openai.errors import RequestRefusedError
from kvrelay.frontend.openai.requests import ChatCompletionRequest, FieldsCheck, parse_body


class ChatTask(msgspec.Struct, frozen=True):
    """A parsed request and the factory of its answer's format."""

    request: ChatCompletionRequest
    make_format: Callable[[AnswerContext], AnswerFormat]


class ChatApi(msgspec.Struct, frozen=True):
    """``read`` and ``check_headers`` raise InvalidInputError. ``params`` maps names of a chat's fields to those of this
    API, for errors. ``counted``: what a count of tokens has beside the number."""

    read: Callable[[bytes, FieldsCheck], ChatTask]
    params: Mapping[str, str] = {}
    check_headers: Callable[[Mapping[str, str]], None] = lambda headers: None
    counted: Mapping[str, str] = {}

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """Errors inside name the fields of this API."""
        try:
            yield
        except (InvalidInputError, RequestRefusedError) as exc:
            exc.param = self.params.get(exc.param or "", exc.param)
            raise


def _read_chat(body: bytes, check_fields: FieldsCheck) -> ChatTask:
    request = parse_body(body, ChatCompletionRequest, check_fields)
    return ChatTask(request, lambda context: ChatFormat(context, echoed_message(request)))


CHAT_COMPLETIONS = ChatApi(_read_chat)
