"""Key-value recall: facts given early in a text are asked for later, so a damaged KV cache shows as a wrong answer.

Owns the wording of facts and questions that the bundled checkpoint was trained on, and prompts for tests and benchmarks
made of it. Knows nothing of tokens; a fact is 8 tokens of the bundled tokenizer, a filler sentence roughly 6 to 14.
"""

from __future__ import annotations

from random import Random

import msgspec

from kvrelay.data.prose import NAMES, sentence

VALUE_WORDS = (
    "acorn", "amber", "anchor", "arrow", "bear", "bell", "candle", "castle", "cloud", "coral", "crow", "deer", "eagle",
    "falcon", "fern", "flame", "fox", "frog", "goat", "hill", "iron", "ivory", "jade", "kite", "lake", "leaf", "lion",
    "maple", "moon", "moss", "oak", "otter", "owl", "pearl", "pine", "rain", "rose", "sand", "seal", "silver", "snow",
    "star", "stone", "storm", "swan", "tiger", "wolf", "wren",
)  # fmt: skip
VALUE_NUMBERS = range(10, 100)


class RecallPrompt(msgspec.Struct, frozen=True):
    """A prompt, the name it asks for, and that name's value with a space before it.

    The bundled checkpoint's greedy continuation of a completion prompt starts with ``answer``; its reply to a chat
    prompt contains it.
    """

    prompt: str
    name: str
    answer: str


def value(rng: Random) -> str:
    """A value, such as ``tiger 47``: one of 4,320."""
    return f"{rng.choice(VALUE_WORDS)} {rng.choice(VALUE_NUMBERS)}"


def cue(name: str) -> str:
    """The words that a value follows, with a space, in a fact as well as in an answer."""
    return f"The code of {name} is"


def fact(name: str, code: str) -> str:
    """The sentence that binds ``name`` to ``code``."""
    return f"{cue(name)} {code}."


def question(name: str) -> str:
    """The question that ``fact`` answers."""
    return f"What is the code of {name}?"


def facts_text(rng: Random, codes: dict[str, str], num_fillers: int) -> str:
    """The facts of ``codes`` in their order, with ``num_fillers`` sentences of prose strewn between them."""
    parts = [fact(name, code) for name, code in codes.items()]
    for _ in range(num_fillers):
        parts.insert(rng.randint(0, len(parts)), sentence(rng))
    return " ".join(parts)


def draw_codes(rng: Random, num_pairs: int) -> dict[str, str]:
    """``num_pairs`` names, each with a value of its own. Raises ValueError for more than ``len(NAMES)`` pairs."""
    return {name: value(rng) for name in rng.sample(NAMES, num_pairs)}


def recall_prompt(rng: Random, num_pairs: int, num_fillers: int = 0, *, ask: int | None = None) -> RecallPrompt:
    """A completion prompt: facts and filler sentences, then the cue of one fact.

    ``ask`` is the number of the pair asked for, counted from 0 in the order of the text; drawn if None.
    """
    asked = recall_chat(rng, num_pairs, num_fillers, ask=ask)
    return msgspec.structs.replace(asked, prompt=f"{asked.prompt} {cue(asked.name)}")


def recall_chat(rng: Random, num_pairs: int, num_fillers: int = 0, *, ask: int | None = None) -> RecallPrompt:
    """The content of a user message: facts, filler sentences and one question. ``ask`` as in ``recall_prompt``."""
    codes = draw_codes(rng, num_pairs)
    text = facts_text(rng, codes, num_fillers)
    name = list(codes)[rng.randrange(num_pairs) if ask is None else ask]
    return RecallPrompt(f"{text} {question(name)}", name, f" {codes[name]}")
