"""A request as the body of a completion, and the events of the answer as tokens. Pure.

The names are those of the OpenAI API and of vLLM's extensions to it, which SGLang and kvrelay also accept.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.logprobs import PositionLogprobs, TokenLogprob
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason
from kvrelay.engine.request import Request
from kvrelay.engines.hosted.backend import FINISH_REASONS, AnswerError, structured_values
from kvrelay.errors import InvalidInputError

TOKEN_ID = "token_id:"
"""With ``return_tokens_as_token_ids`` ``token_id:42`` replaces a token's text."""


def require_possible(sampling: SamplingParams) -> None:
    """Raise InvalidInputError for a request that this API cannot express."""
    if sampling.prompt_logprobs is not None:
        raise InvalidInputError("engine openai gives no prompt_logprobs", param="prompt_logprobs")


def completion_body(request: Request, model: str, num_tokens: int, *, with_token_ids: bool) -> dict[str, Any]:
    """The JSON body that asks for the next ``num_tokens`` tokens of ``request``, as a stream.

    Tokens generated before, here or by another worker, are part of the prompt. Settings at their defaults are left out,
    except for those that a server may fill from the model's own generation defaults.
    """
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(request.token_ids),
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_tokens": num_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": None if sampling.seed is None else sampling.seed & (2**63 - 1),
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "ignore_eos": sampling.ignore_eos or None,
        "min_tokens": max(sampling.min_tokens - request.num_output_tokens, 0) or None,
        "logit_bias": {str(token): bias for token, bias in (sampling.logit_bias or {}).items()} or None,
        "cache_salt": sampling.cache_salt,
        "priority": request.keyless_priority or None,
        "logprobs": sampling.logprobs,
        "return_tokens_as_token_ids": True if sampling.logprobs is not None else None,
        "return_token_ids": True if with_token_ids else None,
        "skip_special_tokens": False,
        "structured_outputs": None if sampling.grammar is None else structured_values(sampling.grammar),
    }
    return {name: value for name, value in body.items() if value is not None}


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None
    message: str | None = None


_decoder = msgspec.json.Decoder(_Event)


class TextPiece(msgspec.Struct, frozen=True):
    """The content of one event. ``token_ids`` is None if the server returns no ids: then there is only ``text``."""

    text: str
    token_ids: tuple[int, ...] | None
    logprobs: tuple[PositionLogprobs, ...] | None
    finish: FinishReason | None
    num_prompt_tokens: int | None
    num_cached_tokens: int | None


def parse_event(data: bytes | str) -> TextPiece:
    """Parse one event's JSON. Raises AnswerError for an error event and for data that is no completion."""
    try:
        event = _decoder.decode(data)
    except UNREADABLE as exc:
        raise AnswerError(f"the server's answer is no completion: {exc}") from exc
    if event.error is not None:
        said = event.error if isinstance(event.error, str) else event.error.message
        raise AnswerError("the server failed", detail=said[:500] or "no reason given")
    if len(event.choices) > 1:
        raise AnswerError(f"{len(event.choices)} choices came, one was asked for")
    choice = event.choices[0] if event.choices else _Choice(token_ids=[])
    details = event.usage.prompt_tokens_details if event.usage is not None else None
    return TextPiece(
        text=choice.text,
        token_ids=None if choice.token_ids is None else tuple(choice.token_ids),
        logprobs=None if choice.logprobs is None else _positions(choice.logprobs),
        finish=_finish(choice.finish_reason),
        num_prompt_tokens=event.usage.prompt_tokens if event.usage is not None else None,
        num_cached_tokens=details.cached_tokens if details is not None else None,
    )


def _finish(reason: str | None) -> FinishReason | None:
    if reason is None:
        return None
    if reason not in FINISH_REASONS:
        raise AnswerError("the server ended the answer with an unknown reason", detail=repr(reason[:100]))
    return FINISH_REASONS[reason]


def _positions(logprobs: _Logprobs) -> tuple[PositionLogprobs, ...]:
    """Raises AnswerError unless tokens are given by id and each has its logprob."""
    tops = logprobs.top_logprobs or [None] * len(logprobs.tokens)
    if not len(logprobs.tokens) == len(logprobs.token_logprobs) == len(tops):
        raise AnswerError("the server's logprobs do not fit each other")
    return tuple(
        _position(_token_id(token), logprob, top or {})
        for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, tops)
    )


def _position(token_id: int, logprob: float | None, top: dict[str, float | None]) -> PositionLogprobs:
    """The API has no ranks: the chosen token's rank follows from its place among the alternatives."""
    if logprob is None:
        raise AnswerError("a token of the answer has no logprob")
    known = {_token_id(token): value for token, value in top.items() if value is not None}
    best = sorted(known.items(), key=lambda item: (-item[1], item[0]))
    alternatives = tuple(TokenLogprob(token, value, rank) for rank, (token, value) in enumerate(best, start=1))
    rank = 1 + sum(value > logprob for value in known.values())
    return PositionLogprobs(TokenLogprob(token_id, logprob, rank), alternatives)


def _token_id(token: str) -> int:
    number = token.removeprefix(TOKEN_ID)
    if number == token or not number.isdecimal() or len(number) > 10:
        raise AnswerError("the server's logprobs name a token by its text, not its id", detail=repr(token[:50]))
    return int(number)
