"""The body of ``POST /v1/responses``. Null means absent. Every string, list and map has a bound, as in chats."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvrelay.frontend.openai.bounds import JsonMap, Name, StopString, StopStrings, Text, Word, Words
from kvrelay.frontend.openai.tool_fields import MAX_TOOLS, FunctionName

MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[str, MetadataValue], Meta(max_length=16)]


class ContentPart(msgspec.Struct, frozen=True):
    """Of type input_text, output_text, summary_text, reasoning_text or refusal; others are refused."""

    type: Word
    text: Text | None = None
    refusal: Text | None = None


ContentParts = Annotated[list[ContentPart], Meta(max_length=1024)]


class InputItem(msgspec.Struct, frozen=True):
    """A message, an earlier call, its output, or reasoning; without ``type`` a message. Fields of other types are
    ignored."""

    type: Word = "message"
    role: Word | None = None
    content: Text | ContentParts | None = None
    id: Name | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: Text | None = None
    output: Text | ContentParts | None = None
    summary: ContentParts | None = None


InputItems = Annotated[list[InputItem], Meta(max_length=4096)]


class ResponseTool(msgspec.Struct, frozen=True):
    """Only of type function."""

    type: Word
    name: FunctionName | None = None
    description: Text | None = None
    parameters: JsonMap | None = None
    strict: bool | None = None


ResponseTools = Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)]


class NamedTool(msgspec.Struct, frozen=True):
    """One function by name."""

    type: Word
    name: FunctionName | None = None


class TextFormat(msgspec.Struct, frozen=True):
    """``type`` is text, json_object or json_schema."""

    type: Word
    name: Name | None = None
    schema: JsonMap | None = None
    description: Annotated[str, Meta(max_length=2**16)] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """``verbosity`` is a hint."""

    format: TextFormat | None = None
    verbosity: Word | None = None


class ReasoningOptions(msgspec.Struct, frozen=True):
    """``effort`` is given to the chat template; there are no summaries; the reasoning itself is returned."""

    effort: Word | None = None
    summary: Word | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /v1/responses``. The last eight fields are not OpenAI's."""

    input: Text | InputItems
    model: Name | None = None
    instructions: Text | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    tools: ResponseTools | None = None
    tool_choice: Word | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Words | None = None
    metadata: Metadata | None = None
    stream: bool | None = None
    user: Name | None = None
    seed: int | None = None
    stop: StopString | StopStrings | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    priority: int | None = None
    timeout: float | None = None
    cache_salt: Name | None = None
