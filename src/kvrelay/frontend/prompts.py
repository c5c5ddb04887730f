"""From a request's prompt to token ids, checked against the model. Long texts are tokenized beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.errors import InvalidInputError, PromptTooLongError
from kvrelay.frontend.models import Model
from kvrelay.frontend.openai.chat import template_messages
from kvrelay.frontend.openai.requests import ChatCompletionRequest, ChatMessage
from kvrelay.frontend.tokenizer import Tokenizer

INLINE_CHARS = 8192
"""Shorter texts are tokenized in place: a millisecond, less than what a thread would cost others."""
MAX_CHARS_PER_TOKEN = 1024
"""No prompt of more than so many characters per token of context can fit; it need not be tokenized to know."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens, and its text if it was given as text."""

    token_ids: tuple[int, ...]
    text: str | None = None

    def text_of(self, tokenizer: Tokenizer) -> str:
        return tokenizer.decode(self.token_ids) if self.text is None else self.text


async def completion_prompts(
    prompt: str | list[str | int | list[int]], model: Model, add_special_tokens: bool, max_prompts: int
) -> list[Prompt]:
    """A text, token ids, or a list of either. Raises InvalidInputError."""
    items = _split(prompt)
    if len(items) > max_prompts:
        raise InvalidInputError(f"more than {max_prompts} prompts", param="prompt")
    return [await _prompt(item, model, add_special_tokens) for item in items]


async def chat_prompt(request: ChatCompletionRequest, model: Model) -> Prompt:
    """The rendered messages. The template writes special tokens itself, so none are added unless asked for."""
    text = render_chat(request.messages, model, request.add_generation_prompt, request.chat_template_kwargs)
    return await _prompt(text, model, bool(request.add_special_tokens))


def render_chat(
    messages: Sequence[ChatMessage],
    model: Model,
    add_generation_prompt: bool | None = None,
    arguments: dict[str, object] | None = None,
) -> str:
    """Raises InvalidInputError: no chat template, or one that refuses the messages."""
    template = model.tokenizer.chat_template
    if template is None:
        raise InvalidInputError(f"The model `{model.name}` has no chat template.", param="messages")
    return template.render(template_messages(messages), add_generation_prompt is not False, arguments)


async def tokenize(text: str, model: Model, add_special_tokens: bool) -> list[int]:
    """Raises PromptTooLongError for what cannot fit by far."""
    if len(text) <= INLINE_CHARS:
        return model.tokenizer.encode(text, add_special_tokens)
    if len(text) > MAX_CHARS_PER_TOKEN * model.max_model_len:
        raise PromptTooLongError(
            f"The prompt's {len(text)} characters cannot fit into a context of {model.max_model_len} tokens.",
            param="prompt",
            code="context_length_exceeded",
        )
    return await asyncio.to_thread(model.tokenizer.encode, text, add_special_tokens)


def _split(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    if len(kinds) != 1:
        what = "must not be empty" if not kinds else "must be all texts, all token ids or all lists of token ids"
        raise InvalidInputError(f"prompt {what}", param="prompt")
    return prompt  # type: ignore[return-value]


async def _prompt(item: str | list[int], model: Model, add_special_tokens: bool) -> Prompt:
    text = item if isinstance(item, str) else None
    token_ids = await tokenize(item, model, add_special_tokens) if isinstance(item, str) else item
    if not token_ids:
        raise InvalidInputError("the prompt is empty", param="prompt")
    if min(token_ids) < 0 or max(token_ids) >= model.vocab_size:
        raise InvalidInputError(f"token ids must be between 0 and {model.vocab_size - 1}", param="prompt")
    return Prompt(tuple(token_ids), text)
