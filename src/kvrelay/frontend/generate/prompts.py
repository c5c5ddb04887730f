"""From a request's prompt to token ids, checked against the model, in pieces for the side threads."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from kvrelay.core.token_ids import outside, packed_below
from kvrelay.errors import InvalidInputError, PromptTooLongError
from kvrelay.frontend.cluster.models import Model
from kvrelay.frontend.openai.bounds import MAX_TOKENIZED_CHARS
from kvrelay.frontend.openai.requests import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    DetokenizeRequest,
    FieldsCheck,
    TokenizeRequest,
    parse_body,
)
from kvrelay.frontend.side_threads import Pieces
from kvrelay.frontend.tools.histories import joined_text, template_messages

PIECE_TOKENS = 2**18
"""Token ids that are checked and copied in one piece, which takes some milliseconds."""

_OPEN_END = "\ue000\ue0ffopen\ue000\ue0ff "
"""Stands at the end of a message that the answer continues, while the chat template writes it. A template that trims
texts cuts the space."""

PromptItem = str | list[int]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens, ready to be hashed and sent, and its text if it was given or is needed."""

    token_ids: array[int]
    text: str | None = None


def read_completion(
    body: bytes, max_prompts: int, check_fields: FieldsCheck | None = None
) -> tuple[CompletionRequest, list[PromptItem]]:
    """The request and its prompts, at most ``max_prompts``. Raises InvalidInputError."""
    request = parse_body(body, CompletionRequest, check_fields)
    items = _split(request.prompt)
    if len(items) > max_prompts:
        raise InvalidInputError(f"more than {max_prompts} prompts", param="prompt")
    return request, items


def completion_prompts(
    items: Sequence[PromptItem],
    model: Model,
    add_special_tokens: bool,
    with_texts: bool = False,
    keep_last: int | None = None,
) -> Pieces[list[Prompt]]:
    """Texts or token ids as prompts; with ``with_texts``, prompts given as ids get a text, too. ``keep_last`` keeps
    only that many last tokens of each; -1: as many as leave room for one more. Raises InvalidInputError."""
    texts = [item for item in items if isinstance(item, str)]
    enough = model.max_model_len
    if keep_last is not None:
        keep_last, enough = _kept(keep_last, model), sys.maxsize
    else:
        for text in texts:
            if len(text) > _max_chars(model):
                raise _too_long(f"The prompt's {len(text)} characters cannot fit.", model)
    encoded = iter((yield from model.tokenizer.encode_texts(texts, add_special_tokens, enough=enough)) if texts else ())
    prompts: list[Prompt] = []
    num_tokens = 0
    for item in items:
        if isinstance(item, str):
            prompts.append(_prompt(_last(next(encoded), keep_last), model, item))
        else:
            prompts.append(_prompt(_last(item, keep_last), model))
        if with_texts and not isinstance(item, str):
            yield
            prompts[-1] = replace(prompts[-1], text=model.tokenizer.decode(item))
        num_tokens += len(prompts[-1].token_ids)
        if num_tokens > PIECE_TOKENS:
            num_tokens = 0
            yield
    return prompts


def chat_prompt(
    request: ChatCompletionRequest, model: Model, tools: Sequence[dict[str, object]] = (), keep_last: int | None = None
) -> Pieces[list[Prompt]]:
    """The rendered messages, as the only prompt. The template writes special tokens itself, so none are added unless
    asked for. ``tools`` are the functions that the model may call. Raises InvalidInputError."""
    text = _chat_text(request, model, tools)
    yield
    return (yield from completion_prompts([text], model, bool(request.add_special_tokens), keep_last=keep_last))


def counted_chat(request: ChatCompletionRequest, model: Model, tools: Sequence[dict[str, object]] = ()) -> Pieces[int]:
    """The tokens of the same prompt, even if it does not fit: clients count to learn that. Raises InvalidInputError."""
    text = _chat_text(request, model, tools, MAX_TOKENIZED_CHARS)
    yield
    (token_ids,) = yield from model.tokenizer.encode_texts([text], bool(request.add_special_tokens))
    return len(token_ids)


def _chat_text(
    request: ChatCompletionRequest, model: Model, tools: Sequence[dict[str, object]], max_chars: int | None = None
) -> str:
    arguments = request.chat_template_kwargs
    if request.reasoning_effort is not None:
        arguments = {"reasoning_effort": request.reasoning_effort, **(arguments or {})}
    messages, with_prompt = request.messages, request.add_generation_prompt
    if request.continue_final_message:
        messages, with_prompt = _left_open(messages), False
    text = render_chat(messages, model, with_prompt, arguments, max_chars, tools)
    if request.continue_final_message:
        text, found, rest = text.rpartition(_OPEN_END.rstrip())
        if not found:
            raise InvalidInputError("the chat template does not show the last message", param="continue_final_message")
        text = text if rest.startswith(" ") else text.rstrip()
    return text


def echoed_message(request: ChatCompletionRequest) -> str:
    """With ``echo``, the text that the answer continues: that of the last message, if it is to be continued."""
    return joined_text(request.messages[-1]) if request.echo and request.continue_final_message else ""


def _left_open(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages with a mark at the end of the last one's text, where the answer goes on."""
    text = joined_text(messages[-1]) if messages else ""
    if not text or messages[-1].role != "assistant":
        message = "continue_final_message needs a last message of role assistant with text"
        raise InvalidInputError(message, param="continue_final_message")
    content = messages[-1].content
    if isinstance(content, list):
        last = msgspec.structs.replace(content[-1], type="text", text=(content[-1].shown or "") + _OPEN_END)
        marked: object = [*content[:-1], last]
    else:
        marked = text + _OPEN_END
    return [*messages[:-1], msgspec.structs.replace(messages[-1], content=marked)]


def tokenized(request: TokenizeRequest, model: Model) -> Pieces[list[int]]:
    """For ``/tokenize``, without a limit on the number of tokens. Raises InvalidInputError."""
    if (request.prompt is None) == (request.messages is None):
        raise InvalidInputError("either prompt or messages must be given", param="prompt")
    text, add_special_tokens = request.prompt or "", request.add_special_tokens is not False
    if request.messages is not None:
        text = render_chat(request.messages, model, request.add_generation_prompt, max_chars=MAX_TOKENIZED_CHARS)
        add_special_tokens = bool(request.add_special_tokens)
        yield
    (token_ids,) = yield from model.tokenizer.encode_texts([text], add_special_tokens)
    return token_ids


def detokenized(request: DetokenizeRequest, model: Model) -> str:
    """For ``/detokenize``. Raises InvalidInputError."""
    _packed(request.tokens, model, "tokens")
    return model.tokenizer.decode(request.tokens)


def render_chat(
    messages: Sequence[ChatMessage],
    model: Model,
    add_generation_prompt: bool | None = None,
    arguments: dict[str, object] | None = None,
    max_chars: int | None = None,
    tools: Sequence[dict[str, object]] = (),
) -> str:
    """The messages as the chat template writes them, at most ``max_chars`` (None: the most that may fit the context).

    Raises InvalidInputError if there is no chat template, if it refuses the messages, or if it writes too much.
    """
    template = model.tokenizer.chat_template
    if template is None:
        raise InvalidInputError(f"The model `{model.name}` has no chat template.", param="messages")
    if max_chars is None:
        max_chars = _max_chars(model)
    template = template.chosen(bool(tools))
    shown, described = (tools, ()) if template.form.knows_tools else ((), tools)
    shapes = template_messages(messages, template.form, described)
    try:
        return template.render(shapes, add_generation_prompt is not False, arguments, max_chars, shown)
    except PromptTooLongError as exc:
        raise _too_long(exc.message, model, "messages") from exc


def _split(prompt: str | list[str | int | list[int]]) -> list[PromptItem]:
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]  # packing them finds other items
    kinds = set(map(type, prompt))
    if len(kinds) != 1:
        what = "must not be empty" if not kinds else "must be all texts, all token ids or all lists of token ids"
        raise InvalidInputError(f"prompt {what}", param="prompt")
    return prompt  # type: ignore[return-value]


def _max_chars(model: Model) -> int:
    """The most characters that can fit into the context. A longer text is refused without tokenizing it."""
    return model.tokenizer.max_chars_per_token * model.max_model_len


def _kept(keep_last: int, model: Model) -> int:
    if keep_last > model.max_model_len:
        raise InvalidInputError(
            f"truncate_prompt_tokens is above the context length of {model.max_model_len}",
            param="truncate_prompt_tokens",
        )
    return keep_last if keep_last > 0 else max(model.max_model_len - 1, 1)


def _last(token_ids: list[int], count: int | None) -> list[int]:
    return token_ids if count is None else token_ids[-count:]


def _prompt(token_ids: list[int], model: Model, text: str | None = None) -> Prompt:
    """``text``: of a prompt that was given as text."""
    if text is not None and len(token_ids) > model.max_model_len:
        raise _too_long("The prompt is longer.", model)
    try:
        packed = _packed(token_ids, model, "prompt")
    except InvalidInputError:
        if text is None:
            raise
        name = model.tokenizer.token_string(max(token_ids))
        message = f"the prompt has the token {name!r}, but the model has only {model.vocab_size} tokens"
        raise InvalidInputError(message, param="prompt") from None
    if not packed:
        raise InvalidInputError("the prompt is empty", param="prompt")
    return Prompt(packed, text)


def _packed(token_ids: list[int], model: Model, param: str) -> array[int]:
    packed = packed_below(token_ids, model.vocab_size)
    if packed is None:
        found, highest = outside(token_ids, model.vocab_size), model.vocab_size - 1
        raise InvalidInputError(f"token ids must be integers between 0 and {highest}, got {found}", param=param)
    return packed


def _too_long(what: str, model: Model, param: str = "prompt") -> PromptTooLongError:
    """In OpenAI's words, which clients look for."""
    message = f"This model's maximum context length is {model.max_model_len} tokens. {what}"
    return PromptTooLongError(message, param)
