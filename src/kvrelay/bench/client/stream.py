"""One streaming request: the recorder that turns timestamped bytes into a record, and the call that feeds it.

The recorder is pure, so its figures are tested with invented timestamps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvrelay.bench.client.connection import ConnectionPool, HttpAnswer
from kvrelay.bench.client.payload import (
    DONE,
    Chunk,
    ChunkUsage,
    EventSplitter,
    StreamEndpoint,
    decode_chunk,
    error_text,
)
from kvrelay.bench.errors import BadResponseError, ServerDownError
from kvrelay.bench.report.records import Outcome, RequestRecord, TokenSource, spread_tokens


@dataclass(slots=True)
class StreamRecorder:
    """Takes the body's bytes as they arrive. Call ``sent`` first, then ``feed`` per read, then ``record`` once."""

    class_name: str
    prompt_len: int | None
    due_ns: int = 0
    _written_ns: int = 0
    _sent_ns: int = 0
    _events: EventSplitter = field(default_factory=EventSplitter)
    _stamps: list[int] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)
    _lengths: list[int] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
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
        for data in self._events.feed(body):
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
            delta = choice.delta
            text += choice.text or (
                (delta.content or delta.reasoning_content or delta.reasoning or "") if delta else ""
            )
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
