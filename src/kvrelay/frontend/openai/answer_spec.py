"""Turns a request's fields into the spec of its answer: checked, with defaults filled in. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from kvrelay.config import KeyLimits
from kvrelay.core.sampling import MAX_LOGPROBS, SamplingParams
from kvrelay.errors import InvalidInputError, PayloadTooLargeError, PromptTooLongError
from kvrelay.frontend.openai.bounds import MAX_STOP_CHARS
from kvrelay.frontend.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    KvHints,
    has_short_fields,
)
from kvrelay.frontend.openai.structured import Constraint, constraint_of
from kvrelay.frontend.tokens.tokenizer import DefaultSampling

TIMEOUT_HEADER = "x-request-timeout-s"
SLO_TTFT_HEADER = "x-kvrelay-slo-ttft-ms"
SLO_ITL_HEADER = "x-kvrelay-slo-itl-ms"
MIN_OBJECTIVE_MS, MAX_OBJECTIVE_MS = 1e-3, 1e7
DECISION_HEADER = "x-kvrelay-decision"
DEFAULT_MAX_TOKENS = 16
MAX_PRIORITY = 2**31
MAX_RETAIN_S = 86400.0
LOGPROBS_BASE = 8
"""A token's logprobs cost as much as this number of alternatives, plus its alternatives."""
MAX_PROMPT_LOGPROBS = 2**18
"""Limit per prompt; half of it in a stream. They arrive in one piece, which takes the event loop 70 ms. In a stream
they are also sent in one piece."""
MAX_REQUEST_LOGPROBS = 2**21

_V = TypeVar("_V")


class AnswerSpec(msgspec.Struct, frozen=True):
    """What every sequence of a request has in common. ``max_tokens`` None: as much as the context allows.

    ``sampling`` is complete except for max_tokens, which ``sampling_of`` fills in, and the seed of each choice.
    """

    sampling: SamplingParams
    max_tokens: int | None
    is_max_default: bool
    n: int = 1
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    shown_tokens: tuple[str, ...] = ()
    """Special tokens that are not skipped, because parsers look for them in the text."""
    add_special_tokens: bool = True
    return_token_ids: bool = False
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    priority: int = 0
    timeout_s: float | None = None
    keep_last: int | None = None
    """Keep only this many last tokens of each prompt; -1: as many as the context holds."""
    grammar_param: str | None = None
    """The field that asked for the sampling's grammar, for errors: a worker that refuses it knows only the grammar."""
    detokenize: bool = True
    """False: the caller needs only token ids."""
    tenant: str = ""
    """The name of the API key that asks: keys share a worker fairly."""
    slo_ttft_ms: float = 0.0
    slo_itl_ms: float = 0.0
    """The request's own objectives; 0: the worker's."""
    kv_hints: KvHints | None = None
    explain: bool = False
    """The answer's headers say where the prefill ran, and why."""

    def check(self, vocab_size: int) -> None:
        """Once per request: raise InvalidInputError for tokens that the model does not have."""
        self.sampling.validate_tokens(vocab_size)

    def check_prompts(self, prompt_lengths: Sequence[int]) -> None:
        """Raise InvalidInputError if the prompts' logprobs would be too many to send."""
        count = self.sampling.prompt_logprobs
        if count is None:
            return
        per_token = count + LOGPROBS_BASE
        of_one = MAX_PROMPT_LOGPROBS // (2 if self.stream else 1) // per_token
        of_all = MAX_REQUEST_LOGPROBS // per_token
        if max(prompt_lengths) > of_one or sum(prompt_lengths) * self.n > of_all:
            raise InvalidInputError(
                f"logprobs of a prompt with {count} alternatives are given for up to {of_one} tokens, and for {of_all} "
                "over all choices; ask for fewer alternatives, or in several requests",
                param="prompt_logprobs",
            )

    def sampling_of(self, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
        """The sampling of all choices of one prompt. Raises PromptTooLongError, InvalidInputError."""
        room = max_model_len - num_prompt_tokens
        wanted = room if self.max_tokens is None else self.max_tokens
        if self.is_max_default:
            wanted = min(wanted, room)
        if wanted > room or room < 0 or (room == 0 and self.max_tokens != 0):
            asked = f" and {wanted} for the answer" if wanted > room and wanted > 0 else ""
            raise PromptTooLongError(
                f"This model's maximum context length is {max_model_len} tokens, but the request has "
                f"{num_prompt_tokens} in the prompt{asked}.",
                lengths=(num_prompt_tokens, wanted, max_model_len) if room > 0 else None,
            )
        if self.sampling.min_tokens > wanted:
            raise InvalidInputError(
                f"min_tokens must be between 0 and {wanted}, got {self.sampling.min_tokens}", param="min_tokens"
            )
        return msgspec.structs.replace(self.sampling, max_tokens=wanted)

    def asked_by(self, tenant: str, headers: Mapping[str, str]) -> AnswerSpec:
        """The spec with the key's name, and what the request's headers ask for. Raises InvalidInputError."""
        ttft_ms, itl_ms = _milliseconds(headers, SLO_TTFT_HEADER), _milliseconds(headers, SLO_ITL_HEADER)
        explain = headers.get(DECISION_HEADER, "") not in ("", "0")
        if not (tenant or ttft_ms or itl_ms or explain):
            return self
        return msgspec.structs.replace(self, tenant=tenant, slo_ttft_ms=ttft_ms, slo_itl_ms=itl_ms, explain=explain)

    def within(self, limits: KeyLimits, prompt_lengths: Sequence[int]) -> AnswerSpec:
        """The spec for prompts of these lengths in tokens, if the key's limits allow it. Raises
        PayloadTooLargeError, and InvalidInputError for a priority that the key may not ask for.

        If the request gives no length, the answer is cut to the limit.
        """
        low, high = limits.min_priority, limits.max_priority
        if (low is not None and self.priority < low) or (high is not None and self.priority > high):
            raise InvalidInputError(
                f"this API key allows priorities {'up' if low is None else f'from {low}'} "
                f"{'' if high is None else f'to {high} '}(min_priority, max_priority)",
                param="priority",
            )
        num_prompt_tokens, num_choices = sum(prompt_lengths), self.n * len(prompt_lengths)
        if limits.max_prompt_tokens is not None and num_prompt_tokens > limits.max_prompt_tokens:
            raise PayloadTooLargeError(
                f"the request has {num_prompt_tokens} prompt tokens, "
                f"above the {limits.max_prompt_tokens} that this API key allows (max_prompt_tokens)",
                param="prompt",
            )
        if limits.max_output_tokens is None:
            return self
        share = limits.max_output_tokens // num_choices
        if share < (1 if self.is_max_default else self.max_tokens or 0):
            raise PayloadTooLargeError(
                f"{num_choices} choices of this length are "
                f"above the {limits.max_output_tokens} tokens that this API key allows (max_output_tokens)",
                param="max_tokens",
            )
        if not self.is_max_default:
            return self
        return msgspec.structs.replace(
            self, max_tokens=share if self.max_tokens is None else min(self.max_tokens, share)
        )


def _milliseconds(headers: Mapping[str, str], name: str) -> float:
    """0 if there is no such header. Raises InvalidInputError."""
    text = headers.get(name)
    if text is None:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not MIN_OBJECTIVE_MS <= value <= MAX_OBJECTIVE_MS:
        raise InvalidInputError(
            f"{name} must be milliseconds, {MIN_OBJECTIVE_MS:g} to {MAX_OBJECTIVE_MS:g}", param=name
        )
    return value


def choice_sampling(sampling: SamplingParams, index: int) -> SamplingParams:
    """Each choice of a prompt has its own seed, as in vLLM: the seed plus its index."""
    if sampling.seed is None or index == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index) % 2**63)


MAX_REMEMBERED = 256
"""Specs of requests with short fields. Most clients send the same fields with every prompt."""


def completion_spec(request: CompletionRequest, defaults: DefaultSampling, max_n: int) -> AnswerSpec:
    """Raises InvalidInputError."""
    if has_short_fields(request):
        return _remembered_completion(msgspec.structs.replace(request, prompt=""), defaults, max_n)
    return _completion_spec(request, defaults, max_n)


def _completion_spec(request: CompletionRequest, defaults: DefaultSampling, max_n: int) -> AnswerSpec:
    is_echo = bool(request.echo)
    prompt_logprobs = request.prompt_logprobs
    if is_echo and prompt_logprobs is None:
        prompt_logprobs = request.logprobs
    constraint = constraint_of(request)
    sampling = _sampling(request, defaults, request.logprobs, prompt_logprobs, constraint)
    return _spec(request, sampling, request.max_tokens, max_n, constraint, DEFAULT_MAX_TOKENS, echo=is_echo)


def chat_spec(
    request: ChatCompletionRequest, defaults: DefaultSampling, max_n: int, constraint: Constraint | None
) -> AnswerSpec:
    """``constraint`` is the required form of the answer. Raises InvalidInputError."""
    if constraint is None and has_short_fields(request):
        return _remembered_chat(msgspec.structs.replace(request, messages=()), defaults, max_n, None)
    return _chat_spec(request, defaults, max_n, constraint)


def _chat_spec(
    request: ChatCompletionRequest, defaults: DefaultSampling, max_n: int, constraint: Constraint | None
) -> AnswerSpec:
    _refuse_contradictions(request)
    logprobs = _or(request.top_logprobs, 0) if request.logprobs else None
    if request.top_logprobs and not request.logprobs:
        raise InvalidInputError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        raise InvalidInputError(f"top_logprobs must be between 0 and {MAX_LOGPROBS}", param="top_logprobs")
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    sampling = _sampling(request, defaults, logprobs, request.prompt_logprobs, constraint)
    return _spec(request, sampling, max_tokens, max_n, constraint)


_remembered_completion = lru_cache(MAX_REMEMBERED)(_completion_spec)
_remembered_chat = lru_cache(MAX_REMEMBERED)(_chat_spec)


def _spec(
    request: GenerationFields,
    sampling: SamplingParams,
    given_max: int | None,
    max_n: int,
    constraint: Constraint | None,
    default_max: int | None = None,
    *,
    echo: bool = False,
) -> AnswerSpec:
    hints = _kv_hints(request.kv_hints)
    if hints is not None and hints.prefetch:
        if echo or sampling.prompt_logprobs is not None:
            raise InvalidInputError("kv_hints.prefetch gives no answer: no echo, no prompt_logprobs", param="kv_hints")
        given_max, sampling = 0, msgspec.structs.replace(sampling, is_prefetch=True, min_tokens=0, grammar=None)
    max_tokens = default_max if given_max is None else given_max
    n = _or(request.n, 1)
    if not 1 <= n <= max_n:
        raise InvalidInputError(f"n must be between 1 and {max_n}", param="n")
    if request.best_of is not None and request.best_of != n:
        raise InvalidInputError("best_of is not supported unless it equals n", param="best_of")
    if max_tokens is not None and not 0 <= max_tokens < 2**31:
        raise InvalidInputError("max_tokens must be at least 0 and below 2**31", param="max_tokens")
    if max_tokens == 0 and not (echo or sampling.is_prefetch) and sampling.prompt_logprobs is None:
        raise InvalidInputError("max_tokens must be at least 1", param="max_tokens")
    options = request.stream_options
    if options is not None and not request.stream:
        raise InvalidInputError("stream_options is only allowed with stream", param="stream_options")
    return AnswerSpec(
        sampling=sampling,
        max_tokens=max_tokens,
        is_max_default=given_max is None,
        n=n,
        stops=_stops(request.stop),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=_or(request.skip_special_tokens, True),
        add_special_tokens=_or(request.add_special_tokens, True),
        return_token_ids=bool(request.return_token_ids),
        echo=echo,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        priority=_priority(request.priority),
        timeout_s=check_timeout(request.timeout),
        keep_last=_keep_last(request),
        kv_hints=hints,
        grammar_param=constraint.param if constraint is not None else None,
    )


def check_timeout(timeout_s: float | None) -> float | None:
    """Check a client's deadline. Raises InvalidInputError."""
    if timeout_s is not None and not (0 < timeout_s < math.inf):
        raise InvalidInputError("timeout must be a positive number of seconds", param="timeout")
    return timeout_s


_CONVERTED = {"max_tokens", "logit_bias", "stop_token_ids", "ignore_eos", "prompt_logprobs"}
_SAMPLED = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in GenerationFields.__struct_fields__ and name not in _CONVERTED
)
"""Fields of a request that are its sampling's, as they are."""


def _sampling(
    request: GenerationFields,
    defaults: DefaultSampling,
    logprobs: int | None,
    prompt_logprobs: int | None,
    constraint: Constraint | None,
) -> SamplingParams:
    given: dict[str, Any] = {name: value for name in _SAMPLED if (value := getattr(request, name)) is not None}
    sampling = SamplingParams(
        **{**defaults.given, **given},
        max_tokens=2**31 - 1,
        logit_bias=request.logit_bias or None,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=constraint.grammar if constraint is not None else None,
    )
    sampling.validate()
    return sampling


def _refuse_contradictions(request: ChatCompletionRequest) -> None:
    if request.continue_final_message and request.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise InvalidInputError(message, param="continue_final_message")
    if request.echo and request.tools:
        raise InvalidInputError("echo and tools exclude each other", param="echo")


def _keep_last(request: GenerationFields) -> int | None:
    value = request.truncate_prompt_tokens
    if value is not None and value != -1 and not 1 <= value < 2**31:
        message = "truncate_prompt_tokens must be at least 1, or -1 for as many as the context holds"
        raise InvalidInputError(message, param="truncate_prompt_tokens")
    if value is not None and getattr(request, "echo", False):
        raise InvalidInputError("echo repeats the whole prompt, not a truncated one", param="truncate_prompt_tokens")
    return value


def _kv_hints(hints: KvHints | None) -> KvHints | None:
    if hints is not None and hints.retain_s is not None and not 0 < hints.retain_s <= MAX_RETAIN_S:
        message = f"kv_hints.retain_s must be above 0 and at most {MAX_RETAIN_S:g} seconds"
        raise InvalidInputError(message, param="kv_hints")
    return hints


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if sum(map(len, stops)) > MAX_STOP_CHARS:
        raise InvalidInputError(f"stop is above {MAX_STOP_CHARS} characters in all", param="stop")
    if "" in stops:
        raise InvalidInputError("stop strings must not be empty", param="stop")
    return stops


def _priority(priority: int | None) -> int:
    value = _or(priority, 0)
    if abs(value) >= MAX_PRIORITY:
        raise InvalidInputError(
            f"priority must be between {-MAX_PRIORITY + 1} and {MAX_PRIORITY - 1}", param="priority"
        )
    return value


def _or(value: _V | None, default: _V) -> _V:
    return default if value is None else value
