"""The answer of ``/v1/responses`` as values."""

from __future__ import annotations

from typing import Any

import msgspec

from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.status import FinishReason
from kvrelay.frontend.generate.answer_blocks import Block, BlockKind
from kvrelay.frontend.openai.answer import Finish, Usage
from kvrelay.frontend.openai.logprobs import ChatPositionLogprobs, TokenTexts, chat_logprobs
from kvrelay.frontend.responses.response_bodies import (
    Metadata,
    NamedTool,
    ReasoningOptions,
    ResponsesRequest,
    ResponseTool,
    TextFormat,
    TextOptions,
)


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[ChatPositionLogprobs] = []


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class OutputReasoning(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    id: str
    status: str
    content: list[ReasoningText]
    summary: list[dict[str, Any]] = []


class OutputCall(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class ReasoningTokens(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """A response, complete or so far. It repeats the request's settings."""

    id: str
    created_at: int
    status: str
    model: str
    output: list[OutputItem]
    object: str = "response"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: Metadata = {}
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    store: bool = False
    temperature: float | None = None
    text: TextOptions = TextOptions(TextFormat("text"))
    tool_choice: str | NamedTool = "auto"
    tools: list[ResponseTool] = []
    top_logprobs: int | None = None
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


def opened_body(request: ResponsesRequest, answer_id: str, created_unix_s: int, model: str) -> ResponseBody:
    """A response that has just begun."""
    text = request.text or TextOptions()
    return ResponseBody(
        id=answer_id,
        created_at=created_unix_s,
        status="in_progress",
        model=model,
        output=[],
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning=request.reasoning or ReasoningOptions(),
        temperature=request.temperature,
        text=TextOptions(text.format or TextFormat("text"), text.verbosity),
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=request.top_logprobs,
        top_p=request.top_p,
        user=request.user,
    )


def finished_body(
    opened: ResponseBody, output: list[OutputItem], finish: Finish, usage: Usage, num_reasoning_tokens: int
) -> ResponseBody:
    """A response whose text has ended: complete, or cut by its limit of tokens."""
    is_cut = finish.reason is FinishReason.LENGTH
    details = usage.prompt_tokens_details
    return msgspec.structs.replace(
        opened,
        status="incomplete" if is_cut else "completed",
        incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
        output=output,
        usage=ResponseUsage(
            usage.prompt_tokens,
            CachedTokens(details.cached_tokens if details is not None else 0),
            usage.completion_tokens,
            ReasoningTokens(num_reasoning_tokens),
            usage.total_tokens,
        ),
    )


def item_of(
    block: Block, status: str, call_id_chars: int, logprobs: list[ChatPositionLogprobs] | None = None
) -> OutputItem:
    """A block as an item; one that is ``in_progress`` is still empty."""
    is_open = status == "in_progress"
    text = "" if is_open else block.text
    match block.kind:
        case BlockKind.TEXT:
            return OutputMessage(item_id(block), status, [] if is_open else [OutputText(text, logprobs=logprobs or [])])
        case BlockKind.REASONING:
            return OutputReasoning(item_id(block), status, [] if is_open else [ReasoningText(text)])
        case BlockKind.CALL:
            return OutputCall(item_id(block), status, call_id(block, call_id_chars), block.name, text)


def item_id(block: Block) -> str:
    prefix = {BlockKind.TEXT: "msg_", BlockKind.REASONING: "rs_", BlockKind.CALL: "fc_"}[block.kind]
    return prefix + block.unique


def call_id(block: Block, num_chars: int) -> str:
    """Some templates accept only ids of nine letters and digits."""
    return ("call_" if num_chars > 9 else "") + block.unique[:num_chars]


def token_logprobs(logprobs: list[PositionLogprobs], texts: TokenTexts) -> list[ChatPositionLogprobs]:
    found = chat_logprobs(logprobs, texts)
    return found.content if found is not None else []
