"""The parts of all APIs' answers: pieces of text, parsed parts, choices, usage, and the contracts of the formats and of
the parsers of a model's text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.status import FinishReason
from kvrelay.frontend.openai.errors import Failure
from kvrelay.frontend.openai.logprobs import TokenTexts
from kvrelay.frontend.openai.plan import GenerationPlan

encode_json = msgspec.json.Encoder().encode

PromptLogprobs = Sequence[PositionLogprobs | None]


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended; ``stop_reason`` is the stop string or stop token that ended it."""

    reason: FinishReason
    stop_reason: str | int | None = None


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A piece of a choice: its text, which may be sent now, and its tokens. ``finish`` if the choice ends here."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[PositionLogprobs] | None = None
    finish: Finish | None = None


class AnsweredPrompt(msgspec.Struct, frozen=True):
    """What an answer says of its prompt."""

    token_ids: Sequence[int]
    logprobs: PromptLogprobs | None
    num_cached_tokens: int


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


@dataclass(slots=True)
class Choice:
    """One collected choice of an answer, in pieces as they arrived."""

    index: int
    prompt_token_ids: Sequence[int]
    prompt_logprobs: PromptLogprobs | None = None
    pieces: list[Piece] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join([piece.text for piece in self.pieces])

    @property
    def token_ids(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.token_ids]

    @property
    def logprobs(self) -> list[PositionLogprobs]:
        return [position for piece in self.pieces for position in piece.logprobs or ()]

    @property
    def finish(self) -> Finish:
        """Of a choice that has ended."""
        finish = self.pieces[-1].finish
        assert finish is not None
        return finish


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of call ``index``. The first delta of a call has its name; ``arguments`` is the next piece of JSON text."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """The parsed parts of a piece of text."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def __add__(self, other: Delta) -> Delta:
        return Delta(self.content + other.content, self.reasoning + other.reasoning, self.calls + other.calls)


class OutputParser(Protocol):
    """Parses one answer. The deltas add up to the same result, independent of how the text is cut."""

    def push(self, text: str) -> Delta:
        """Add text; returns the parts that are certain now."""

    def flush(self) -> Delta:
        """End the answer, maybe in the middle of a call."""


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """Facts of an answer when its prompt is ready. ``make_parser`` returns a parser per choice; None: the text is the
    content. A call's id has ``call_id_chars``."""

    answer_id: str
    created_unix_s: int
    model: str
    texts: TokenTexts
    plan: GenerationPlan
    make_parser: Callable[[], OutputParser] | None = None
    call_id_chars: int = 24

    def new_parser(self) -> OutputParser | None:
        """A parser for one more choice, if the text is to be parsed."""
        return self.make_parser() if self.make_parser is not None else None


class AnswerFormat(Protocol):
    """Writes the answer to one request in the format of one endpoint."""

    def opening(self, index: int, prompt: AnsweredPrompt) -> bytes:
        """Events that come before a choice's first text; may be none."""

    def chunk(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        """The event with a choice's new text; empty if there is nothing to send yet. ``usage`` is given for continuous
        usage only."""

    def closing(self, usage: Usage, extra: bytes = b"") -> bytes:
        """The last events of a stream whose choices have all finished. ``extra`` (``,"name":value``): a member more of
        the last one."""

    def broken(self, failure: Failure) -> bytes:
        """The last events of a stream that ends with an error."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""


def with_extra(encoded: bytes, extra: bytes) -> bytes:
    """A JSON object with a member more (``,"name":value``); what follows the object stays."""
    head, brace, tail = encoded.rpartition(b"}")
    return head + extra + brace + tail


def json_list(items: Sequence[int]) -> bytes:
    return encode_json(list(items))
