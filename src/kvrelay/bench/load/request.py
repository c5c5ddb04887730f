"""The vocabulary of load: a request, a class of requests, lengths, arrival times, and counts of tokens. Pure.

Tokens of text are counted by a local tokenizer if one is given, else by an estimate. Neither transformers nor torch is
imported: a ``tokenizer.json`` is all that is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import numpy as np

from kvrelay.bench.formats import ChatTurn
from kvrelay.errors import InvalidInputError

Prompt = str | tuple[int, ...]


class LoadRequest(msgspec.Struct, frozen=True):
    """A request to send.

    ``prompt`` is text or token ids; if ``messages`` is not empty, the request is a conversation and ``prompt`` its
    text. ``output_len`` is in tokens. ``prompt_len`` is the number of prompt tokens, if known beforehand.
    ``arrival_s`` is the time since the trace's start, for data sets that have one. ``priority``: lower is served first.
    """

    prompt: Prompt
    output_len: int
    prompt_len: int | None = None
    messages: tuple[ChatTurn, ...] = ()
    arrival_s: float | None = None
    priority: int = 0


class LoadClass(msgspec.Struct, frozen=True):
    """A named stream of requests with its own arrivals.

    ``offsets`` are send times in seconds since the start, one per request; without them the class is a closed loop of
    ``max_concurrency`` users, each sending its next request when the last one is answered. With both, arrivals wait
    while ``max_concurrency`` requests are in flight. ``num_requests`` ends the class; without it, the iterators or the
    run's time limit do.
    """

    name: str
    requests: Iterator[LoadRequest]
    offsets: Iterator[float] | None = None
    max_concurrency: int | None = None
    num_requests: int | None = None


MAX_LENGTH = 10_000_000


class Length(msgspec.Struct, frozen=True):
    """A distribution of token counts.

    ``fixed`` (low), ``uniform`` (low to high, both included) or ``normal`` (mean low, deviation high, cut off at 1).
    """

    kind: Literal["fixed", "uniform", "normal"]
    low: float
    high: float = 0.0

    def sample(self, rng: np.random.Generator) -> int:
        if self.kind == "fixed":
            return int(self.low)
        if self.kind == "uniform":
            return int(rng.integers(int(self.low), int(self.high) + 1))
        return min(MAX_LENGTH, max(1, round(float(rng.normal(self.low, self.high)))))


def parse_length(text: str, name: str = "length") -> Length:
    """Read ``128``, ``uniform~64~256`` or ``normal~128~32``; raises InvalidInputError naming ``name``."""
    kind, *numbers = text.split("~")
    try:
        if not numbers:
            return _checked(Length("fixed", float(int(kind))), text, name)
        if kind in ("uniform", "normal") and len(numbers) == 2:
            low, high = (float(int(number)) for number in numbers)
            return _checked(Length("uniform" if kind == "uniform" else "normal", low, high), text, name)
    except ValueError:
        pass
    raise InvalidInputError(f"{name} {text!r} is not N, uniform~LOW~HIGH or normal~MEAN~DEVIATION", param=name)


def _checked(length: Length, text: str, name: str) -> Length:
    ordered = length.kind != "uniform" or length.low <= length.high
    if length.low < 1 or length.high < 0 or max(length.low, length.high) > MAX_LENGTH or not ordered:
        raise InvalidInputError(f"{name} {text!r} is out of range: at least 1, at most {MAX_LENGTH}", param=name)
    return length


def check_rate(rate: float, name: str = "request rate") -> None:
    """A rate in requests per second must be a positive number; infinity means all at once."""
    if math.isnan(rate) or rate <= 0:
        raise InvalidInputError(f"{name} must be above zero, not {rate:g}", param=name)


def random_arrivals(rng: np.random.Generator, rate: float, burstiness: float = 1.0) -> Iterator[float]:
    """Endless offsets in seconds with ``rate`` arrivals per second on average; the first is one gap after the start.

    Gaps are gamma-distributed with shape ``burstiness``: 1 is Poisson, below 1 burstier, above 1 more regular.
    """
    check_rate(rate)
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise InvalidInputError(f"burstiness must be above zero, not {burstiness:g}", param="burstiness")
    now = 0.0
    while True:
        if math.isfinite(rate):
            now += float(rng.gamma(burstiness, 1.0 / (rate * burstiness)))
        yield now


def trace_arrivals(arrivals_s: Iterable[float], time_scale: float = 1.0) -> Iterator[float]:
    """The trace's own times from its first request on, ``time_scale`` times as fast."""
    if not (time_scale > 0 and math.isfinite(time_scale)):
        raise InvalidInputError(f"the trace's time scale must be above zero, not {time_scale:g}", param="time_scale")
    start: float | None = None
    for arrival in arrivals_s:
        start = arrival if start is None else start
        yield max(0.0, (arrival - start) / time_scale)


CHARS_PER_TOKEN = 4


class TokenCounter(Protocol):
    """Counts the tokens of a text, without special tokens."""

    def count(self, text: str) -> int: ...


class EstimatedTokens:
    """An estimate of four characters per token, at least one for text that is not empty."""

    def count(self, text: str) -> int:
        return -(-len(text) // CHARS_PER_TOKEN)


class LocalTokenizer:
    """A Hugging Face ``tokenizer.json``, given as the file or as the checkpoint's directory."""

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise InvalidInputError(f"no tokenizer at {path}: expected a tokenizer.json or a directory that has one")
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as exc:  # the Rust side raises nothing narrower
            raise InvalidInputError(f"{file} is not a tokenizer: {exc}") from exc

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=False))

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def decode(self, ids: tuple[int, ...]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
