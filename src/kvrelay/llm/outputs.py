"""The results: whole answers, and pieces of an answer as they are generated."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvrelay.core.logprobs import PositionLogprobs

PromptLogprobs = Sequence[PositionLogprobs | None]


class CompletionOutput(msgspec.Struct, frozen=True):
    """One answer. ``finish_reason`` is ``stop`` or ``length``; ``stop_reason`` is the stop string or stop token id that
    ended it. ``logprobs``: one per token, if requested."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None


class RequestOutput(msgspec.Struct, frozen=True):
    """All answers to one prompt. ``num_cached_tokens``: prompt tokens whose KV a prefix cache held. ``first_token_s``
    and ``duration_s`` are seconds since the prompt was submitted."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int
    first_token_s: float
    duration_s: float
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def text(self) -> str:
        """Of the first answer."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first answer."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Of the first answer."""
        return self.outputs[0].finish_reason


class TextDelta(msgspec.Struct, frozen=True):
    """A piece of answer number ``index``. The last piece of an answer carries ``finish_reason``."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None
