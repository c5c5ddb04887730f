"""Log-probabilities in the shapes of the two endpoints, and vLLM's of prompts. Pure, given a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kvrelay.core.logprobs import PositionLogprobs, TokenLogprob
from kvrelay.frontend.tokens.detokenizer import Detokenizer

MIN_LOGPROB = -9999.0
"""JSON has no infinity; OpenAI's API returns this value for impossible tokens."""


class TokenTexts(Protocol):
    """The part of a tokenizer that is needed here."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class CompletionLogprobs(msgspec.Struct, frozen=True):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatPositionLogprobs(ChatTokenLogprob, frozen=True):
    top_logprobs: list[ChatTokenLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatPositionLogprobs]


class PromptTokenLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


class TokenIdTexts:
    """Implements ``TokenTexts``: each token is named by its id, for ``return_tokens_as_token_ids``."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    def token_bytes(self, token_id: int) -> bytes:
        return self._texts.token_bytes(token_id)


class TextOffsets:
    """The offsets of one choice's tokens in its growing text. A character of several tokens begins at the first of
    them; a token without text begins where the next token begins."""

    def __init__(self, detokenizer: Detokenizer, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._offset = start

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """The offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push((token_id,)))
        return offsets


def prompt_offsets(
    token_ids: Sequence[int], text: str, make_detokenizer: Callable[[bool, Sequence[int]], Detokenizer]
) -> list[int]:
    """The offsets of an echoed prompt's tokens in ``text``, which may omit special tokens; never after its end."""
    offsets: list[int] = []
    for is_special_skipped in (True, False):
        counted = TextOffsets(make_detokenizer(is_special_skipped, ())).of((*token_ids, token_ids[-1]))
        offsets = [min(offset, len(text)) for offset in counted[:-1]]
        if counted[-1] == len(text):
            break
    return offsets


def completion_logprobs(
    positions: Sequence[PositionLogprobs | None], token_ids: Sequence[int], texts: TokenTexts, offsets: Sequence[int]
) -> CompletionLogprobs:
    """Shape of ``/v1/completions``. A position without logprobs (the first of an echoed prompt) has null."""
    result = CompletionLogprobs([], [], [], [])
    for position, token, offset in zip(positions, token_ids, offsets):
        result.text_offset.append(offset)
        result.tokens.append(texts.token_text(token))
        result.token_logprobs.append(None if position is None else _number(position.chosen))
        result.top_logprobs.append(None if position is None else _alternatives(position, texts))
    return result


def chat_logprobs(positions: Sequence[PositionLogprobs], texts: TokenTexts) -> ChatLogprobs:
    """Shape of ``/v1/chat/completions``."""
    shown: list[ChatPositionLogprobs] = []
    for position in positions:
        chosen, *top = [
            ChatTokenLogprob(texts.token_text(entry.token_id), _number(entry), list(texts.token_bytes(entry.token_id)))
            for entry in (position.chosen, *position.top)
        ]
        shown.append(ChatPositionLogprobs(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(shown)


def prompt_logprobs_json(
    positions: Sequence[PositionLogprobs | None], texts: TokenTexts
) -> list[dict[str, PromptTokenLogprob] | None]:
    """vLLM's ``prompt_logprobs``: per prompt token a map from token id, the first is null."""
    return [None if position is None else _by_token_id(position, texts) for position in positions]


def _by_token_id(position: PositionLogprobs, texts: TokenTexts) -> dict[str, PromptTokenLogprob]:
    return {
        str(entry.token_id): PromptTokenLogprob(_number(entry), entry.rank, texts.token_text(entry.token_id))
        for entry in (position.chosen, *position.top)
    }


def _alternatives(position: PositionLogprobs, texts: TokenTexts) -> dict[str, float]:
    """The likeliest tokens and the chosen one. Of tokens with equal text the likeliest counts."""
    found: dict[str, float] = {}
    for entry in (*position.top, position.chosen):
        found.setdefault(texts.token_text(entry.token_id), _number(entry))
    return found


def _number(entry: TokenLogprob) -> float:
    return max(entry.logprob, MIN_LOGPROB)
