"""Data sets from files: ShareGPT, JSON lines, Mooncake and Azure traces.

Requests come in the file's order. Traces carry no text, so their prompts are generated. For Mooncake, two prompts share
exactly the blocks whose hash ids they share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from kvrelay.bench.formats import ChatTurn, FileFormat, TraceRecord, json_lines, read_conversations
from kvrelay.bench.load.generated import TokenRange
from kvrelay.bench.load.request import Length, LoadRequest, Prompt
from kvrelay.bench.load.tokens import TokenCounter
from kvrelay.errors import InvalidInputError

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
        turns = conversation.turns
        first = next((at for at, turn in enumerate(turns) if turn.role == "user"), None)
        if first is None or first + 1 >= len(turns) or not turns[first].content:
            continue
        output_len = output.sample(rng) if output else max(1, counter.count(turns[first + 1].content))
        yield LoadRequest(
            turns[first].content,
            output_len,
            prompt_len=counter.count(turns[first].content),
            messages=(turns[first],),
        )


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
