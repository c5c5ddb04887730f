"""Generated data sets of token ids: random prompts, and groups of prompts with a shared prefix.

They need no tokenizer: ids are drawn from a range that every vocabulary has. The streams are endless; the load class
decides how many requests are taken. Equal seeds give equal streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvrelay.bench.load.lengths import Length
from kvrelay.bench.load.request import LoadRequest
from kvrelay.errors import InvalidInputError

FIRST_ORDINARY_TOKEN = 32
DEFAULT_VOCAB_SIZE = 512


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Ids ``first`` to ``stop - 1``: below ``first`` lie special tokens in most vocabularies."""

    first: int = FIRST_ORDINARY_TOKEN
    stop: int = DEFAULT_VOCAB_SIZE

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.stop:
            raise InvalidInputError(f"vocabulary size {self.stop} leaves no ordinary token above {self.first}")

    def draw(self, rng: np.random.Generator, count: int) -> tuple[int, ...]:
        return tuple(rng.integers(self.first, self.stop, count).tolist())


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """``groups`` system prompts, ``per_group`` questions to each; all lengths in tokens."""

    groups: int
    per_group: int
    system: Length
    question: Length
    output: Length

    def __post_init__(self) -> None:
        if self.groups < 1 or self.per_group < 1:
            raise InvalidInputError("shared prefixes need at least one group and one prompt per group")


def random_requests(
    rng: np.random.Generator, prompt: Length, output: Length, tokens: TokenRange
) -> Iterator[LoadRequest]:
    """Prompts of independent random tokens, without end."""
    while True:
        count = prompt.sample(rng)
        yield LoadRequest(tokens.draw(rng, count), output.sample(rng), prompt_len=count)


def shared_prefix_requests(rng: np.random.Generator, spec: SharedPrefix, tokens: TokenRange) -> Iterator[LoadRequest]:
    """``groups * per_group`` prompts, system prompt then question, in shuffled order; finite."""
    systems = [tokens.draw(rng, spec.system.sample(rng)) for _ in range(spec.groups)]
    order = np.repeat(np.arange(spec.groups), spec.per_group)
    rng.shuffle(order)
    for group in order.tolist():
        prompt = systems[group] + tokens.draw(rng, spec.question.sample(rng))
        yield LoadRequest(prompt, spec.output.sample(rng), prompt_len=len(prompt))
