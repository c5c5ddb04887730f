"""The bodies of ``POST /v1/messages`` and ``/v1/messages/count_tokens``. Null means absent. Every string, list and map
has a bound, as in chats."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvrelay.frontend.openai.bounds import JsonMap, Name, StopStrings, Text, Word
from kvrelay.frontend.openai.tool_fields import MAX_TOOLS, FunctionName


class TextBlock(msgspec.Struct, frozen=True):
    """Of type text; others are refused."""

    type: Word
    text: Text | None = None


TextBlocks = Annotated[list[TextBlock], Meta(max_length=1024)]


class ContentBlock(msgspec.Struct, frozen=True):
    """Of type text, tool_use, tool_result or thinking; others are refused."""

    type: Word
    text: Text | None = None
    id: Name | None = None
    name: Name | None = None
    input: JsonMap | None = None
    tool_use_id: Name | None = None
    content: Text | TextBlocks | None = None
    is_error: bool | None = None
    thinking: Text | None = None


ContentBlocks = Annotated[list[ContentBlock], Meta(max_length=1024)]


class InputMessage(msgspec.Struct, frozen=True):
    role: Word
    content: Text | ContentBlocks


InputMessages = Annotated[list[InputMessage], Meta(max_length=4096)]


class AnthropicTool(msgspec.Struct, frozen=True):
    """Only of type custom, which is the default."""

    name: FunctionName
    description: Text | None = None
    input_schema: JsonMap | None = None
    type: Word | None = None


AnthropicTools = Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)]


class AnthropicToolChoice(msgspec.Struct, frozen=True):
    """``type`` is auto, any, tool or none."""

    type: Word
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True):
    """``type`` is disabled or adaptive."""

    type: Word
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    """``type`` is json_schema."""

    type: Word
    schema: JsonMap | None = None


class OutputConfig(msgspec.Struct, frozen=True):
    """``effort`` is given to the chat template."""

    effort: Word | None = None
    format: OutputFormat | None = None


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /v1/messages/count_tokens``."""

    messages: InputMessages
    model: Name | None = None
    system: Text | TextBlocks | None = None
    tools: AnthropicTools | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """``POST /v1/messages``. The last three fields are not Anthropic's."""

    max_tokens: int
    stop_sequences: StopStrings | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    priority: int | None = None
    timeout: float | None = None
    cache_salt: Name | None = None
