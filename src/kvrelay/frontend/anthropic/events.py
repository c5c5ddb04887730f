"""How a message is written: whole, or as a stream of events.

message_start
  content_block_start, content_block_delta ..., content_block_stop     for each block
message_delta, with the reason of the end and the usage
message_stop
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.frontend.anthropic.errors import anthropic_error
from kvrelay.frontend.anthropic.shapes import MessageBody, MessageUsage, block_of, call_id, stop_of, usage_of
from kvrelay.frontend.blocks import Block, BlockEvent, BlockKind, Blocks, BlockStep
from kvrelay.frontend.chat_api import AnswerContext
from kvrelay.frontend.openai.answer import Choice, Finish, PromptLogprobs, Usage, encode_json
from kvrelay.frontend.openai.errors import Failure

_DELTAS = {
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


class MessagesFormat:
    """Implements ``AnswerFormat``; an answer has one choice."""

    def __init__(self, context: AnswerContext) -> None:
        self._context = context
        self._blocks = Blocks(context.new_parser())
        self._finish: Finish | None = None

    def opening(
        self,
        index: int,
        prompt_token_ids: Sequence[int],
        prompt_logprobs: PromptLogprobs | None,
        num_cached_tokens: int,
    ) -> bytes:
        usage = MessageUsage(len(prompt_token_ids) - num_cached_tokens, 0, num_cached_tokens, 0)
        body = MessageBody(
            id=self._context.answer_id, model=self._context.model, content=[], stop_reason=None, usage=usage
        )
        return _event("message_start", message=body)

    def chunk(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[PositionLogprobs] | None,
        finish: Finish | None,
        usage: Usage | None,
    ) -> bytes:
        events = [self._block_event(event) for event in self._blocks.push(text, len(token_ids))]
        if finish is not None:
            self._finish = finish
            events += map(self._block_event, self._blocks.end())
        return b"".join(events)

    def closing(self, usage: Usage) -> bytes:
        assert self._finish is not None
        reason, sequence = stop_of(self._finish, self._blocks.has_calls)
        delta = _event(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": sequence},
            usage=usage_of(usage, self._blocks.num_reasoning_tokens),
        )
        return delta + _event("message_stop")

    def broken(self, failure: Failure) -> bytes:
        return b"event: error\ndata: " + anthropic_error(failure) + b"\n\n"

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        (choice,) = choices
        assert choice.finish is not None
        blocks = Blocks.of(choice, self._context.new_parser())
        reason, sequence = stop_of(choice.finish, blocks.has_calls)
        return encode_json(
            MessageBody(
                id=self._context.answer_id,
                model=self._context.model,
                content=[block_of(block, self._context.call_id_chars) for block in blocks.blocks],
                stop_reason=reason,
                stop_sequence=sequence,
                usage=usage_of(usage, blocks.num_reasoning_tokens),
            )
        )

    def _block_event(self, event: BlockEvent) -> bytes:
        block = event.block
        match event.step:
            case BlockStep.OPENED:
                return _event("content_block_start", index=block.index, content_block=self._empty(block))
            case BlockStep.GREW:
                kind, key = _DELTAS[block.kind]
                return _event("content_block_delta", index=block.index, delta={"type": kind, key: event.text})
            case BlockStep.CLOSED:
                return _event("content_block_stop", index=block.index)

    def _empty(self, block: Block) -> dict[str, object]:
        match block.kind:
            case BlockKind.TEXT:
                return {"type": "text", "text": ""}
            case BlockKind.REASONING:
                return {"type": "thinking", "thinking": "", "signature": ""}
            case BlockKind.CALL:
                chars = self._context.call_id_chars
                return {"type": "tool_use", "id": call_id(block, chars), "name": block.name, "input": {}}


def _event(kind: str, /, **fields: object) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode_json({"type": kind, **fields}) + b"\n\n"
