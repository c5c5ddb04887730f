"""The bytes around the text of a streamed chunk, which both endpoints share: encoded once per stream, not per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrelay.frontend.openai.answer import Finish, Usage, encode_json, json_list
from kvrelay.frontend.openai.errors import Failure, openai_error

DONE_EVENT = b"data: [DONE]\n\n"


class ChunkFrame:
    """The frame of one stream's events:

        data: {id, object, created, model, "choices":[ {"index":0, ...:  text  ... reasons, token ids }] , usage }
        `----------------- head ---------------------´                  `------------ tail ----------------------´
        `------------------------- start ---------------------------´

    ``choice`` is the beginning of a choice, ``%d`` its index; ``unfinished`` stands for the reasons until there are
    any.
    """

    def __init__(
        self,
        head: Mapping[str, object],
        choice: bytes,
        unfinished: bytes,
        *,
        include_usage: bool,
        continuous_usage: bool,
    ) -> None:
        self._include_usage = include_usage
        self.head = b"data: " + encode_json(head)[:-1] + b',"choices":['
        self.end_of_event = (b',"usage":null' if include_usage and not continuous_usage else b"") + b"}\n\n"
        self.plain_tail = unfinished + b"}]" + self.end_of_event
        """The tail of a chunk that is not the last one, without token ids and usage."""
        self._choice = choice
        self._unfinished = unfinished
        self._starts: dict[int, bytes] = {}

    def start(self, index: int) -> bytes:
        """Everything before a choice's text."""
        return self._starts.get(index) or self._starts.setdefault(index, self.head + self._choice % index)

    def tail(
        self,
        finish: Finish | None,
        token_ids: Sequence[int] | None,
        usage: Usage | None,
        reason: str | None = None,
    ) -> bytes:
        """Everything after text and logprobs; ``token_ids`` and ``usage`` are None if they were not requested.
        ``reason`` replaces that of ``finish``."""
        reasons, tokens, end = self._unfinished, b"", self.end_of_event
        if finish is not None:
            reasons = b',"finish_reason":%b,"stop_reason":%b' % (
                encode_json(reason or finish.reason),
                encode_json(finish.stop_reason),
            )
        if token_ids is not None:
            tokens = b',"token_ids":' + json_list(token_ids)
        if usage is not None:
            end = b',"usage":%b}\n\n' % encode_json(usage)
        return b"%b%b}]%b" % (reasons, tokens, end)

    def closing(self, usage: Usage) -> bytes:
        """The last events; one without choices if the client asked for usage."""
        return (self.head + b'],"usage":' + encode_json(usage) + b"}\n\n" if self._include_usage else b"") + DONE_EVENT

    def broken(self, failure: Failure) -> bytes:
        """The last events of a stream that ends with an error."""
        return b"data: " + openai_error(failure) + b"\n\n" + DONE_EVENT
