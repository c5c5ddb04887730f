"""The training text of the bundled checkpoint, as token ids with a loss weight each.

Owns the mixture (stories, recall, chat) and which tokens count: a value stated for the first time is noise (weight
``NOISE``, enough to learn what a value looks like), a value asked for is what matters (weight ``ANSWER``).
Knows nothing of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import numpy as np
from tokenizers import Tokenizer

from kvrelay.data.prose import JOBS, NAMES, sentence, story
from kvrelay.data.recall import cue, fact, question, value
from kvrelay.executors.torch.checkpoints.tokenizer import BOS, EOS, SPECIAL_TOKENS

PLAIN, NOISE, ANSWER = 1.0, 0.05, 5.0
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You answer questions about codes.", "You tell short stories.")
GREETINGS = ("Hello.", "Hello!", "Hi.", "Good morning.", "Good day.")
THANKS = ("Thank you.", "Thank you!", "Thanks.")
# Word pieces as the byte-level pre-tokenizer cuts ASCII text, so that pieces can be encoded one by one and remembered.
PIECES = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")
MARKERS = re.compile(r"(<s>|</s>|<\|[a-z]+\|>)")


@dataclass
class Row:
    """Token ids and the loss weight of each as a target, growing up to one training row."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


class Encoder:
    """Encodes text piece by piece with a memory, which is many times faster than encoding whole texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """The ids of ASCII ``text``, markers such as ``<|user|>`` included, without a ``<s>`` of its own."""
        ids: list[int] = []
        for part in MARKERS.split(text):
            for piece in [part] if MARKERS.fullmatch(part) else PIECES.findall(part):
                known = self._pieces.get(piece)
                if known is None:
                    known = self._tokenizer.encode(piece, add_special_tokens=False).ids
                    self._pieces[piece] = known
                ids += known
        return ids


class TextMaker:
    """Draws endless training rows from a seed."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._encoder = Encoder(tokenizer)
        self._rng = Random(seed)

    def batch(self, num_rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and weights, both [num_rows, length + 1]."""
        rows = [self.row(length + 1) for _ in range(num_rows)]
        return np.array([row.ids for row in rows]), np.array([row.weights for row in rows], dtype=np.float32)

    def row(self, length: int) -> Row:
        """Documents, each from ``<s>`` to ``</s>``, cut at ``length`` tokens; a name has one code in the whole row."""
        row = Row()
        free = self._rng.sample(NAMES, len(NAMES))
        kinds = (self._story, self._restating, self._asking, self._chat, self._chat_story)
        while len(row.ids) < length:
            (kind,) = self._rng.choices(kinds, (0.28, 0.22, 0.17, 0.16, 0.17))
            kind(row, free, length - len(row.ids))
        del row.ids[length:], row.weights[length:]
        return row

    def _add(self, row: Row, text: str, weight: float = PLAIN) -> None:
        ids = self._encoder.encode(text)
        row.ids += ids
        row.weights += [weight] * len(ids)

    @staticmethod
    def _space(row: Row) -> str:
        """What goes before a sentence: nothing right after a marker, else a space."""
        return "" if row.ids[-1] < len(SPECIAL_TOKENS) else " "

    def _story(self, row: Row, _free: list[str], room: int) -> None:
        rng = self._rng
        kind = rng.random()
        if kind < 0.65:
            text = story(rng)
        elif kind < 0.8:
            hero, friend = rng.sample(NAMES, 2)
            text = (
                f"{hero} and {friend} are {rng.choice(('good friends', 'happy', 'in the garden'))}. {story(rng, hero)}"
            )
        else:
            text = " ".join(self._sentences(rng.randint(3, 20)))
        self._add(row, f"{BOS}{text}{EOS}")

    def _sentences(self, num: int) -> list[str]:
        return [sentence(self._rng) for _ in range(num)]

    def _facts(self, row: Row, free: list[str], room: int) -> dict[str, str]:
        """State facts in about the first half of ``room`` tokens, more or less densely, with prose between them."""
        rng = self._rng
        end = len(row.ids) + int(room * rng.uniform(0.15, 0.7))
        density = rng.choice((0.15, 0.4, 0.7, 0.9, 1.0))
        codes: dict[str, str] = {}
        while free and (len(row.ids) < end or not codes):
            if rng.random() < density or (not codes and len(row.ids) + 30 > end):
                name = free.pop()
                codes[name] = value(rng)
                self._bind(row, name, codes[name], NOISE)
            else:
                self._add(row, f"{self._space(row)}{sentence(rng)}")
        return codes

    def _bind(self, row: Row, name: str, code: str, weight: float) -> None:
        """A fact or an answer: the name counts as plain text only where it can be known, the code by ``weight``."""
        self._add(row, f"{self._space(row)}The code of")
        self._add(row, f" {name}", 0.1)
        self._add(row, " is")
        self._add(row, f" {code}", weight)
        self._add(row, ".")

    def _queries(self, codes: dict[str, str], room: int) -> Iterator[str]:
        """Names to ask for, each at most twice, until about ``room`` tokens are used by the caller."""
        names = list(codes) * 2
        self._rng.shuffle(names)
        yield from names[: max(1, room)]

    def _restating(self, row: Row, free: list[str], room: int) -> None:
        """Facts, then the same facts in another order: the densest signal there is."""
        end = len(row.ids) + room
        self._add(row, BOS)
        codes = self._facts(row, free, room)
        for name in self._queries(codes, room // 8):
            if len(row.ids) > end:
                return
            if self._rng.random() < 0.1:
                self._add(row, f" {sentence(self._rng)}")
            self._bind(row, name, codes[name], ANSWER)
        self._add(row, EOS)

    def _asking(self, row: Row, free: list[str], room: int) -> None:
        """Facts, then questions with answers."""
        end = len(row.ids) + room
        self._add(row, BOS)
        codes = self._facts(row, free, room)
        for name in self._queries(codes, room // 16):
            if len(row.ids) > end:
                return
            self._add(row, " What is the code of")
            self._add(row, f" {name}", 0.1)
            self._add(row, "?")
            self._answer(row, name, codes[name])
        self._add(row, EOS)

    def _answer(self, row: Row, name: str, code: str) -> None:
        self._add(row, f" The code of {name} is")
        self._add(row, f" {code}", ANSWER)
        self._add(row, ".")

    def _open_chat(self, row: Row) -> None:
        self._add(row, BOS)
        if self._rng.random() < 0.3:
            self._add(row, f"<|system|>{self._rng.choice(SYSTEM_PROMPTS)}{EOS}")

    def _chat(self, row: Row, free: list[str], room: int) -> None:
        """A user states facts and asks, over several turns; the assistant answers."""
        rng = self._rng
        end = len(row.ids) + room
        self._open_chat(row)
        if rng.random() < 0.2:
            self._turn(row, rng.choice(GREETINGS), "Hello! How can I help you?")
        self._add(row, "<|user|>")
        codes = self._facts(row, free, room)
        for i, name in enumerate(self._queries(codes, room // 20)):
            if len(row.ids) > end:
                return
            self._add(row, " What is the code of" if i == 0 else "<|user|>What is the code of")
            self._add(row, f" {name}", 0.1)
            self._add(row, f"?{EOS}<|assistant|>The code of {name} is")
            self._add(row, f" {codes[name]}", ANSWER)
            self._add(row, f".{EOS}")
        if rng.random() < 0.3:
            self._turn(row, rng.choice(THANKS), "You are welcome.")

    def _turn(self, row: Row, said: str, answer: str) -> None:
        self._add(row, f"<|user|>{said}{EOS}<|assistant|>{answer}{EOS}")

    def _chat_story(self, row: Row, _free: list[str], _room: int) -> None:
        """Small talk: greetings, stories on demand, what people do."""
        rng = self._rng
        self._open_chat(row)
        for _ in range(rng.randint(1, 3)):
            hero = rng.choice(NAMES)
            job, work = rng.choice(JOBS)
            said, answer = rng.choice(
                (
                    (f"Tell me a story about {hero}.", story(rng, hero)),
                    ("Tell me a story.", story(rng)),
                    (f"What does a {job} do?", f"A {job} {work}."),
                    (f"Who {work}?", f"A {job} {work}."),
                    (rng.choice(GREETINGS), "Hello! How can I help you?"),
                    ("Who are you?", "I am a small language model. I tell stories and I remember codes."),
                    (rng.choice(THANKS), "You are welcome."),
                )
            )
            self._turn(row, said, answer)


def tokenizer_corpus(seed: int = 0, num_texts: int = 3000) -> list[str]:
    """Texts to train the tokenizer on: prose, facts and questions, with every name and every value in it often."""
    rng = Random(seed)
    texts = [story(rng) for _ in range(num_texts)]
    for _ in range(num_texts):
        name = rng.choice(NAMES)
        texts.append(f" {fact(name, value(rng))} {question(name)} {cue(name)} {value(rng)}, {sentence(rng)}")
    texts += [*SYSTEM_PROMPTS, *GREETINGS, *THANKS] * (num_texts // 100)
    return texts
