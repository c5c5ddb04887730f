"""The parts of all APIs' answers: pieces of text, parsed parts, choices, usage, and the contracts of the formats and of
the parsers of a model's text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.status import FinishReason
from kvrelay.frontend.openai.answer_spec import AnswerSpec
from kvrelay.frontend.openai.logprobs import TokenTexts
from kvrelay.http.errors import Failure, openai_error

encode_json = msgspec.json.Encoder().encode

PromptLogprobs = Sequence[PositionLogprobs | None]


class Finish(msgspec.Struct, frozen=True):
    """Why a choice ended; ``stop_reason`` is the stop string or stop token that ended it."""

    reason: FinishReason
    stop_reason: str | int | None = None


class ChoicePiece(msgspec.Struct, frozen=True, gc=False):
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

    @property
    def num_cached_tokens(self) -> int:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details is not None else 0


class Choice(msgspec.Struct):
    """One collected choice of an answer, in pieces as they arrived."""

    index: int
    prompt_token_ids: Sequence[int]
    prompt_logprobs: PromptLogprobs | None = None
    pieces: list[ChoicePiece] = []

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


class CallDelta(msgspec.Struct, frozen=True):
    """More of call ``index``. The first delta of a call has its name; ``arguments`` is the next piece of JSON text."""

    index: int
    name: str | None = None
    arguments: str = ""


class ParsedDelta(msgspec.Struct, frozen=True):
    """The parsed parts of a piece of text."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def __add__(self, other: ParsedDelta) -> ParsedDelta:
        return ParsedDelta(self.content + other.content, self.reasoning + other.reasoning, self.calls + other.calls)


class OutputParser(Protocol):
    """Parses one answer. The deltas add up to the same result, independent of how the text is cut."""

    def push(self, text: str) -> ParsedDelta:
        """Add text; returns the parts that are certain now."""

    def flush(self) -> ParsedDelta:
        """End the answer, maybe in the middle of a call."""


class _Noting:
    """A parser whose calls are noted in ``called``."""

    def __init__(self, parser: OutputParser, called: list[str]) -> None:
        self._parser, self._called = parser, called

    def push(self, text: str) -> ParsedDelta:
        return self._noted(self._parser.push(text))

    def flush(self) -> ParsedDelta:
        return self._noted(self._parser.flush())

    def _noted(self, delta: ParsedDelta) -> ParsedDelta:
        self._called.extend([call.name for call in delta.calls if call.name is not None])
        return delta


class AnswerContext(msgspec.Struct, frozen=True):
    """Facts of an answer when its prompt is ready. ``make_parser`` returns a parser per choice; None: the text is the
    content. A call's id has ``call_id_chars``."""

    answer_id: str
    created_unix_s: int
    model: str
    texts: TokenTexts
    spec: AnswerSpec
    make_parser: Callable[[], OutputParser] | None = None
    call_id_chars: int = 24
    called: list[str] = msgspec.field(default_factory=list)
    """Functions that the answer calls, as far as it is parsed. A stream's are noted once, a whole answer's at its
    end."""

    def new_parser(self) -> OutputParser | None:
        """A parser for one more choice, if the text is to be parsed."""
        return _Noting(self.make_parser(), self.called) if self.make_parser is not None else None

    def call_id(self, prefix: str, unique: str) -> str:
        """Some templates accept only ids of nine letters and digits: those get no prefix."""
        return (prefix if self.call_id_chars > 9 else "") + unique[: self.call_id_chars]


class AnswerFormat(Protocol):
    """Writes the answer to one request in the format of one endpoint."""

    def opening(self, index: int, prompt: AnsweredPrompt) -> bytes:
        """Events that come before a choice's first text; may be none."""

    def chunk(self, index: int, piece: ChoicePiece, usage: Usage | None) -> bytes:
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


DONE_EVENT = b"data: [DONE]\n\n"


class ChunkFormat:
    """The half of an ``AnswerFormat`` that completions and chats share: the frame of a stream's events.

        data: {id, object, created, model, "choices":[ {"index":0, ...:  text  ... reasons, token ids }] , usage }
        `----------------- head ---------------------´                  `------------ tail ----------------------´
        `------------------------- start ---------------------------´

    ``kind`` is the chunks' object. ``choice`` is the beginning of a choice, ``%d`` its index; ``unfinished`` stands for
    the reasons until there are any. ``before_tail`` is what stands between a text and its tail without logprobs.
    """

    def __init__(self, context: AnswerContext, kind: str, choice: bytes, unfinished: bytes, before_tail: bytes) -> None:
        self._context = context
        self._with_logprobs = context.spec.sampling.logprobs is not None
        self._return_token_ids = context.spec.return_token_ids
        self._include_usage = context.spec.include_usage
        head = {"id": context.answer_id, "object": kind, "created": context.created_unix_s, "model": context.model}
        self._head = b"data: " + encode_json(head)[:-1] + b',"choices":['
        has_null = self._include_usage and not context.spec.continuous_usage
        self._end_of_event = (b',"usage":null' if has_null else b"") + b"}\n\n"
        self._plain_end = before_tail + unfinished + b"}]" + self._end_of_event
        """After the text of a chunk that is not the last one, without logprobs, token ids and usage."""
        self._choice = choice
        self._unfinished = unfinished
        self._starts: dict[int, bytes] = {}

    def _start(self, index: int) -> bytes:
        """Everything before a choice's text."""
        return self._starts.get(index) or self._starts.setdefault(index, self._head + self._choice % index)

    def _tail(self, piece: ChoicePiece, usage: Usage | None, reason: str | None = None) -> bytes:
        """Everything after text and logprobs. ``reason`` replaces that of the finish."""
        finish = piece.finish
        reasons, tokens, end = self._unfinished, b"", self._end_of_event
        if finish is not None:
            reasons = b',"finish_reason":%b,"stop_reason":%b' % (
                encode_json(reason or finish.reason),
                encode_json(finish.stop_reason),
            )
        if self._return_token_ids:
            tokens = b',"token_ids":' + json_list(piece.token_ids)
        if usage is not None:
            end = b',"usage":%b}\n\n' % encode_json(usage)
        return b"%b%b}]%b" % (reasons, tokens, end)

    def closing(self, usage: Usage, extra: bytes = b"") -> bytes:
        """The last events; one without choices if the client asked for usage, or for more."""
        if not (self._include_usage or extra):
            return DONE_EVENT
        told = b',"usage":' + encode_json(usage) if self._include_usage else b""
        return self._head + b"]" + told + extra + b"}\n\n" + DONE_EVENT

    def broken(self, failure: Failure) -> bytes:
        """The last events of a stream that ends with an error."""
        return b"data: " + openai_error(failure) + b"\n\n" + DONE_EVENT
