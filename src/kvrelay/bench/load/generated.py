"""Generated data sets: random prompts, and groups of prompts with a shared prefix, as token ids or as readable text.

Ids are drawn from a range that every vocabulary has, so they need no tokenizer. Readable text is for debugging a run:
plain sentences from small word lists, with lengths by the given counter. Equal seeds give equal streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvrelay.bench.formats import ChatTurn
from kvrelay.bench.load.request import Length, LoadRequest
from kvrelay.bench.load.tokens import TokenCounter
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


_TRADES = (
    "a librarian",
    "a ship's engineer",
    "a gardener",
    "a night nurse",
    "a bookkeeper",
    "a tram driver",
    "a baker",
)
_PLACES = ("the harbour office", "a mountain village", "the city archive", "a small theatre", "the weather station")
_MANNERS = ("briefly", "with an example", "in plain words", "step by step", "in at most three sentences", "politely")
_THINGS = ("the timetable", "the north gate", "the water pump", "the visitors' book", "the spare keys", "the old map")
_RULES = (
    "Answer {manner}.",
    "Never guess about {thing}; say that you do not know.",
    "When someone asks about {thing}, answer {manner}.",
    "People from {place} may ask about {thing}.",
    "Mention {place} only if you are asked.",
    "If a question is not clear, ask for {thing} first.",
)
_QUESTIONS = (
    "Where do I find {thing} in {place}?",
    "Who looks after {thing} when {trade} is away?",
    "Can you explain {thing} {manner}?",
    "What should {trade} know about {place}?",
    "Why was {thing} moved to {place}?",
    "How long does it take from {place} to {thing}?",
)


def readable_prefix_requests(
    rng: np.random.Generator, spec: SharedPrefix, counter: TokenCounter
) -> Iterator[LoadRequest]:
    """``groups * per_group`` conversations of a system prompt and a question, in shuffled order; finite."""
    systems = [_system_prompt(rng, group, spec.system.sample(rng), counter) for group in range(spec.groups)]
    order = np.repeat(np.arange(spec.groups), spec.per_group)
    rng.shuffle(order)
    for number, group in enumerate(order.tolist()):
        question = _grow(f"Question {number + 1}.", lambda: _fill(rng, _QUESTIONS), spec.question.sample(rng), counter)
        text = f"{systems[group]}\n\n{question}"
        yield LoadRequest(
            text,
            spec.output.sample(rng),
            prompt_len=counter.count(text),
            messages=(ChatTurn("system", systems[group]), ChatTurn("user", question)),
        )


def _system_prompt(rng: np.random.Generator, group: int, length: int, counter: TokenCounter) -> str:
    opening = f"You are assistant {group + 1}, {_pick(rng, _TRADES)} at {_pick(rng, _PLACES)}."
    return _grow(opening, lambda: _fill(rng, _RULES), length, counter)


def _grow(text: str, sentence: Callable[[], str], length: int, counter: TokenCounter) -> str:
    """Add sentences until ``length`` tokens are reached, then drop words from the end until it is not passed."""
    missing = length - counter.count(text)
    pieces = [text]
    while missing > 0:
        pieces.append(sentence())
        missing -= counter.count(" " + pieces[-1])
    words = " ".join(pieces).split(" ")
    # Adding up sentences miscounts where tokens span a border, so the end is found on the text itself.
    low, high = 1, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        if counter.count(" ".join(words[:middle])) <= length:
            low = middle
        else:
            high = middle - 1
    return " ".join(words[:low])


def _fill(rng: np.random.Generator, templates: tuple[str, ...]) -> str:
    return _pick(rng, templates).format(
        trade=_pick(rng, _TRADES), place=_pick(rng, _PLACES), manner=_pick(rng, _MANNERS), thing=_pick(rng, _THINGS)
    )


def _pick(rng: np.random.Generator, choices: tuple[str, ...]) -> str:
    return choices[int(rng.integers(len(choices)))]
