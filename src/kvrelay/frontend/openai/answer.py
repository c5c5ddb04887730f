"""The parts of both endpoints' answers: finish, usage, choices, and the contract of the formats. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.status import FinishReason
from kvrelay.frontend.openai.errors import Failure

encode_json = msgspec.json.Encoder().encode

PromptLogprobs = Sequence[PositionLogprobs | None]


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended; ``stop_reason`` is the stop string or stop token that ended it."""

    reason: FinishReason
    stop_reason: str | int | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


@dataclass(slots=True)
class Choice:
    """One collected choice of an answer."""

    index: int
    prompt_token_ids: Sequence[int]
    text: list[str] = field(default_factory=list)
    """In pieces, as they arrived."""
    num_tokens: list[int] = field(default_factory=list)
    """The number of tokens of each piece of the text."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    finish: Finish | None = None


class AnswerFormat(Protocol):
    """Writes the answer to one request in the format of one endpoint."""

    def opening(
        self,
        index: int,
        prompt_token_ids: Sequence[int],
        prompt_logprobs: PromptLogprobs | None,
        num_cached_tokens: int,
    ) -> bytes:
        """Events that come before a choice's first text; may be none."""

    def chunk(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[PositionLogprobs] | None,
        finish: Finish | None,
        usage: Usage | None,
    ) -> bytes:
        """The event with a choice's new text; empty if there is nothing to send yet. ``usage`` is given for continuous
        usage only."""

    def closing(self, usage: Usage) -> bytes:
        """The last events of a stream whose choices have all finished."""

    def broken(self, failure: Failure) -> bytes:
        """The last events of a stream that ends with an error."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""


def json_list(items: Sequence[int]) -> bytes:
    return encode_json(list(items))
