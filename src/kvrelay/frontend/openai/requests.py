"""Request bodies of OpenAI's API, with vLLM's additional fields. Null means absent; unknown fields are ignored."""

from __future__ import annotations

import logging
import re
from typing import TypeVar

import msgspec

from kvrelay.errors import InvalidInputError

_log = logging.getLogger(__name__)


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chats have in common. ``timeout`` is in seconds."""

    model: str | None = None
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
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
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
    user: str | None = None
    use_beam_search: bool | None = None
    truncate_prompt_tokens: int | None = None
    guided_json: object = None
    structured_outputs: object = None


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """``POST /v1/completions``. A prompt is text or token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None
    response_format: dict[str, object] | None = None


class TextPart(msgspec.Struct, frozen=True):
    """A part of a message's content; only ``type: text`` can be served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[object] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatCompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
    documents: list[object] | None = None
    tools: list[object] | None = None
    tool_choice: str | dict[str, object] | None = None
    functions: list[object] | None = None
    function_call: str | dict[str, object] | None = None
    response_format: dict[str, object] | None = None
    modalities: list[str] | None = None
    audio: dict[str, object] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /tokenize``: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


Body = TypeVar("Body", CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest)

_decoders: dict[type[msgspec.Struct], msgspec.json.Decoder[msgspec.Struct]] = {
    kind: msgspec.json.Decoder(kind)
    for kind in (CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest)
}


def parse_body(body: bytes, kind: type[Body]) -> Body:
    """The request in a JSON body. Raises InvalidInputError that names the field."""
    try:
        value = _decoders[kind].decode(body)
    except msgspec.ValidationError as exc:
        message, _, place = str(exc).partition(" - at ")
        field = re.search(r"\$\.(\w+)", place)
        param = field[1] if field else None
        raise InvalidInputError(f"{param or 'body'}: {message}", param=param) from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidInputError(f"the body is not valid JSON: {exc}") from exc
    except RecursionError as exc:
        raise InvalidInputError("the body is nested too deeply") from exc
    if _log.isEnabledFor(logging.DEBUG):
        unknown = sorted(msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys() - set(kind.__struct_fields__))
        if unknown:
            _log.debug("unknown fields ignored: %s", ", ".join(unknown))
    assert isinstance(value, kind)
    return value
