"""One streaming request: its body, the recorder that turns timestamped bytes into a record, and the call that feeds
it.

The recorder is pure, so its figures are tested with invented timestamps.
"""

from __future__ import annotations

import time
from enum import StrEnum

import msgspec

from kvrelay.bench.client.connection import ConnectionPool, HttpAnswer
from kvrelay.bench.errors import BadResponseError, ServerDownError
from kvrelay.bench.load.request import LoadRequest
from kvrelay.bench.report.metrics import Outcome, RequestRecord, TokenSource, spread_tokens
from kvrelay.core.decoding import UNREADABLE, error_text
from kvrelay.core.event_stream import EventParser, EventTooLongError
from kvrelay.errors import InvalidInputError


class StreamRecorder(msgspec.Struct):
    """Takes the body's bytes as they arrive. Call ``sent`` first, then ``feed`` per read, then ``record`` once."""

    class_name: str
    prompt_len: int | None
    due_ns: int = 0
    _written_ns: int = 0
    _sent_ns: int = 0
    _events: EventParser = msgspec.field(default_factory=lambda: EventParser(MAX_EVENT_BYTES))
    _stamps: list[int] = []
    _tokens: list[int] = []
    _lengths: list[int] = []
    _texts: list[str] = []
    _usage: ChunkUsage | None = None
    _source: TokenSource | None = None
    _finished: bool = False
    _done: bool = False

    @property
    def complete(self) -> bool:
        """Whether the stream had its end marker."""
        return self._finished or self._done

    def sent(self, now_ns: int) -> None:
        self._sent_ns = now_ns

    def written(self, now_ns: int) -> None:
        """The request goes to its connection's socket now."""
        self._written_ns = self._written_ns or now_ns

    def feed(self, now_ns: int, body: bytes) -> None:
        """Take the bytes of one read. Raises BadResponseError for data that is not a stream of chunks."""
        for data in events_in(self._events, body):
            if data == DONE:
                self._done = True
            else:
                self._chunk(now_ns, decode_chunk(data))

    def record(self, outcome: Outcome, end_ns: int, error: str | None = None) -> RequestRecord:
        """The record of the answer so far."""
        usage = self._usage
        source = self._source or TokenSource.TOKEN_IDS
        tokens = tuple(self._tokens)
        reported = usage.completion_tokens if usage else None
        if source is TokenSource.ESTIMATED and reported is not None:
            tokens = spread_tokens(tuple(self._lengths), reported)
        details = usage.prompt_tokens_details if usage else None
        return RequestRecord(
            class_name=self.class_name,
            outcome=outcome,
            sent_ns=self._sent_ns,
            end_ns=end_ns,
            stamps_ns=tuple(self._stamps),
            tokens=tokens,
            token_source=source,
            prompt_tokens=(usage.prompt_tokens if usage else 0) or self.prompt_len or 0,
            output_tokens=reported if reported is not None else sum(tokens),
            cached_tokens=details.cached_tokens if details else None,
            text="".join(self._texts),
            error=error,
            due_ns=self.due_ns,
            written_ns=self._written_ns,
        )

    def _chunk(self, now_ns: int, chunk: Chunk) -> None:
        text, ids = "", None
        for choice in chunk.choices:
            delta = choice.delta or ChunkDelta()
            text += choice.text or delta.content or delta.reasoning_content or delta.reasoning or ""
            ids = choice.token_ids if ids is None else ids + (choice.token_ids or [])
            self._finished = self._finished or choice.finish_reason is not None
        before = self._usage.completion_tokens if self._usage else None
        if chunk.usage is not None:
            self._usage = chunk.usage
        count = self._count(text, ids, before or 0, chunk.usage)
        if text:
            self._texts.append(text)
        if not count:
            return
        if self._stamps and self._stamps[-1] == now_ns:
            self._tokens[-1] += count
            self._lengths[-1] += len(text)
        else:
            self._stamps.append(now_ns)
            self._tokens.append(count)
            self._lengths.append(len(text))

    def _count(self, text: str, ids: list[int] | None, before: int, usage: ChunkUsage | None) -> int:
        """Tokens of a chunk, from the source that the first chunk with a token had."""
        reported = usage.completion_tokens if usage else None
        if self._source is None:
            if ids:
                self._source = TokenSource.TOKEN_IDS
            elif text:
                # A usage that first appears in the last chunk is a total, not a running count.
                running = bool(reported) and not self._finished
                self._source = TokenSource.USAGE if running else TokenSource.ESTIMATED
        if self._source is TokenSource.TOKEN_IDS:
            return len(ids or ())
        if self._source is TokenSource.USAGE:
            return max(0, reported - before) if reported is not None else 0
        return 1 if text else 0


async def run_stream(
    pool: ConnectionPool, endpoint: StreamEndpoint, body: bytes, recorder: StreamRecorder
) -> RequestRecord:
    """Send one request and record its stream. Failures are in the record; only cancellation is raised."""
    request = pool.target.head("POST", endpoint.value, len(body)) + body
    recorder.sent(time.perf_counter_ns())
    try:
        answer = await pool.send(request, recorder.feed, recorder.written)
    except (ServerDownError, BadResponseError) as exc:
        return recorder.record(Outcome.FAILED, time.perf_counter_ns(), exc.message)
    error = _judge(answer, recorder)
    return recorder.record(Outcome.FAILED if error else Outcome.OK, answer.done_ns, error)


def _judge(answer: HttpAnswer, recorder: StreamRecorder) -> str | None:
    if answer.status != 200:
        return f"HTTP {answer.status}: {error_text(answer.body)}"
    if answer.content_type != "text/event-stream":
        return f"the server answered {answer.content_type or 'something without a type'} instead of a stream"
    return None if recorder.complete else "the stream ended without its end marker"


DONE = b"[DONE]"


class StreamEndpoint(StrEnum):
    """The endpoints that stream; the value is the path."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


class BodyOptions(msgspec.Struct, frozen=True):
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
    body |= {"max_tokens": request.output_len, "temperature": options.temperature}
    body |= {"stream": True, "stream_options": usage}
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


def _messages(request: LoadRequest) -> list[dict[str, str]]:
    if request.messages:
        return [{"role": message.role, "content": message.content} for message in request.messages]
    if isinstance(request.prompt, str):
        return [{"role": "user", "content": request.prompt}]
    raise InvalidInputError("the chat endpoint takes text: use a data set of text, or --endpoint completions")


MAX_EVENT_BYTES = 16 * 1024 * 1024


def events_in(parser: EventParser, received: bytes) -> list[bytes]:
    """The data of the events that end in ``received``. Raises BadResponseError for an event without an end."""
    try:
        return parser.feed(received)
    except EventTooLongError as exc:
        raise BadResponseError("the server sends an event that does not end") from exc
