"""The data sets: random prompts, groups of prompts with a shared prefix, and files.

Ids are drawn from a range that every vocabulary has, so they need no tokenizer. Readable text is for debugging a run:
plain sentences from small word lists, with lengths by the given counter. Equal seeds give equal streams.

Of files (ShareGPT, JSON lines, Mooncake and Azure traces) requests come in the file's order. Traces carry no text, so
their prompts are generated. For Mooncake, two prompts share exactly the blocks whose hash ids they share.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from kvrelay.bench.formats import (
    ChatTurn,
    FileFormat,
    TraceRecord,
    json_lines,
    read_azure,
    read_conversations,
    read_mooncake,
)
from kvrelay.bench.load.request import EstimatedTokens, Length, LoadRequest, LocalTokenizer, Prompt, TokenCounter
from kvrelay.errors import InvalidInputError

FIRST_ORDINARY_TOKEN = 32
DEFAULT_VOCAB_SIZE = 512


class TokenRange(msgspec.Struct, frozen=True):
    """Ids ``first`` to ``stop - 1``: below ``first`` lie special tokens in most vocabularies."""

    first: int = FIRST_ORDINARY_TOKEN
    stop: int = DEFAULT_VOCAB_SIZE

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.stop:
            raise InvalidInputError(f"vocabulary size {self.stop} leaves no ordinary token above {self.first}")

    def draw(self, rng: np.random.Generator, count: int) -> tuple[int, ...]:
        return tuple(rng.integers(self.first, self.stop, count).tolist())


def random_requests(
    rng: np.random.Generator, prompt: Length, output: Length, tokens: TokenRange
) -> Iterator[LoadRequest]:
    """Prompts of independent random tokens, without end."""
    while True:
        count = prompt.sample(rng)
        yield LoadRequest(tokens.draw(rng, count), output.sample(rng), prompt_len=count)


def shared_prefix_requests(
    rng: np.random.Generator, dataset: Dataset, output: Length, tokens: TokenRange
) -> Iterator[LoadRequest]:
    """``groups * per_group`` prompts, system prompt then question, in shuffled order; finite."""
    systems = [tokens.draw(rng, dataset.system.sample(rng)) for _ in range(dataset.groups)]
    for group in _shuffled_groups(rng, dataset):
        prompt = systems[group] + tokens.draw(rng, dataset.prompt.sample(rng))
        yield LoadRequest(prompt, output.sample(rng), prompt_len=len(prompt))


def _shuffled_groups(rng: np.random.Generator, dataset: Dataset) -> list[int]:
    """The group of each prompt."""
    if dataset.groups < 1 or dataset.per_group < 1:
        raise InvalidInputError("shared prefixes need at least one group and one prompt per group")
    order = np.repeat(np.arange(dataset.groups), dataset.per_group)
    rng.shuffle(order)
    found: list[int] = order.tolist()
    return found


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
    rng: np.random.Generator, dataset: Dataset, output: Length, counter: TokenCounter
) -> Iterator[LoadRequest]:
    """``groups * per_group`` conversations of a system prompt and a question, in shuffled order; finite."""
    systems = [_system_prompt(rng, group, dataset.system.sample(rng), counter) for group in range(dataset.groups)]
    for number, group in enumerate(_shuffled_groups(rng, dataset)):
        question = _grow(f"Question {number + 1}.", lambda: _fill(rng, _QUESTIONS), dataset.prompt.sample(rng), counter)
        text = f"{systems[group]}\n\n{question}"
        messages = ChatTurn("system", systems[group]), ChatTurn("user", question)
        yield LoadRequest(text, output.sample(rng), counter.count(text), messages)


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


MOONCAKE_BLOCK = 512


_CACHED_BLOCKS = 65536


class _JsonItem(msgspec.Struct):
    prompt: str | list[int] | None = None
    messages: list[ChatTurn] | None = None
    output_len: int | None = None
    max_tokens: int | None = None
    timestamp: float | None = None


def sharegpt_requests(
    path: Path, counter: TokenCounter, output: Length | None, rng: np.random.Generator
) -> Iterator[LoadRequest]:
    """Each conversation's first user turn, with the answer's number of output tokens, or the number of ``output``."""
    for conversation in read_conversations(path, FileFormat.SHAREGPT):
        pairs = itertools.pairwise(conversation.turns)
        question, answer = next(((one, after) for one, after in pairs if one.role == "user"), (None, None))
        if question is None or answer is None or not question.content:
            continue
        output_len = output.sample(rng) if output else max(1, counter.count(answer.content))
        yield LoadRequest(question.content, output_len, counter.count(question.content), (question,))


def json_requests(path: Path, output: Length | None, rng: np.random.Generator) -> Iterator[LoadRequest]:
    """Lines of ``prompt`` (text or ids) or ``messages``, ``output_len`` or ``max_tokens``, perhaps ``timestamp``."""
    for number, item in enumerate(json_lines(path, _JsonItem), 1):
        messages = tuple(item.messages or ())
        prompt: Prompt
        if isinstance(item.prompt, list):
            prompt = tuple(item.prompt)
        else:
            prompt = item.prompt or "\n".join(message.content for message in messages)
        output_len = output.sample(rng) if output else item.output_len or item.max_tokens
        if not prompt or output_len is None or output_len < 1:
            raise InvalidInputError(f"{path}: record {number} needs 'prompt' or 'messages', and 'output_len'")
        prompt_len = len(prompt) if isinstance(prompt, tuple) else None
        yield LoadRequest(prompt, output_len, prompt_len, messages, item.timestamp)


def mooncake_requests(
    records: Iterable[TraceRecord], seed: int, tokens: TokenRange, block_tokens: int = MOONCAKE_BLOCK
) -> Iterator[LoadRequest]:
    """Prompts whose block sharing equals the trace's hash ids.

    ``block_tokens`` is the number of tokens made for each id; below 512 all lengths shrink in proportion, so that
    models with a short context can replay the trace.
    """
    if not 1 <= block_tokens <= MOONCAKE_BLOCK:
        raise InvalidInputError(f"a hash id stands for 1 to {MOONCAKE_BLOCK} tokens, not {block_tokens}")

    @lru_cache(maxsize=_CACHED_BLOCKS)
    def block(hash_id: int) -> tuple[int, ...]:
        return tokens.draw(np.random.default_rng([seed, hash_id]), block_tokens)

    for record in records:
        if len(record.hash_ids) != -(-record.input_len // MOONCAKE_BLOCK):
            raise InvalidInputError(
                f"trace record with {record.input_len} input tokens has {len(record.hash_ids)} hash ids of 512 tokens"
            )
        length = max(1, -(-record.input_len * block_tokens // MOONCAKE_BLOCK))
        ids = [token for hash_id in record.hash_ids for token in block(hash_id)]
        output_len = max(1, -(-record.output_len * block_tokens // MOONCAKE_BLOCK))
        yield LoadRequest(tuple(ids[:length]), output_len, length, arrival_s=record.timestamp_s)


def trace_requests(
    records: Iterable[TraceRecord], rng: np.random.Generator, tokens: TokenRange
) -> Iterator[LoadRequest]:
    """Random prompts with the lengths and times of a trace without content."""
    for record in records:
        prompt = tokens.draw(rng, record.input_len)
        yield LoadRequest(prompt, record.output_len, record.input_len, arrival_s=record.timestamp_s)


class DatasetKind(StrEnum):
    """The data sets; those of files need a path."""

    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"
    READABLE_PREFIX = "readable-prefix"
    SHAREGPT = "sharegpt"
    JSONL = "jsonl"
    MOONCAKE = "mooncake"
    TRACE = "trace"

    @property
    def needs_file(self) -> bool:
        return self not in (DatasetKind.RANDOM, DatasetKind.SHARED_PREFIX, DatasetKind.READABLE_PREFIX)


_DEFAULT_LENGTH = Length("fixed", 256)


class Dataset(msgspec.Struct, frozen=True):
    """A data set and its parameters, lengths in tokens. ``output`` None: the file's length (generated sets: 64)."""

    kind: DatasetKind = DatasetKind.RANDOM
    path: Path | None = None
    prompt: Length = _DEFAULT_LENGTH
    output: Length | None = None
    groups: int = 8
    per_group: int = 16
    system: Length = _DEFAULT_LENGTH
    vocab_size: int | None = None
    tokenizer: Path | None = None
    block_tokens: int = MOONCAKE_BLOCK


ANY_DATASET = Dataset()


def requests_of(dataset: Dataset, rng: np.random.Generator, seed: int) -> Iterator[LoadRequest]:
    """Its stream; a file is opened, and refused, here."""
    kind, path = dataset.kind, dataset.path
    output = dataset.output or Length("fixed", 64)
    if path is None:
        return _generated(dataset, rng, output)
    if kind is DatasetKind.SHAREGPT:
        return sharegpt_requests(path, _counter(dataset), dataset.output, rng)
    if kind is DatasetKind.JSONL:
        return json_requests(path, dataset.output, rng)
    if kind is DatasetKind.MOONCAKE:
        return mooncake_requests(read_mooncake(path), seed, _tokens(dataset), dataset.block_tokens)
    if kind is DatasetKind.TRACE:
        return trace_requests(read_azure(path), rng, _tokens(dataset))
    raise InvalidInputError(f"the data set {kind.value} takes no file", param="dataset")


def _generated(dataset: Dataset, rng: np.random.Generator, output: Length) -> Iterator[LoadRequest]:
    if dataset.kind is DatasetKind.RANDOM:
        return random_requests(rng, dataset.prompt, output, _tokens(dataset))
    if dataset.kind is DatasetKind.SHARED_PREFIX:
        return shared_prefix_requests(rng, dataset, output, _tokens(dataset))
    return readable_prefix_requests(rng, dataset, output, _counter(dataset))


def _tokens(dataset: Dataset) -> TokenRange:
    if dataset.vocab_size is not None:
        return TokenRange(stop=dataset.vocab_size)
    return TokenRange(stop=LocalTokenizer(dataset.tokenizer).vocab_size if dataset.tokenizer else DEFAULT_VOCAB_SIZE)


def _counter(dataset: Dataset) -> TokenCounter:
    return LocalTokenizer(dataset.tokenizer) if dataset.tokenizer else EstimatedTokens()
