"""OpenAI's ``/v1/responses``, stateless: its requests and answers, translated to and from those of chats. No I/O.

In requests null means absent, and every string, list and map has a bound, as in chats. No response is kept, so fields
that refer to an earlier one are refused by name; ``store`` is only a hint. A response is written whole, or as events:

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
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvrelay.core.logprobs import PositionLogprobs
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
from kvrelay.frontend.openai.answer import (
    AnswerContext,
    AnsweredPrompt,
    Choice,
    ChoicePiece,
    Finish,
    Usage,
    encode_json,
)
from kvrelay.frontend.openai.bounds import JsonMap, Name, StopString, StopStrings, Text, Word, Words
from kvrelay.frontend.openai.logprobs import ChatPositionLogprobs, chat_logprobs
from kvrelay.frontend.openai.requests import (
    MAX_TOOLS,
    AllowedTool,
    AllowedTools,
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

INPUT_TOKENS_PATH = "/v1/responses/input_tokens"
_SERVED = ("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal")


# -- requests ---------------------------------------------------------------------------------------------------------


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


class NamedTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """One function by name."""

    type: Word
    name: FunctionName | None = None


class ChosenTools(NamedTool, frozen=True):
    """One function by name, or some, with a ``mode`` (allowed_tools)."""

    mode: Word = ""
    tools: Annotated[list[NamedTool], Meta(max_length=MAX_TOOLS)] = []


class TextFormat(msgspec.Struct, frozen=True, omit_defaults=True):
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


class InputTokensRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /v1/responses/input_tokens``."""

    input: Text | InputItems
    model: Name | None = None
    instructions: Text | None = None
    tools: ResponseTools | None = None
    tool_choice: Word | ChosenTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None


class ResponsesRequest(InputTokensRequest, frozen=True, kw_only=True):
    """``POST /v1/responses``. The last nine fields are not OpenAI's."""

    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
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
    kv_hints: KvHints | None = None


# -- answers ----------------------------------------------------------------------------------------------------------


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
    tool_choice: str | ChosenTools = "auto"
    tools: list[ResponseTool] = []
    top_logprobs: int | None = None
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


def opened_body(request: InputTokensRequest, answer_id: str, created_unix_s: int, model: str) -> ResponseBody:
    """A response that has just begun."""
    names = ResponseBody.__struct_fields__
    given = {name: value for name in names if (value := getattr(request, name, None)) is not None}
    text = request.text or TextOptions()
    given |= {"model": model, "text": TextOptions(text.format or TextFormat("text"), text.verbosity)}
    return ResponseBody(id=answer_id, created_at=created_unix_s, status="in_progress", output=[], **given)


def finished_body(
    opened: ResponseBody, output: list[OutputItem], finish: Finish, usage: Usage, num_reasoning_tokens: int
) -> ResponseBody:
    """A response whose text has ended: complete, or cut by its limit of tokens."""
    is_cut = finish.reason is FinishReason.LENGTH
    return msgspec.structs.replace(
        opened,
        status="incomplete" if is_cut else "completed",
        incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
        output=output,
        usage=ResponseUsage(
            usage.prompt_tokens,
            CachedTokens(usage.num_cached_tokens),
            usage.completion_tokens,
            ReasoningTokens(num_reasoning_tokens),
            usage.total_tokens,
        ),
    )


def item_id(block: Block) -> str:
    return _ID_PREFIXES[block.kind] + block.unique


# -- how answers are written ------------------------------------------------------------------------------------------


class ResponsesFormat(BlockFormat):
    """Implements ``AnswerFormat``."""

    def __init__(self, request: InputTokensRequest, context: AnswerContext) -> None:
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
        is_plain = self._context.make_parser is None
        return chat_logprobs(logprobs, self._context.texts).content if logprobs and is_plain else []

    # -- items --------------------------------------------------------------------------------------------------------

    def _output(self, blocks: AnswerBlocks, finish: Finish, logprobs: list[ChatPositionLogprobs]) -> list[OutputItem]:
        """All items; the last one is incomplete if the limit of tokens cut it."""
        last = "incomplete" if finish.reason is FinishReason.LENGTH else "completed"
        return [
            self._item(block, last if block is blocks.blocks[-1] else "completed", logprobs) for block in blocks.blocks
        ]

    def _item(self, block: Block, status: str, logprobs: list[ChatPositionLogprobs]) -> OutputItem:
        """A block as an item; one that is ``in_progress`` is still empty."""
        is_open, unique = status == "in_progress", item_id(block)
        text = "" if is_open else block.text
        match block.kind:
            case BlockKind.TEXT:
                return OutputMessage(unique, status, [] if is_open else [OutputText(text, logprobs=logprobs)])
            case BlockKind.REASONING:
                return OutputReasoning(unique, status, [] if is_open else [ReasoningText(text)])
            case BlockKind.CALL:
                return OutputCall(unique, status, self._context.call_id("call_", block.unique), block.name, text)

    # -- events -------------------------------------------------------------------------------------------------------

    def _event(self, name: str, /, **fields: object) -> bytes:
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        return named_event(f"response.{name}", sequence_number=number, **fields)

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
_ID_PREFIXES = {BlockKind.TEXT: "msg_", BlockKind.REASONING: "rs_", BlockKind.CALL: "fc_"}


# -- to a chat --------------------------------------------------------------------------------------------------------


LOGPROBS = "message.output_text.logprobs"
_INCLUDED = frozenset({LOGPROBS, "reasoning.encrypted_content"})
"""Reasoning is returned in plain text, so that nothing needs to be encrypted."""


_PARAMS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "top_logprobs",
}


def chat_of(request: InputTokensRequest) -> ChatCompletionRequest:
    """The chat that has this prompt and form. Raises InvalidInputError."""
    return ChatCompletionRequest(
        **common_fields(request),
        **_answer_fields(request) if isinstance(request, ResponsesRequest) else {},
        messages=_messages(request),
        tools=[_tool(tool) for tool in request.tools or ()],
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request.text.format) if request.text is not None else None,
        reasoning_effort=request.reasoning.effort if request.reasoning is not None else None,
    )


def _answer_fields(request: ResponsesRequest) -> dict[str, Any]:
    """What the prompt does not depend on. Raises InvalidInputError."""
    for name in request.include or ():
        if name not in _INCLUDED:
            raise InvalidInputError(f"include of {name} is not supported", param="include")
    with_logprobs = LOGPROBS in (request.include or ())
    if request.top_logprobs and not with_logprobs:
        raise InvalidInputError(f"top_logprobs needs include to have {LOGPROBS}", param="top_logprobs")
    top = request.top_logprobs if with_logprobs else None
    return {"max_completion_tokens": request.max_output_tokens, "logprobs": with_logprobs, "top_logprobs": top}


def _messages(request: InputTokensRequest) -> list[ChatMessage]:
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
                self._answer(tool_calls=[ToolCall(item.call_id, CalledFunction(item.name, item.arguments or ""))])
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
        self, reasoning_content: str | None = None, content: str | None = None, tool_calls: list[ToolCall] | None = None
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
    return "\n".join(
        part_text(part.type, part.refusal if part.type == "refusal" else part.text, _SERVED, "input")
        for part in content
    )


def _tool(tool: ResponseTool) -> Tool:
    if tool.type != "function":
        raise InvalidInputError(f"tools of type {tool.type} are not supported, only function", param="tools")
    return Tool("function", FunctionDefinition(tool.name or "", tool.description, tool.parameters, tool.strict))


def _choice(choice: str | ChosenTools | None) -> str | ToolChoice | None:
    if not isinstance(choice, ChosenTools):
        return choice
    tools = [AllowedTool(tool.type, _chosen(tool)) for tool in choice.tools]
    if choice.type == "allowed_tools" and all(tool.type == "function" and tool.function for tool in tools):
        return ToolChoice(choice.type, allowed_tools=AllowedTools(choice.mode, tools))
    return ToolChoice(choice.type, _chosen(choice))


def _chosen(tool: NamedTool) -> ChosenFunction | None:
    return ChosenFunction(tool.name) if tool.name is not None else None


def _format(form: TextFormat | None) -> ResponseFormat | None:
    if form is None:
        return None
    if form.type != "json_schema":
        return ResponseFormat(form.type)
    return ResponseFormat(form.type, JsonSchemaFormat(form.name or "", form.schema, form.description, form.strict))


RESPONSES = ChatApi(ResponsesRequest, chat_of, ResponsesFormat, _PARAMS)
INPUT_TOKENS = ChatApi(
    InputTokensRequest, chat_of, ResponsesFormat, _PARAMS, counted={"object": "response.input_tokens"}
)
