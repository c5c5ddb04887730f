"""The differences between the APIs for chats: how a request is parsed, and how its answer is written.

The pipeline does the rest: each API's request becomes one of ``/v1/chat/completions``, and each answer comes from the
same sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from kvrelay.errors import InvalidInputError
from kvrelay.frontend.generate.prompts import echoed_message
from kvrelay.frontend.openai.answer import AnswerContext, AnswerFormat
from kvrelay.frontend.openai.completions import ChatFormat
from kvrelay.frontend.openai.requests import ChatCompletionRequest, FieldsCheck, parse_body
from kvrelay.http.errors import RequestRefusedError


class ChatTask(msgspec.Struct, frozen=True):
    """A parsed request and the factory of its answer's format."""

    request: ChatCompletionRequest
    make_format: Callable[[AnswerContext], AnswerFormat]


class ChatApi(msgspec.Struct, frozen=True):
    """``kind``: of its bodies. ``chat_of`` raises InvalidInputError, as ``check_headers``; ``make_format`` gets the
    body, too. ``params`` maps names of a chat's fields to those of this API, for errors. ``counted``: what a count of
    tokens has beside the number."""

    kind: type[msgspec.Struct]
    chat_of: Callable[[Any], ChatCompletionRequest]
    make_format: Callable[[Any, AnswerContext], AnswerFormat]
    params: Mapping[str, str] = {}
    check_headers: Callable[[Mapping[str, str]], None] = lambda headers: None
    counted: Mapping[str, str] = {}

    def read(self, body: bytes, check_fields: FieldsCheck) -> ChatTask:
        """Raises InvalidInputError."""
        request = parse_body(body, self.kind, check_fields)
        return ChatTask(self.chat_of(request), partial(self.make_format, request))

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """Errors inside name the fields of this API."""
        try:
            yield
        except (InvalidInputError, RequestRefusedError) as exc:
            exc.param = self.params.get(exc.param or "", exc.param)
            raise


CHAT_COMPLETIONS = ChatApi(
    ChatCompletionRequest,
    lambda request: request,
    lambda request, context: ChatFormat(context, echoed_message(request)),
)
