"""From a request of ``/v1/messages`` to that of a chat. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from kvrelay.errors import InvalidInputError
from kvrelay.frontend.anthropic.events import MessagesFormat
from kvrelay.frontend.anthropic.message_bodies import (
    AnthropicTool,
    AnthropicToolChoice,
    ContentBlock,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    OutputConfig,
    TextBlock,
    Thinking,
)
from kvrelay.frontend.generate.chat_api import ChatApi, ChatTask
from kvrelay.frontend.openai.answer import AnswerContext, AnswerFormat
from kvrelay.frontend.openai.bounds import check_free_json
from kvrelay.frontend.openai.requests import ChatCompletionRequest, ChatMessage, FieldsCheck, parse_body
from kvrelay.frontend.openai.structured import JsonSchemaFormat, ResponseFormat
from kvrelay.frontend.openai.tool_fields import (
    CalledFunction,
    ChosenFunction,
    FunctionDefinition,
    Tool,
    ToolCall,
    ToolChoice,
)

VERSION_HEADER, FIRST_VERSION = "anthropic-version", "2023-06-01"
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_PARAMS = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "chat_template_kwargs": "thinking",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _read(body: bytes, check_fields: FieldsCheck) -> ChatTask:
    request = parse_body(body, MessagesRequest, check_fields)
    chat = msgspec.structs.replace(
        chat_of(request),
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        stream=request.stream,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        priority=request.priority,
        timeout=request.timeout,
        cache_salt=request.cache_salt,
    )
    return ChatTask(chat, MessagesFormat)


def _read_counted(body: bytes, check_fields: FieldsCheck) -> ChatTask:
    return ChatTask(chat_of(parse_body(body, CountTokensRequest, check_fields)), _no_format)


def _no_format(context: AnswerContext) -> AnswerFormat:
    raise NotImplementedError("a request that is only counted has no answer")


def _check_version(headers: Mapping[str, str]) -> None:
    """Before its first stable version the API had other events in streams. Without the header a later version is
    assumed."""
    version = headers.get(VERSION_HEADER, FIRST_VERSION)
    if not _DATE.fullmatch(version) or version < FIRST_VERSION:
        raise InvalidInputError(f"{VERSION_HEADER} must be {FIRST_VERSION} or a later date", param=VERSION_HEADER)


MESSAGES = ChatApi(_read, _PARAMS, _check_version)
COUNTED = ChatApi(_read_counted, _PARAMS, _check_version)


def chat_of(request: CountTokensRequest) -> ChatCompletionRequest:
    """The chat that has this prompt and form. Raises InvalidInputError."""
    system = _text(request.system or "", "system")
    messages = [ChatMessage("system", system)] if system else []
    for message in request.messages:
        messages += _turns(message)
    choice = request.tool_choice
    return ChatCompletionRequest(
        messages=messages,
        model=request.model,
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
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in message.content:
        match block.type:
            case "text" if block.text is not None:
                texts.append(block.text)
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
    for block in content:
        if block.type != "text" or block.text is None:
            raise InvalidInputError(f"content of type {block.type} is not supported", param=param)
    return "\n".join(block.text or "" for block in content)


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
