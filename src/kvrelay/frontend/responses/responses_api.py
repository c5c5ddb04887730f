"""From a request of ``/v1/responses`` to that of a chat. Pure.

No response is kept, so fields that refer to an earlier one are refused by name; ``store`` is only a hint.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.errors import InvalidInputError
from kvrelay.frontend.generate.chat_api import ChatApi, ChatTask
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
from kvrelay.frontend.responses.events import ResponsesFormat
from kvrelay.frontend.responses.response_bodies import (
    ContentPart,
    InputItem,
    NamedTool,
    ResponsesRequest,
    ResponseTool,
    TextFormat,
)

LOGPROBS = "message.output_text.logprobs"
_INCLUDED = frozenset({LOGPROBS, "reasoning.encrypted_content"})
"""Reasoning is returned in plain text, so that nothing needs to be encrypted."""


def _read(body: bytes, check_fields: FieldsCheck) -> ChatTask:
    request = parse_body(body, ResponsesRequest, check_fields)
    return ChatTask(chat_of(request), lambda context: ResponsesFormat(request, context))


RESPONSES = ChatApi(
    _read,
    {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "logprobs": "top_logprobs",
    },
)


def chat_of(request: ResponsesRequest) -> ChatCompletionRequest:
    """The chat that answers ``request``. Raises InvalidInputError."""
    _refuse(request)
    with_logprobs = LOGPROBS in (request.include or ())
    return ChatCompletionRequest(
        messages=_messages(request),
        model=request.model,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        logprobs=with_logprobs,
        top_logprobs=request.top_logprobs if with_logprobs else None,
        tools=[_tool(tool) for tool in request.tools or ()],
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request.text.format) if request.text is not None else None,
        reasoning_effort=request.reasoning.effort if request.reasoning is not None else None,
        stream=request.stream,
        seed=request.seed,
        stop=request.stop,
        top_k=request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        priority=request.priority,
        timeout=request.timeout,
        cache_salt=request.cache_salt,
    )


def _refuse(request: ResponsesRequest) -> None:
    for name in request.include or ():
        if name not in _INCLUDED:
            raise InvalidInputError(f"include of {name} is not supported", param="include")
    if request.top_logprobs and LOGPROBS not in (request.include or ()):
        raise InvalidInputError(f"top_logprobs needs include to have {LOGPROBS}", param="top_logprobs")


def _messages(request: ResponsesRequest) -> list[ChatMessage]:
    given = request.input
    turns = _Turns(request.instructions)
    if isinstance(given, str):
        turns.add(ChatMessage("user", given))
    else:
        for item in given:
            turns.take(item)
    return turns.messages


class _Turns:
    """Messages of a chat, made from items. An earlier answer is one message: its reasoning, text and calls."""

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[ChatMessage] = []
        if instructions:
            self.messages.append(ChatMessage("system", instructions))

    def add(self, message: ChatMessage) -> None:
        """System messages at the beginning become one: few templates accept two."""
        last = self.messages[-1] if self.messages else None
        roles = ("system", "developer")
        if len(self.messages) == 1 and last is not None and {last.role, message.role} <= set(roles):
            self.messages[0] = ChatMessage(message.role, f"{last.content}\n\n{message.content}")
        else:
            self.messages.append(message)

    def take(self, item: InputItem) -> None:
        match item.type:
            case "message":
                self._message(item)
            case "reasoning":
                parts = item.content if isinstance(item.content, list) else item.summary
                self._answer(reasoning_content=_text(parts or []))
            case "function_call":
                if item.call_id is None or item.name is None:
                    raise InvalidInputError("a function_call needs call_id and name", param="input")
                function = CalledFunction(item.name, item.arguments or "")
                self._answer(tool_calls=[ToolCall(item.call_id, function)])
            case "function_call_output":
                if item.call_id is None:
                    raise InvalidInputError("a function_call_output needs a call_id", param="input")
                self.messages.append(ChatMessage("tool", _text(item.output or ""), tool_call_id=item.call_id))
            case "item_reference":
                raise InvalidInputError("an item_reference needs a response that is kept; none is", param="input")
            case _:
                raise InvalidInputError(f"input items of type {item.type} are not supported", param="input")

    def _message(self, item: InputItem) -> None:
        if item.role is None:
            raise InvalidInputError("an input message needs a role", param="input")
        text = _text(item.content or "")
        if item.role == "assistant":
            self._answer(content=text)
        else:
            self.add(ChatMessage(item.role, text))

    def _answer(
        self,
        reasoning_content: str | None = None,
        content: str | None = None,
        tool_calls: list[ToolCall] | None = None,
    ) -> None:
        """A part of an answer. It belongs to the same answer as the part before, unless its order requires a new
        one."""
        last = self.messages[-1] if self.messages and self.messages[-1].role == "assistant" else None
        if last is not None and (last.tool_calls is None or tool_calls) and (last.content is None or tool_calls):
            self.messages[-1] = ChatMessage(
                "assistant",
                last.content if content is None else content,
                tool_calls=[*(last.tool_calls or ()), *(tool_calls or ())] or None,
                reasoning_content=reasoning_content or last.reasoning_content,
            )
        else:
            self.messages.append(
                ChatMessage("assistant", content, tool_calls=tool_calls, reasoning_content=reasoning_content)
            )


def _text(content: str | Sequence[ContentPart]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        text = part.refusal if part.type == "refusal" else part.text
        if part.type.rpartition("_")[2] not in ("text", "refusal") or text is None:
            raise InvalidInputError(f"content of type {part.type} is not supported", param="input")
        texts.append(text)
    return "\n".join(texts)


def _tool(tool: ResponseTool) -> Tool:
    if tool.type != "function":
        raise InvalidInputError(f"tools of type {tool.type} are not supported, only function", param="tools")
    return Tool("function", FunctionDefinition(tool.name or "", tool.description, tool.parameters, tool.strict))


def _choice(choice: str | NamedTool | None) -> str | ToolChoice | None:
    if not isinstance(choice, NamedTool):
        return choice
    if choice.type != "function" or choice.name is None:
        raise InvalidInputError("tool_choice must be auto, none, required or a function", param="tool_choice")
    return ToolChoice("function", ChosenFunction(choice.name))


def _format(form: TextFormat | None) -> ResponseFormat | None:
    if form is None:
        return None
    if form.type != "json_schema":
        return ResponseFormat(form.type)
    return ResponseFormat(form.type, JsonSchemaFormat(form.name or "", form.schema, form.description, form.strict))
