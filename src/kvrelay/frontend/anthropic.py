"""Anthropic's ``/v1/messages``: its requests, answers and errors, translated to and from those of chats. No I/O.

In requests null means absent, and every string, list and map has a bound, as in chats. A message is written whole, or
as a stream of events:

    message_start
      content_block_start, content_block_delta ..., content_block_stop     for each block
    message_delta, with the reason of the end and the usage
    message_stop
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.status import FinishReason
from kvrelay.errors import InvalidInputError
from kvrelay.frontend.generate.answer_blocks import (
    AnswerBlocks,
    Block,
    BlockEvent,
    BlockFormat,
    BlockKind,
    BlockStep,
    named_event,
)
from kvrelay.frontend.generate.chat_api import ChatApi
from kvrelay.frontend.openai.answer import AnswerContext, AnsweredPrompt, Choice, Finish, Usage, encode_json
from kvrelay.frontend.openai.bounds import JsonMap, Name, StopStrings, Text, Word, check_free_json
from kvrelay.frontend.openai.requests import (
    MAX_TOOLS,
    CalledFunction,
    ChatCompletionRequest,
    ChatMessage,
    ChosenFunction,
    FunctionDefinition,
    FunctionName,
    JsonSchemaFormat,
    KvHints,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoice,
    common_fields,
    part_text,
)
from kvrelay.http.errors import Failure

MESSAGES_PATH = "/v1/messages"
COUNT_TOKENS_PATH = "/v1/messages/count_tokens"
_SERVED = ("text",)


# -- requests ---------------------------------------------------------------------------------------------------------


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
    kv_hints: KvHints | None = None


# -- answers ----------------------------------------------------------------------------------------------------------


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


def whole_json(arguments: str) -> bytes:
    """The arguments as JSON; ``{}`` if the token limit has cut them, which ``stop_reason`` shows."""
    try:
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except UNREADABLE:
        return b"{}"
    return arguments.encode()


def usage_of(usage: Usage, num_reasoning_tokens: int) -> MessageUsage:
    cached = usage.num_cached_tokens
    details = ThinkingTokens(num_reasoning_tokens) if num_reasoning_tokens else None
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached, 0, details)


def stop_of(finish: Finish, has_calls: bool) -> tuple[str, str | None]:
    """The reason, and the stop sequence if that was it."""
    if finish.reason is FinishReason.LENGTH:
        return "max_tokens", None
    if isinstance(finish.stop_reason, str):
        return "stop_sequence", finish.stop_reason
    return ("tool_use" if has_calls else "end_turn"), None


# -- errors -----------------------------------------------------------------------------------------------------------


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ThreadRefusal(msgspec.Struct, frozen=True):
    """With it Anthropic's tool runner sends whole histories from then on. It begins with a ``thread`` by itself."""

    error_code: str = "thread_unsupported_request"
    unsupported: tuple[str, ...] = ("thread",)


class AnthropicError(msgspec.Struct, frozen=True, omit_defaults=True):
    type: str
    message: str
    details: ThreadRefusal | None = None


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    error: AnthropicError
    type: str = "error"


def anthropic_error(failure: Failure) -> bytes:
    """An ``ErrorShape``. There is no place for the field's name but the message."""
    kind = _TYPES.get(failure.status) or ("invalid_request_error" if failure.status < 500 else "api_error")
    message = failure.line
    if failure.param is not None and failure.param not in message:
        message = f"{failure.param}: {message}"
    # Clients look for these words: they ask for less, or shorten the conversation.
    if failure.lengths is not None:
        total = "{} + {} > {}".format(*failure.lengths)
        fix = "decrease input length or `max_tokens` and try again"
        message = f"input length and `max_tokens` exceed context limit: {total}, {fix}"
    elif failure.code == "context_length_exceeded":
        message = f"prompt is too long: {failure.line}"
    details = ThreadRefusal() if failure.param == "thread" else None
    return msgspec.json.encode(AnthropicErrorBody(AnthropicError(kind, message, details)))


# -- how answers are written ------------------------------------------------------------------------------------------


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
        return named_event("message_start", message=body)

    def broken(self, failure: Failure) -> bytes:
        return b"event: error\ndata: " + anthropic_error(failure) + b"\n\n"

    def _end_of(self, finish: Finish, usage: Usage) -> bytes:
        reason, sequence = stop_of(finish, self._blocks.has_calls)
        delta = named_event(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": sequence},
            usage=usage_of(usage, self._blocks.num_reasoning_tokens),
        )
        return delta + named_event("message_stop")

    def _whole_of(self, choice: Choice, blocks: AnswerBlocks, usage: Usage) -> bytes:
        reason, sequence = stop_of(choice.finish, blocks.has_calls)
        return encode_json(
            MessageBody(
                id=self._context.answer_id,
                model=self._context.model,
                content=[self._block(block) for block in blocks.blocks],
                stop_reason=reason,
                stop_sequence=sequence,
                usage=usage_of(usage, blocks.num_reasoning_tokens),
            )
        )

    def _event_of(self, event: BlockEvent) -> bytes:
        block = event.block
        match event.step:
            case BlockStep.OPENED:
                return named_event("content_block_start", index=block.index, content_block=self._block(block))
            case BlockStep.GREW:
                kind, key = _DELTAS[block.kind]
                return named_event("content_block_delta", index=block.index, delta={"type": kind, key: event.text})
            case BlockStep.CLOSED:
                return named_event("content_block_stop", index=block.index)

    def _block(self, block: Block) -> MessageBlock:
        match block.kind:
            case BlockKind.TEXT:
                return MessageText(block.text)
            case BlockKind.REASONING:
                return MessageThinking(block.text)
            case BlockKind.CALL:
                call_id = self._context.call_id("toolu_", block.unique)
                return MessageToolUse(call_id, block.name, msgspec.Raw(whole_json(block.text)))


# -- to a chat --------------------------------------------------------------------------------------------------------


VERSION_HEADER, FIRST_VERSION = "anthropic-version", "2023-06-01"
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_PARAMS = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "chat_template_kwargs": "thinking",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _check_version(headers: Mapping[str, str]) -> None:
    """Before its first stable version the API had other events in streams. Without the header a later version is
    assumed."""
    version = headers.get(VERSION_HEADER, FIRST_VERSION)
    if not _DATE.fullmatch(version) or version < FIRST_VERSION:
        raise InvalidInputError(f"{VERSION_HEADER} must be {FIRST_VERSION} or a later date", param=VERSION_HEADER)


def chat_of(request: CountTokensRequest) -> ChatCompletionRequest:
    """The chat that has this prompt and form. Raises InvalidInputError."""
    system = _text(request.system or "", "system")
    messages = [ChatMessage("system", system)] if system else []
    for message in request.messages:
        messages += _turns(message)
    choice = request.tool_choice
    return ChatCompletionRequest(
        **common_fields(request),
        messages=messages,
        stop=getattr(request, "stop_sequences", None),
        tools=[_tool(tool) for tool in request.tools or ()],
        tool_choice=_choice(choice) if choice is not None else None,
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=_format(request.output_config),
        reasoning_effort=request.output_config.effort if request.output_config is not None else None,
        chat_template_kwargs=_template_arguments(request.thinking),
        continue_final_message=_is_continued(messages) or None,
    )


def _is_continued(messages: Sequence[ChatMessage]) -> bool:
    """An answer continues a last message of the assistant. Raises InvalidInputError if that has no text."""
    if not messages or messages[-1].role != "assistant" or messages[-1].tool_calls:
        return False
    if not messages[-1].content:
        raise InvalidInputError("the last message is the assistant's, so it needs a text to continue", param="messages")
    return True


def _turns(message: InputMessage) -> Iterator[ChatMessage]:
    """A message in the form of chats: results of calls are separate messages, before the text."""
    if isinstance(message.content, str):
        yield ChatMessage(_role(message), message.content)
        return
    if not message.content and message.role == "user":
        raise InvalidInputError("a message of role user has no content: give a text or blocks", param="messages")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in message.content:
        match block.type:
            case "text":
                texts.append(part_text(block.type, block.text, _SERVED, "messages"))
            case "tool_use" if message.role == "assistant":
                calls.append(_call(block))
            case "tool_result" if message.role == "user":
                yield _result(block)
            case "thinking" if message.role == "assistant":
                thoughts.append(block.thinking or "")
            case _:
                text = f"content of type {block.type} in a message of role {message.role} is not supported"
                raise InvalidInputError(text, param="messages")
    if texts or calls or thoughts:
        yield ChatMessage(
            _role(message),
            "\n".join(texts) if texts else None,
            tool_calls=calls or None,
            reasoning_content="\n".join(thoughts) if thoughts else None,
        )


def _role(message: InputMessage) -> str:
    if message.role not in ("user", "assistant"):
        text = f"a message is of role user or assistant, not {message.role}; the system prompt is the field system"
        raise InvalidInputError(text, param="messages")
    return message.role


def _call(block: ContentBlock) -> ToolCall:
    if block.id is None or block.name is None:
        raise InvalidInputError("a tool_use needs id, name and input", param="messages")
    check_free_json(block.input, "messages")
    return ToolCall(block.id, CalledFunction(block.name, msgspec.json.encode(block.input or {}).decode()))


def _result(block: ContentBlock) -> ChatMessage:
    """Chats have no mark for a failed call, so its text states the failure."""
    text = _text(block.content or "", "messages")
    return ChatMessage("tool", f"Error: {text}" if block.is_error else text, tool_call_id=block.tool_use_id)


def _text(content: str | Sequence[TextBlock], param: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part_text(block.type, block.text, _SERVED, param) for block in content)


def _tool(tool: AnthropicTool) -> Tool:
    if tool.type not in (None, "custom"):
        raise InvalidInputError(f"tools of type {tool.type} are not supported, only custom", param="tools")
    return Tool("function", FunctionDefinition(tool.name, tool.description, tool.input_schema))


def _choice(choice: AnthropicToolChoice) -> str | ToolChoice:
    if choice.type == "tool" and choice.name is not None:
        return ToolChoice("function", ChosenFunction(choice.name))
    if choice.type not in _CHOICES:
        raise InvalidInputError("tool_choice must be of type auto, any, none, or tool with a name", param="tool_choice")
    return _CHOICES[choice.type]


def _format(config: OutputConfig | None) -> ResponseFormat | None:
    form = config.format if config is not None else None
    if form is None:
        return None
    if form.type != "json_schema":
        message = f"output_config.format must be of type json_schema, got {form.type}"
        raise InvalidInputError(message, param="output_config.format")
    return ResponseFormat("json_schema", JsonSchemaFormat("answer", form.schema))


def _template_arguments(thinking: Thinking | None) -> dict[str, object] | None:
    """What chat templates know of thinking: that there must be none."""
    if thinking is None or thinking.type == "adaptive":
        return None
    if thinking.type == "disabled":
        return {"enable_thinking": False}
    message = (
        "thinking with a budget is not supported: a model that reasons does so by itself (thinking: adaptive), and "
        "max_tokens bounds the answer with its reasoning"
    )
    raise InvalidInputError(message, param="thinking")


def _make_format(request: CountTokensRequest, context: AnswerContext) -> MessagesFormat:
    return MessagesFormat(context)


MESSAGES = ChatApi(MessagesRequest, chat_of, _make_format, _PARAMS, _check_version)
COUNTED = ChatApi(CountTokensRequest, chat_of, _make_format, _PARAMS, _check_version)
