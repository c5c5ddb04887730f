"""The OpenAI API on the wire: writes bodies, cuts a byte stream into server-sent events, reads chunks. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvrelay.bench.errors import BadResponseError
from kvrelay.bench.load.request import LoadRequest
from kvrelay.core.decoding import UNREADABLE
from kvrelay.errors import InvalidInputError

DONE = b"[DONE]"


class StreamEndpoint(StrEnum):
    """The endpoints that stream; the value is the path."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class BodyOptions:
    """The fields of each request's body besides its prompt.

    ``plain`` leaves out fields that OpenAI's own API does not have (ignore_eos, return_token_ids, continuous usage).
    ``extra`` is a JSON object whose fields are added last.
    """

    model: str
    endpoint: StreamEndpoint = StreamEndpoint.COMPLETIONS
    temperature: float = 0.0
    ignore_eos: bool = True
    plain: bool = False
    extra: bytes = b"{}"


class ChunkDelta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChunkChoice(msgspec.Struct):
    text: str | None = None
    delta: ChunkDelta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class ChunkPromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class ChunkUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: ChunkPromptDetails | None = None


class Chunk(msgspec.Struct):
    """A chunk of a stream. ``error`` is set if the server failed after it had begun."""

    choices: list[ChunkChoice] = []
    usage: ChunkUsage | None = None
    error: object = None


_chunk_decoder = msgspec.json.Decoder(Chunk)


def parse_extra(text: str) -> bytes:
    """Check that ``text`` is a JSON object."""
    try:
        return msgspec.json.encode(msgspec.json.decode(text.encode(), type=dict[str, object]))
    except UNREADABLE as exc:
        raise InvalidInputError(f"the extra body is not a JSON object: {exc}", param="extra_body") from exc


def encode_body(request: LoadRequest, options: BodyOptions) -> bytes:
    """The JSON body of a streaming request. Token ids cannot go to the chat endpoint: InvalidInputError."""
    body: dict[str, object] = {"model": options.model}
    if options.endpoint is StreamEndpoint.CHAT:
        body["messages"] = _messages(request)
    else:
        body["prompt"] = request.prompt
    usage: dict[str, object] = {"include_usage": True}
    body |= {
        "max_tokens": request.output_len,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": usage,
    }
    if not options.plain:
        usage["continuous_usage_stats"] = True
        body |= {"ignore_eos": options.ignore_eos, "return_token_ids": True}
        if request.priority:
            body["priority"] = request.priority
    body |= msgspec.json.decode(options.extra, type=dict[str, object])
    return msgspec.json.encode(body)


def decode_chunk(data: bytes) -> Chunk:
    """Read one event's data. Raises BadResponseError for data that is not a chunk, and for an error event."""
    try:
        chunk = _chunk_decoder.decode(data)
    except UNREADABLE as exc:
        raise BadResponseError(f"the stream holds something that is no chunk: {exc}") from exc
    if chunk.error is not None:
        raise BadResponseError(f"the stream broke off with an error: {error_text(data)}")
    return chunk


def error_text(body: bytes) -> str:
    """The message in an error body, in one line of bounded length."""
    try:
        decoded = msgspec.json.decode(body)
    except UNREADABLE:
        decoded = body.decode("utf-8", "replace")
    for key in ("error", "message", "detail"):
        if isinstance(decoded, dict) and key in decoded:
            decoded = decoded[key]
    return " ".join(str(decoded).split())[:200]


def _messages(request: LoadRequest) -> list[dict[str, str]]:
    if request.messages:
        return [{"role": message.role, "content": message.content} for message in request.messages]
    if isinstance(request.prompt, str):
        return [{"role": "user", "content": request.prompt}]
    raise InvalidInputError("the chat endpoint takes text: use a data set of text, or --endpoint completions")


MAX_EVENT_BYTES = 16 * 1024 * 1024


class EventSplitter:
    """Takes bytes as they arrive and returns the data of each complete event. Comments and other fields are skipped."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of all events that end in ``data``. Raises BadResponseError for an event without an end."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            # A carriage return at the end may be the first half of a line end.
            held = b"\r" if data.endswith(b"\r") else b""
            data = data[: len(data) - len(held)].replace(b"\r\n", b"\n") + held
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise BadResponseError("the server sends an event that does not end")
        return [found for event in events if (found := _data_of(event))]


def _data_of(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
