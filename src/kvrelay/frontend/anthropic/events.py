"""How a message is written: whole, or as a stream of events.

message_start
  content_block_start, content_block_delta ..., content_block_stop     for each block
message_delta, with the reason of the end and the usage
message_stop
"""

from __future__ import annotations

from kvrelay.frontend.anthropic.errors import anthropic_error
from kvrelay.frontend.anthropic.shapes import MessageBody, MessageUsage, block_of, call_id, stop_of, usage_of
from kvrelay.frontend.generate.answer_blocks import AnswerBlocks, Block, BlockEvent, BlockFormat, BlockKind, BlockStep
from kvrelay.frontend.openai.answer import AnsweredPrompt, Choice, Finish, Usage, encode_json
from kvrelay.frontend.openai.errors import Failure

_DELTAS = {
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


class MessagesFormat(BlockFormat):
    """Implements ``AnswerFormat``."""

    def opening(self, index: int, prompt: AnsweredPrompt) -> bytes:
        cached = prompt.num_cached_tokens
        usage = MessageUsage(len(prompt.token_ids) - cached, 0, cached, 0)
        body = MessageBody(
            id=self._context.answer_id, model=self._context.model, content=[], stop_reason=None, usage=usage
        )
        return _event("message_start", message=body)

    def broken(self, failure: Failure) -> bytes:
        return b"event: error\ndata: " + anthropic_error(failure) + b"\n\n"

    def _end_of(self, finish: Finish, usage: Usage) -> bytes:
        reason, sequence = stop_of(finish, self._blocks.has_calls)
        delta = _event(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": sequence},
            usage=usage_of(usage, self._blocks.num_reasoning_tokens),
        )
        return delta + _event("message_stop")

    def _whole_of(self, choice: Choice, blocks: AnswerBlocks, usage: Usage) -> bytes:
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

    def _event_of(self, event: BlockEvent) -> bytes:
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
