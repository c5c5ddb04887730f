"""How the next token is chosen. A value: it travels with the request to whichever worker samples."""

from __future__ import annotations

import msgspec

from kvrelay.core.grammar import Grammar
from kvrelay.errors import InvalidInputError

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_SALT_CHARS = 1024


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling settings of one sequence, in OpenAI's and vLLM's terms.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 switch the filter off. With a ``seed``
    the random number for output token i is a function of (seed, i) alone, so the same seed gives the same tokens
    whatever else is in the batch and wherever the request is continued; without one the engine draws a seed at
    arrival. Stop *strings* need text and are matched by the frontend; stop token ids are matched by the engine.
    ``logprobs`` is the number of alternatives per output token (None: no logprobs, 0: only the chosen token's).
    ``cache_salt`` travels here to every worker: only requests with the same one share cached prefixes. So does
    ``adapter``, the id of the adapter (LoRA) that computes this sequence (``core/adapters.py``; empty: the worker's
    model as it is).
    ``grammar`` is what the answer must match; the end of sequence follows it, whatever ``min_tokens`` says.
    ``is_prefetch``, with no ``max_tokens``: what is stored of the prompt's KV comes into the pool, and that is all.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    cache_salt: str | None = None
    adapter: str = ""
    is_prefetch: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def must_prefill_locally(self) -> bool:
        """Whether the worker that decodes must prefill as well, if nothing is generated yet: the prompt is scored
        where it is computed."""
        return self.max_tokens == 0 or self.prompt_logprobs is not None

    @property
    def needs_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise InvalidInputError, naming the parameter, if a value is out of its range."""
        _in_range("max_tokens", self.max_tokens, 0, 0 if self.is_prefetch else 2**31 - 1)
        _in_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_k", self.top_k, -1, 2**31 - 1)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, 1e-6, 100.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.top_p == 0.0:
            raise InvalidInputError("top_p must be greater than 0", param="top_p")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _in_range(name, count, 0, MAX_LOGPROBS)
        if self.seed is not None:
            _in_range("seed", self.seed, -(2**63), 2**64 - 1)
        if self.cache_salt is not None and not 1 <= len(self.cache_salt) <= MAX_SALT_CHARS:
            raise InvalidInputError(f"cache_salt has 1 to {MAX_SALT_CHARS} characters", param="cache_salt")
        self.validate_tokens(vocab_size)
        self._validate_grammar()

    def _validate_grammar(self) -> None:
        if self.grammar is None:
            return
        self.grammar.check()
        if self.ignore_eos:
            message = "ignore_eos is not possible with a grammar: the end of sequence ends the answer"
            raise InvalidInputError(message, param="ignore_eos")

    def validate_tokens(self, vocab_size: int | None) -> None:
        """Raise InvalidInputError unless every named token id is below ``vocab_size`` (None: 2**31)."""
        limit = vocab_size if vocab_size is not None else 2**31
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            message = f"stop_token_ids has more than {MAX_STOP_TOKEN_IDS} entries"
            raise InvalidInputError(message, param="stop_token_ids")
        for token in self.stop_token_ids:
            _in_range("stop_token_ids", token, 0, limit - 1)
        if self.logit_bias is not None:
            if len(self.logit_bias) > MAX_LOGIT_BIAS:
                raise InvalidInputError(f"logit_bias has more than {MAX_LOGIT_BIAS} entries", param="logit_bias")
            for token, bias in self.logit_bias.items():
                _in_range("logit_bias", token, 0, limit - 1)
                _in_range("logit_bias", bias, -100.0, 100.0)


def _in_range(name: str, value: float, low: float, high: float) -> None:
    # The bounds are finite: infinity and NaN are outside.
    if not (low <= value <= high):
        try:
            shown = f"{value:.15g}"
        except OverflowError:
            shown = "a number far out of range"
        raise InvalidInputError(f"{name} must be between {low:.15g} and {high:.15g}, got {shown}", param=name)
