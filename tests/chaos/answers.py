"""Prompts whose answers are known, and the verdict on an answer. Pure: no sockets, no clock.

A mock engine's answers are computed. A real engine's known answers are those that it repeated without faults.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

NUM_SHARED_PREFIXES = 3
FIRST_PLAIN_TOKEN = 16
"""Lower ids are special tokens of the checkpoints that kvrelay makes."""


class Verdict(enum.StrEnum):
    """The outcome of a request."""

    RIGHT = "right"
    WRONG = "wrong"
    MISSING = "missing"
    REPEATED = "repeated"
    FAILED = "failed"
    HUNG = "hung"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """A prompt as token ids, its sampling, and the tokens that the answer must have (empty: not known yet). ``hints``:
    what the client says of its session (``kv_hints``); ``api_key``: instead of the client's."""

    token_ids: tuple[int, ...]
    max_tokens: int
    stream: bool
    temperature: float = 0.0
    seed: int | None = None
    answer: tuple[int, ...] = ()
    hints: Mapping[str, object] | None = None
    api_key: str | None = None


def make_prompts(count: int, seed: int, *, vocab_size: int, max_len: int, with_sampling: bool) -> list[KnownPrompt]:
    """A mix: short and long, with shared prefixes and without, streamed (four of five) and not.

    With ``with_sampling`` every fourth prompt is sampled with a seed instead of greedily.
    """
    rng = random.Random(seed)
    prefixes = [_tokens(rng, max_len // 2, vocab_size) for _ in range(NUM_SHARED_PREFIXES)]
    prompts = []
    for number in range(count):
        length = rng.choice((8, 40, 90, 150, max_len // 2, max_len))
        prefix = rng.choice(prefixes)[: length // 2] if number % 3 == 0 else ()
        sampled = with_sampling and number % 4 == 3
        prompts.append(
            KnownPrompt(
                token_ids=prefix + _tokens(rng, length - len(prefix), vocab_size),
                max_tokens=rng.choice((1, 8, 40, 80, 120)),
                stream=number % 5 != 4,
                temperature=0.8 if sampled else 0.0,
                seed=number if sampled else None,
            )
        )
    return prompts


def fresh_prompt(rng: random.Random, prompts: Sequence[KnownPrompt], *, vocab_size: int) -> KnownPrompt:
    """One of ``prompts`` with a new second half: half a prefix hit, half to be computed. Its answer is not known
    yet."""
    like = rng.choice(prompts)
    half = len(like.token_ids) // 2
    tokens = like.token_ids[:half] + _tokens(rng, len(like.token_ids) - half, vocab_size)
    return replace(like, token_ids=tokens, answer=())


def _tokens(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_PLAIN_TOKEN, vocab_size) for _ in range(count))


def judge(expected: Sequence[int], got: Sequence[int]) -> Verdict:
    """RIGHT, or how the tokens differ: some are missing, some are repeated, or they are wrong."""
    if list(expected) == list(got):
        return Verdict.RIGHT
    if len(got) < len(expected) and _is_subsequence(got, expected):
        return Verdict.MISSING
    if len(got) > len(expected) and _is_subsequence(expected, got):
        return Verdict.REPEATED
    return Verdict.WRONG


def _is_subsequence(short: Sequence[int], long: Sequence[int]) -> bool:
    rest = iter(long)
    return all(token in rest for token in short)


def keep_stable(prompts: Sequence[KnownPrompt], runs: Sequence[Sequence[Sequence[int]]]) -> list[KnownPrompt]:
    """The prompts that got the same answer in every run, with that answer. ``runs[r][p]`` is the answer of run r to
    prompt p."""
    return [
        replace(prompt, answer=tuple(answers[0]))
        for prompt, answers in zip(prompts, zip(*runs, strict=True), strict=True)
        if answers[0] and all(list(answer) == list(answers[0]) for answer in answers[1:])
    ]
