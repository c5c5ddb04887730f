"""How a response is written: whole, or as a stream of events.

    created, in_progress, then for each item:
      output_item.added
        text, reasoning: content_part.added, output_text.delta | reasoning_text.delta ..., .done, content_part.done
        a call:          function_call_arguments.delta ..., function_call_arguments.done
      output_item.done
    and completed, or incomplete when the limit of tokens has cut it

Every event has the next sequence number. A stream that breaks ends with ``failed``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.status import FinishReason
from kvrelay.frontend.generate.answer_blocks import AnswerBlocks, Block, BlockEvent, BlockFormat, BlockKind, BlockStep
from kvrelay.frontend.openai.answer import (
    AnswerContext,
    AnsweredPrompt,
    Choice,
    ChoicePiece,
    Finish,
    Usage,
    encode_json,
)
from kvrelay.frontend.openai.errors import Failure
from kvrelay.frontend.openai.logprobs import ChatPositionLogprobs
from kvrelay.frontend.responses.response_bodies import ResponsesRequest
from kvrelay.frontend.responses.shapes import (
    OutputItem,
    OutputText,
    ReasoningText,
    ResponseError,
    finished_body,
    item_id,
    item_of,
    opened_body,
    token_logprobs,
)


class ResponsesFormat(BlockFormat):
    """Implements ``AnswerFormat``."""

    def __init__(self, request: ResponsesRequest, context: AnswerContext) -> None:
        super().__init__(context)
        self._opened = opened_body(request, context.answer_id, context.created_unix_s, context.model)
        self._sequence_number = 0
        self._logprobs: list[ChatPositionLogprobs] = []
        self._new_logprobs: list[ChatPositionLogprobs] = []

    def opening(self, index: int, prompt: AnsweredPrompt) -> bytes:
        return self._event("created", response=self._opened) + self._event("in_progress", response=self._opened)

    def chunk(self, index: int, piece: ChoicePiece, usage: Usage | None) -> bytes:
        self._new_logprobs += self._shapes(piece.logprobs)
        return super().chunk(index, piece, usage)

    def broken(self, failure: Failure) -> bytes:
        output = [self._item(block, "incomplete", []) for block in self._blocks.blocks]
        error = ResponseError(str(failure.code or "server_error"), failure.line)
        return self._event(
            "failed", response=msgspec.structs.replace(self._opened, status="failed", error=error, output=output)
        )

    def _end_of(self, finish: Finish, usage: Usage) -> bytes:
        output = self._output(self._blocks, finish, self._logprobs)
        body = finished_body(self._opened, output, finish, usage, self._blocks.num_reasoning_tokens)
        return self._event(body.status, response=body)

    def _whole_of(self, choice: Choice, blocks: AnswerBlocks, usage: Usage) -> bytes:
        output = self._output(blocks, choice.finish, self._shapes(choice.logprobs))
        return encode_json(finished_body(self._opened, output, choice.finish, usage, blocks.num_reasoning_tokens))

    def _shapes(self, logprobs: Sequence[PositionLogprobs] | None) -> list[ChatPositionLogprobs]:
        """None if the text is parsed: its tokens are not the content's."""
        is_plain = logprobs and self._context.make_parser is None
        return token_logprobs(list(logprobs or ()), self._context.texts) if is_plain else []

    # -- items --------------------------------------------------------------------------------------------------------

    def _output(self, blocks: AnswerBlocks, finish: Finish, logprobs: list[ChatPositionLogprobs]) -> list[OutputItem]:
        """All items; the last one is incomplete if the limit of tokens cut it."""
        last = "incomplete" if finish.reason is FinishReason.LENGTH else "completed"
        return [
            self._item(block, last if block is blocks.blocks[-1] else "completed", logprobs) for block in blocks.blocks
        ]

    def _item(self, block: Block, status: str, logprobs: list[ChatPositionLogprobs]) -> OutputItem:
        return item_of(block, status, self._context.call_id_chars, logprobs)

    # -- events -------------------------------------------------------------------------------------------------------

    def _event(self, name: str, /, **fields: object) -> bytes:
        kind = f"response.{name}"
        data = encode_json({"type": kind, "sequence_number": self._sequence_number, **fields})
        self._sequence_number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _event_of(self, event: BlockEvent) -> bytes:
        block = event.block
        place: dict[str, object] = {"item_id": item_id(block), "output_index": block.index}
        if block.kind is not BlockKind.CALL:
            place["content_index"] = 0
        match event.step:
            case BlockStep.OPENED:
                return self._added(block, place)
            case BlockStep.GREW:
                return self._event(f"{_NAMES[block.kind]}.delta", **place, delta=event.text, **self._taken(block))
            case BlockStep.CLOSED:
                return self._done(block, place)

    def _added(self, block: Block, place: Mapping[str, object]) -> bytes:
        item = self._item(block, "in_progress", [])
        added = self._event("output_item.added", output_index=block.index, item=item)
        if block.kind is BlockKind.CALL:
            return added
        return added + self._event("content_part.added", **place, part=self._part(block, ""))

    def _done(self, block: Block, place: Mapping[str, object]) -> bytes:
        key = "arguments" if block.kind is BlockKind.CALL else "text"
        logprobs = {"logprobs": self._logprobs} if block.kind is BlockKind.TEXT else {}
        name = {"name": block.name} if block.kind is BlockKind.CALL else {}
        done = self._event(f"{_NAMES[block.kind]}.done", **place, **{key: block.text}, **logprobs, **name)
        if block.kind is not BlockKind.CALL:
            done += self._event("content_part.done", **place, part=self._part(block, block.text))
        is_cut = self._finish is not None and self._finish.reason is FinishReason.LENGTH
        item = self._item(block, "incomplete" if is_cut else "completed", self._logprobs)
        return done + self._event("output_item.done", output_index=block.index, item=item)

    def _part(self, block: Block, text: str) -> OutputText | ReasoningText:
        if block.kind is BlockKind.REASONING:
            return ReasoningText(text)
        return OutputText(text, logprobs=self._logprobs if text else [])

    def _taken(self, block: Block) -> dict[str, object]:
        """The logprobs of the tokens since the last delta of a text."""
        if block.kind is not BlockKind.TEXT:
            return {}
        taken, self._new_logprobs = self._new_logprobs, []
        self._logprobs += taken
        return {"logprobs": taken}


_NAMES = {
    BlockKind.TEXT: "output_text",
    BlockKind.REASONING: "reasoning_text",
    BlockKind.CALL: "function_call_arguments",
}
