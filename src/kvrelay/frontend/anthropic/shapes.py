"""The answer of ``/v1/messages`` as values."""

from __future__ import annotations

import msgspec

from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.status import FinishReason
from kvrelay.frontend.generate.answer_blocks import Block, BlockKind
from kvrelay.frontend.openai.answer import Finish, Usage


class MessageText(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class MessageThinking(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """Nothing is signed: ``signature`` is empty."""

    thinking: str
    signature: str = ""


class MessageToolUse(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw


MessageBlock = MessageText | MessageThinking | MessageToolUse


class ThinkingTokens(msgspec.Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """``input_tokens`` are those that were not cached."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens_details: ThinkingTokens | None = None


class MessageBody(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    content: list[MessageBlock]
    stop_reason: str | None
    usage: MessageUsage
    stop_sequence: str | None = None
    type: str = "message"
    role: str = "assistant"


class TokenCount(msgspec.Struct, frozen=True):
    """``POST /v1/messages/count_tokens``."""

    input_tokens: int


def block_of(block: Block, call_id_chars: int) -> MessageBlock:
    match block.kind:
        case BlockKind.TEXT:
            return MessageText(block.text)
        case BlockKind.REASONING:
            return MessageThinking(block.text)
        case BlockKind.CALL:
            return MessageToolUse(call_id(block, call_id_chars), block.name, msgspec.Raw(whole_json(block.text)))


def whole_json(arguments: str) -> bytes:
    """The arguments as JSON; ``{}`` if the token limit has cut them, which ``stop_reason`` shows."""
    try:
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except UNREADABLE:
        return b"{}"
    return arguments.encode()


def call_id(block: Block, num_chars: int) -> str:
    """Some templates accept only ids of nine letters and digits."""
    return ("toolu_" if num_chars > 9 else "") + block.unique[:num_chars]


def usage_of(usage: Usage, num_reasoning_tokens: int) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else 0
    details = ThinkingTokens(num_reasoning_tokens) if num_reasoning_tokens else None
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached, 0, details)


def stop_of(finish: Finish, has_calls: bool) -> tuple[str, str | None]:
    """The reason, and the stop sequence if that was it."""
    if finish.reason is FinishReason.LENGTH:
        return "max_tokens", None
    if isinstance(finish.stop_reason, str):
        return "stop_sequence", finish.stop_reason
    return ("tool_use" if has_calls else "end_turn"), None
