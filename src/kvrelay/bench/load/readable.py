"""Readable prompts: composed system prompts shared by groups of composed questions, to asked lengths.

The text is meant to be read by people who debug a run, and to be served by models that never saw it: plain sentences
from small word lists. Lengths are in tokens as the given counter counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvrelay.bench.load.generated import SharedPrefix
from kvrelay.bench.load.request import ChatMessage, LoadRequest
from kvrelay.bench.load.tokens import TokenCounter

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
            messages=(ChatMessage("system", systems[group]), ChatMessage("user", question)),
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
