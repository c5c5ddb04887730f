"""The bytes around the text of a streamed chunk, which both endpoints share: encoded once per stream, not per token."""

from __future__ import annotations

from kvrelay.frontend.openai.answer import AnswerContext, Piece, Usage, encode_json, json_list
from kvrelay.frontend.openai.errors import Failure, openai_error

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
        self._with_logprobs = context.plan.sampling.logprobs is not None
        self._return_token_ids = context.plan.return_token_ids
        self._include_usage = context.plan.include_usage
        head = {"id": context.answer_id, "object": kind, "created": context.created_unix_s, "model": context.model}
        self._head = b"data: " + encode_json(head)[:-1] + b',"choices":['
        has_null = self._include_usage and not context.plan.continuous_usage
        self._end_of_event = (b',"usage":null' if has_null else b"") + b"}\n\n"
        self._plain_end = before_tail + unfinished + b"}]" + self._end_of_event
        """After the text of a chunk that is not the last one, without logprobs, token ids and usage."""
        self._choice = choice
        self._unfinished = unfinished
        self._starts: dict[int, bytes] = {}

    def _start(self, index: int) -> bytes:
        """Everything before a choice's text."""
        return self._starts.get(index) or self._starts.setdefault(index, self._head + self._choice % index)

    def _tail(self, piece: Piece, usage: Usage | None, reason: str | None = None) -> bytes:
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
