"""Request bodies of OpenAI's API, with vLLM's additional fields. Null means absent; ``frontend.api.fields``
decides about fields that are not here.

Every string, list and map has a type of ``bounds``, which limits its length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.grammar import MAX_GRAMMAR_CHARS
from kvrelay.errors import InvalidInputError
from kvrelay.frontend.openai.bounds import (
    AllowedTokenIds,
    JsonMap,
    LogitBias,
    Name,
    PromptItems,
    StopString,
    StopStrings,
    StopTokenIds,
    Text,
    TokenIds,
    TokenizedText,
    Word,
    check_body,
    check_free_json,
    free_json_fields,
)


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class KvHints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the client knows of its session after this answer. ``tool``: what it will wait for. ``retain_s``: it will
    be back within so many seconds. ``release``: the session is over. ``prefetch``: no answer is wanted; the turn with
    this prompt comes soon."""

    tool: Name | None = None
    retain_s: float | None = None
    release: bool | None = None
    prefetch: bool | None = None


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """The common fields of completions and chats. ``timeout`` is in seconds."""

    model: Name | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = None
    seed: int | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    timeout: float | None = None
    truncate_prompt_tokens: int | None = None
    bad_words: StopStrings | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    cache_salt: Name | None = None
    kv_hints: KvHints | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaText | JsonMap | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    json_schema: SchemaText | None = None
    regex: GrammarText | None = None
    ebnf: GrammarText | None = None


def common_fields(request: msgspec.Struct) -> dict[str, Any]:
    """The fields of another API's body that are ``GenerationFields``, with the same meaning."""
    names = set(GenerationFields.__struct_fields__).intersection(request.__struct_fields__)
    return {name: getattr(request, name) for name in names}


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """``POST /v1/completions``. A prompt is text or token ids, or a list of either."""

    prompt: Text | PromptItems
    echo: bool | None = None
    logprobs: int | None = None


_BOUNDED = frozenset({"prompt", "messages", "model", "cache_salt", "reasoning_effort"})
_SHORT_TYPES = (bool | None, int | None, float | None, StreamOptions | None)


@cache
def _long_fields(kind: type[GenerationFields]) -> tuple[Callable[[GenerationFields], tuple[object, ...]], int]:
    """A function that reads the fields that may be long, and their number."""
    names = [
        field.name
        for field in msgspec.structs.fields(kind)
        if field.name not in _BOUNDED and field.type not in _SHORT_TYPES
    ]
    return attrgetter(*names), len(names)


def has_short_fields(request: GenerationFields) -> bool:
    """Whether no field but the prompt can be long, so that making its spec takes next to no time."""
    read, count = _long_fields(type(request))
    return read(request).count(None) == count


class TextPart(msgspec.Struct, frozen=True):
    """A part of a message's content; only those of type text and refusal can be served."""

    type: Word
    text: Text | None = None
    refusal: Text | None = None

    @property
    def shown(self) -> str | None:
        """None if the part cannot be served."""
        return self.text if self.type in ("text", "input_text") else self.refusal if self.type == "refusal" else None


TextParts = Annotated[list[TextPart], Meta(max_length=1024)]


def part_text(kind: str, text: str | None, served: Container[str], param: str) -> str:
    """The text of a part of a message. Raises InvalidInputError for other types than those ``served``, and without a
    text."""
    if kind not in served:
        raise InvalidInputError(f"content of type {kind} is not supported", param=param)
    if text is None:
        field = "refusal" if kind == "refusal" else "text"
        raise InvalidInputError(f"content of type {kind} needs a {field}", param=param)
    return text


class ChatMessage(msgspec.Struct, frozen=True):
    role: Word
    content: Text | TextParts | None = None
    name: Name | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: Name | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    """Another name of ``reasoning_content``."""
    refusal: Text | None = None
    """In place of ``content``."""
    function_call: CalledFunction | None = None
    audio: Identified | None = None
    """These two are refused."""


class Identified(msgspec.Struct, frozen=True):
    """Something that no one keeps here."""

    id: Name | None = None


ChatMessages = Annotated[list[ChatMessage], Meta(max_length=4096)]


class ChatCompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: ChatMessages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonMap | None = None
    tools: Tools | None = None
    tool_choice: Word | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Word | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /tokenize``: a prompt or messages."""

    model: Name | None = None
    prompt: TokenizedText | None = None
    messages: ChatMessages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /detokenize``."""

    tokens: TokenIds
    model: Name | None = None


Body = TypeVar("Body", bound=msgspec.Struct)

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Reader(msgspec.Struct, Generic[Body], frozen=True):
    """The decoder of bodies of one kind."""

    decoder: msgspec.json.Decoder[Body]
    strict: msgspec.json.Decoder[Body]
    """Refuses a body with fields that the kind does not have."""
    free_fields: tuple[str, ...]


@cache
def _reader(kind: type[Body]) -> _Reader[Body]:
    config = kind.__struct_config__
    strict = msgspec.defstruct(
        kind.__name__, [], bases=(kind,), forbid_unknown_fields=True, frozen=config.frozen, kw_only=True
    )
    return _Reader(msgspec.json.Decoder(kind), msgspec.json.Decoder(strict), free_json_fields(kind))


FieldsCheck = Callable[[type[msgspec.Struct], Mapping[str, msgspec.Raw]], None]
"""Gets the kind of a body and its fields; raises InvalidInputError for one that is refused."""


def parse_body(body: bytes, kind: type[Body], check_fields: FieldsCheck | None = None) -> Body:
    """The request in a JSON body. ``check_fields`` decides about fields that ``kind`` does not have (None: they are
    ignored).

    Raises InvalidInputError that names the field.

    It keeps the interpreter's lock for 50 ms at most, for the worst body of 16 MB.
    """
    check_body(body)
    reader: _Reader[Body] = _reader(kind)
    try:
        value = _known_fields(reader, body)
        if value is None:
            while value is None:
                try:
                    value = reader.decoder.decode(body)
                except msgspec.ValidationError as exc:
                    body = _with_integer(_fields.decode(body), exc)
            if check_fields is not None:
                # The decoder skips other fields and does not look for UTF-8 in them.
                check_fields(kind, _fields.decode(body))
    except msgspec.ValidationError as exc:
        message, _, place = str(exc).partition(" - at ")
        field = re.search(r"\$\.(\w+)", place) or re.search(r"required field `(\w+)", message)
        param = field[1] if field else None
        raise InvalidInputError(f"{param or 'body'}: {message}", param=param) from exc
    except RecursionError as exc:
        raise InvalidInputError("the body is nested too deeply") from exc
    except UNREADABLE as exc:
        raise InvalidInputError(f"the body is not valid JSON: {exc}") from exc
    for name in reader.free_fields:
        check_free_json(getattr(value, name), name)
    return value


def _known_fields(reader: _Reader[Body], body: bytes) -> Body | None:
    """The request if the body is right and has no other fields, as nearly every body: then it is read only once."""
    try:
        return reader.strict.decode(body)
    except msgspec.ValidationError:
        return None


def _with_integer(fields: dict[str, msgspec.Raw], refusal: msgspec.ValidationError) -> bytes:
    """The body with 16 where it has 16.0 or 1.6e1 for an integer: JSON has one kind of numbers. Raises ``refusal`` if
    that is of something else."""
    field = re.fullmatch(r"Expected `int.*, got `float` - at `\$\.(\w+)`", str(refusal))
    if field is None or not (number := float(bytes(fields[field[1]]))).is_integer():
        raise refusal
    return msgspec.json.encode(fields | {field[1]: int(number)})


MAX_TOOLS = 128


FunctionName = Annotated[str, Meta(max_length=64)]


class FunctionDefinition(msgspec.Struct, frozen=True, omit_defaults=True):
    """``strict`` has an effect only for forced calls (``required`` or by name), which always conform to
    ``parameters``."""

    name: FunctionName
    description: Text | None = None
    parameters: JsonMap | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """Only of type function; others have no ``function``."""

    type: Word
    function: FunctionDefinition = FunctionDefinition("")


class ChosenFunction(msgspec.Struct, frozen=True):
    name: FunctionName


class AllowedTool(msgspec.Struct, frozen=True):
    """Only of type function; others have no ``function``."""

    type: Word
    function: ChosenFunction | None = None


class AllowedTools(msgspec.Struct, frozen=True):
    """Of the functions that the model hears of, those which it may call (``mode`` auto) or must call (required)."""

    mode: Word
    tools: Annotated[list[AllowedTool], Meta(max_length=MAX_TOOLS)]


class ToolChoice(msgspec.Struct, frozen=True):
    """One function by name, or some (``allowed_tools``)."""

    type: Word
    function: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """``arguments`` are JSON text."""

    name: FunctionName
    arguments: Text = ""


class ToolCall(msgspec.Struct, frozen=True):
    """A call, in an earlier message or in an answer."""

    id: Name
    function: CalledFunction = CalledFunction("")
    type: Word = "function"


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


ToolCalls = Annotated[list[ToolCall], Meta(max_length=1024)]


MAX_CHOICES = 1024


SchemaText = Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)]


GrammarText = Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)]


Choices = Annotated[list[Annotated[str, Meta(max_length=4096)]], Meta(max_length=MAX_CHOICES)]


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """``strict`` is accepted and has no effect: every schema is always enforced."""

    name: Name
    schema: JsonMap | None = None
    description: Annotated[str, Meta(max_length=2**16)] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """OpenAI's: ``type`` is text, json_object or json_schema."""

    type: Word
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's; exactly one of the fields is set."""

    json: SchemaText | JsonMap | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
