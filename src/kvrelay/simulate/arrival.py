"""One request of a simulated load: when it comes, how long it is, and which blocks of its prompt others share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.core.token_ids import words_of
from kvrelay.errors import InvalidInputError

OWN_SEED = 1 << 40
"""Prompts without hash ids draw their tokens from here on: no hash id of a trace is so large."""
NUM_KEPT_PARTS = 8192
"""A search simulates the same prompts many times: so many of their parts are kept, 2 kB each in Mooncake's trace."""
NUM_KEPT_HASHES = 1024
"""And the hashes of so many prompts: about 100 bytes a block."""


class _Parts(NamedTuple):
    """What the tokens of a prompt follow from. ``own_seed``: of its end, which no other has; 0: it has none."""

    hash_ids: tuple[int, ...]
    hash_tokens: int
    num_tokens: int
    own_seed: int


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """``time_s`` from the begin of the load, of at least 0. With ``after`` the request is sent ``time_s`` after the
    arrival of that index has got its last token: sessions and closed loops.

    ``hash_ids``: one for each ``hash_tokens`` tokens of the prompt; equal leading ids are an equal prefix. None: the
    prompt shares nothing. ``session`` names the conversation, for reports. ``tool``: what the answer ends by calling.
    ``prefetch_s``: so long before this turn of a session its client asks for a prefetch; 0: never.
    """

    time_s: float
    prompt_tokens: int
    answer_tokens: int
    hash_ids: tuple[int, ...] | None = None
    hash_tokens: int = 512
    session: str | None = None
    tool: str = ""
    prefetch_s: float = 0.0
    after: int | None = None
    priority: int = 0

    def prompt(self, index: int, vocab_size: int) -> list[int]:
        """Token ids of the arrival number ``index``: a function of the hash ids, or of ``index`` without them."""
        token_ids: list[int] = _prompt(self._parts(index), vocab_size).tolist()
        return token_ids

    def hashes(self, index: int, vocab_size: int, block_size: int) -> tuple[int, ...]:
        """The sequence hashes of the prompt's complete blocks."""
        return _hashes(self._parts(index), vocab_size, block_size)

    def _parts(self, index: int) -> _Parts:
        ids = self.hash_ids or ()
        has_end = self.hash_tokens * len(ids) < self.prompt_tokens
        return _Parts(ids, self.hash_tokens, self.prompt_tokens, OWN_SEED + index if has_end else 0)


class RecordedArrival(Arrival, frozen=True):
    """An arrival with the very tokens of its prompt, in memory."""

    token_ids: tuple[int, ...] = ()

    def prompt(self, index: int, vocab_size: int) -> list[int]:
        return list(self.token_ids)

    def hashes(self, index: int, vocab_size: int, block_size: int) -> tuple[int, ...]:
        return compute_sequence_hashes(self.token_ids, block_size)


def check_arrivals(arrivals: Sequence[Arrival]) -> None:
    """Raise InvalidInputError for the first arrival that cannot be sent, by its number from 0."""
    for index, arrival in enumerate(arrivals):
        if not 0.0 <= arrival.time_s < math.inf:
            raise InvalidInputError(f"arrival {index}: its time must be 0 s or more, got {arrival.time_s}")
        if arrival.prompt_tokens < 1 or arrival.answer_tokens < 1:
            raise InvalidInputError(f"arrival {index}: prompt and answer need at least one token each")
        if arrival.after is not None and not 0 <= arrival.after < index:
            raise InvalidInputError(f"arrival {index}: it can only come after an earlier one, not {arrival.after}")


@lru_cache(NUM_KEPT_HASHES)
def _hashes(prompt: _Parts, vocab_size: int, block_size: int) -> tuple[int, ...]:
    return compute_sequence_hashes(words_of(_prompt(prompt, vocab_size).astype("<u4").tobytes()), block_size)


def _prompt(prompt: _Parts, vocab_size: int) -> npt.NDArray[np.int32]:
    parts = [_shared_tokens(hash_id, prompt.hash_tokens, vocab_size) for hash_id in prompt.hash_ids]
    if prompt.own_seed:
        missing = prompt.num_tokens - prompt.hash_tokens * len(parts)
        parts.append(_tokens(prompt.own_seed, missing, vocab_size))
    return np.concatenate(parts)[: prompt.num_tokens]


@lru_cache(NUM_KEPT_PARTS)
def _shared_tokens(seed: int, count: int, vocab_size: int) -> npt.NDArray[np.int32]:
    return _tokens(seed, count, vocab_size)


def _tokens(seed: int, count: int, vocab_size: int) -> npt.NDArray[np.int32]:
    """A multiplicative hash of (seed, position): no generator to set up for each block."""
    mixed = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed += np.uint64(seed * 0xC2B2AE3D27D4EB4F & (1 << 64) - 1)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.asarray((mixed >> np.uint64(32)) % np.uint64(vocab_size), dtype=np.int32)
