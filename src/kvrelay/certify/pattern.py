"""KV whose every word of 8 bytes names its own place, so that KV in the wrong place says what went wrong.

    generation 12 | token 20 | layer 10 | vector 2 | head 10 | word 10        bits; xor MASK in memory

A cell's identity is the model's (token, layer, K or V, head), never the pool's: a block on two ranks, or half as large,
holds the same words elsewhere. Pure; it knows layouts but no devices and no transports.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt

from kvrelay.core.layout import KVLayout
from kvrelay.errors import InvalidInputError

UInt8Array = npt.NDArray[np.uint8]
UInt64Array = npt.NDArray[np.uint64]

MASK = np.uint64(0x9E3779B97F4A7C15)
"""So that neither zeros nor small integers look like a word."""
MAX_GENERATION = 2**12 - 1
MAX_TOKENS = 2**20
_FIELDS = {"generation": (52, 12), "token": (32, 20), "layer": (22, 10), "vector": (20, 2), "head": (10, 10)}
_WORD = ("word", (0, 10))
_PLACES = ("token", "layer", "vector", "head", "word")
_MAJORITY = 0.9


class Cause(StrEnum):
    """What the found words say. The text goes into the report."""

    SWAPPED_VECTORS = "K and V are swapped"
    HEADS = "heads lie in each other's place: a wrong head map"
    RANKS = "ranks lie in each other's place: a wrong rank map"
    LAYERS = "layers lie in each other's place: a wrong layer or stage offset"
    BLOCKS = "blocks lie in each other's place: an off-by-one or a wrong block table"
    TOKENS = "tokens lie in each other's place within their block"
    STRIDE = "cells are cut at the wrong bytes: a wrong stride or offset"
    BYTE_ORDER = "the bytes of each word are reversed: byte order"
    SENT_EARLY = "bytes that the sender's memory held before they were computed: a wait before the transfer is missing"
    NOT_ARRIVED = "the receiver's memory still holds what it held before: the bytes never came, or went elsewhere"
    READ_EARLY = "the bytes came, but only after their notification: a wait before the read is missing"
    LATE_WRITE = "bytes of another hand-off: a late write into blocks that were reused"
    CORRUPT = "bytes that nobody wrote: corruption on the way"


class Damage(msgspec.Struct, frozen=True):
    """KV that is not what was sent. ``where``: blocks, layers, K or V, heads and ranks that are hit, as text."""

    cause: Cause
    num_wrong_bytes: int
    num_bytes: int
    where: str
    example: str = ""

    def __str__(self) -> str:
        share = self.num_wrong_bytes / self.num_bytes
        return f"{self.cause} ({share:.1%} of the bytes; {self.where}{'; ' if self.example else ''}{self.example})"


class Known(msgspec.Struct, frozen=True):
    """The generations that a wrong word may have: what each side's blocks held before, None: not known."""

    sender_before: int | None = None
    receiver_before: int | None = None


class Pattern:
    """The words of one layout's blocks. Raises InvalidInputError for KV whose entries are not whole words."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self._places = _places(layout)
        self._entry_words = math.gcd(*(region.entry_bytes // 8 for region in layout.model))
        self._ranks = np.searchsorted(np.array(layout.rank_offsets), np.arange(0, layout.block_bytes, 8), side="right")
        self._ranks -= 1

    def blocks(self, generation: int, first_tokens: Sequence[int]) -> UInt8Array:
        """[len(first_tokens), block_bytes]: blocks whose first tokens are these."""
        return (self._expected(generation, first_tokens) ^ MASK).view(np.uint8)

    def diagnose(
        self, found: UInt8Array, generation: int, first_tokens: Sequence[int], known: Known | None = None
    ) -> Damage | None:
        """What is wrong with ``found``, [len(first_tokens), block_bytes]; None if nothing is."""
        raw = np.ascontiguousarray(found).view(np.uint64)
        expected = self._expected(generation, first_tokens)
        got = raw ^ MASK
        is_wrong = got != expected
        if not is_wrong.any():
            return None
        wrong, right = got[is_wrong], expected[is_wrong]
        if self._is_scattered(is_wrong):
            cause, example = Cause.CORRUPT, ""
        else:
            cause, example = self._cause(wrong, right, raw[is_wrong].byteswap() ^ MASK, generation, known or Known())
        return Damage(cause, int(is_wrong.sum()) * 8, found.nbytes, self._where(is_wrong, right), example)

    def _is_scattered(self, is_wrong: npt.NDArray[np.bool_]) -> bool:
        """Whether single words are wrong amid right ones. A copy that goes wrong hits whole entries."""
        entries = is_wrong.reshape(len(is_wrong), -1, self._entry_words)
        hit = entries.any(axis=2)
        return bool(entries[hit].mean() < 0.5)

    def _expected(self, generation: int, first_tokens: Sequence[int]) -> UInt64Array:
        if not 0 <= generation <= MAX_GENERATION or max(first_tokens, default=0) >= MAX_TOKENS:
            raise InvalidInputError(f"no pattern has generation {generation}, or {max(first_tokens, default=0)} tokens")
        starts = np.array(first_tokens, dtype=np.uint64)[:, None] << np.uint64(32)
        return self._places + starts + np.uint64(generation << 52)

    def _cause(
        self, wrong: UInt64Array, right: UInt64Array, reversed_bytes: UInt64Array, generation: int, known: Known
    ) -> tuple[Cause, str]:
        if _most(reversed_bytes == right):
            return Cause.BYTE_ORDER, ""
        got, meant = _decode(wrong), _decode(right)
        generations = got["generation"]
        if known.sender_before is not None and _most(generations == known.sender_before):
            return Cause.SENT_EARLY, ""
        if known.receiver_before is not None and _most(generations == known.receiver_before):
            return Cause.NOT_ARRIVED, ""
        if _most(generations == generation):
            return self._misplaced(got, meant)
        in_place = np.ones(len(wrong), dtype=np.bool_)
        for name in ("layer", "vector", "head", "word"):
            in_place &= got[name] == meant[name]
        if _most(in_place):
            values, counts = np.unique(generations, return_counts=True)
            return Cause.LATE_WRITE, f"of hand-off {int(values[counts.argmax()])} in blocks of {generation}"
        return Cause.CORRUPT, ""

    def _misplaced(self, got: dict[str, UInt64Array], meant: dict[str, UInt64Array]) -> tuple[Cause, str]:
        """Words of this hand-off in the wrong place: by the fields that differ."""
        differs = [name for name in _PLACES if not _most(got[name] == meant[name])]
        at = int(np.argmax(np.any([got[name] != meant[name] for name in _PLACES], axis=0)))
        example = "; ".join(
            f"{name} {int(got[name][at])} where {int(meant[name][at])} belongs"
            for name in differs or _PLACES
            if got[name][at] != meant[name][at]
        )
        if differs == ["vector"]:
            return Cause.SWAPPED_VECTORS, example
        if differs == ["head"]:
            return (Cause.RANKS if self._are_rank_shifts(got["head"], meant["head"]) else Cause.HEADS), example
        if differs == ["layer"]:
            return Cause.LAYERS, example
        if differs == ["token"]:
            shift = got["token"].astype(np.int64) - meant["token"].astype(np.int64)
            return (Cause.BLOCKS if _most(shift % self.layout.block_size == 0) else Cause.TOKENS), example
        return Cause.STRIDE, example

    def _are_rank_shifts(self, got: UInt64Array, meant: UInt64Array) -> bool:
        """Whether whole shares of heads have changed places, each in order."""
        layout = self.layout
        share = layout.regions[0].region.num_heads // layout.tp_size
        shift = got.astype(np.int64) - meant.astype(np.int64)
        return layout.tp_size > 1 and share > 1 and _most(shift % share == 0)

    def _where(self, is_wrong: npt.NDArray[np.bool_], right: UInt64Array) -> str:
        fields = _decode(right)
        layout = self.layout
        tokens = fields["token"] // np.uint64(layout.block_size)
        named = [f"block {_numbers(tokens)} of the prompt", f"layer {_numbers(fields['layer'])}"]
        vectors = np.unique(fields["vector"])
        if len(vectors) == 1 and layout.model[0].num_vectors == 2:
            named.append("K" if vectors[0] == 0 else "V")
        named.append(f"head {_numbers(fields['head'])}")
        if layout.num_ranks > 1:
            named.append(f"rank {_numbers(self._ranks[np.nonzero(is_wrong)[1]])}")
        return ", ".join(named)


def _places(layout: KVLayout) -> UInt64Array:
    """Of each word of a block, [block_bytes / 8]: its place, with generation and first token 0."""
    places = np.empty(layout.block_bytes // 8, dtype=np.uint64)
    first_layer = 0
    for number, cut in enumerate(layout.regions):
        region = cut.region
        if region.entry_bytes % 8:
            raise InvalidInputError(f"entries of region {region.name} are {region.entry_bytes} bytes, no whole words")
        num_entries, num_words = region.num_entries(layout.block_size), region.entry_bytes // 8
        layers, vectors, slots, entries, words = np.ogrid[
            : region.num_layers, : region.num_vectors, : cut.num_slots, :num_entries, :num_words
        ]
        cells = (
            (entries * (region.entry_tokens or 0) << 32)
            + ((layers + first_layer) % 1024 << 22)
            + (vectors << 20)
            + (slots // cut.head_replicas % 1024 << 10)
            + words % 1024
        ).astype(np.uint64)
        for part in layout.parts(number):
            own = cells[part.layers, :, part.slots].reshape(-1)
            places[part.offset // 8 : part.offset // 8 + len(own)] = own
        first_layer += region.num_layers
    return places


def _decode(words: UInt64Array) -> dict[str, UInt64Array]:
    return {
        name: words >> np.uint64(shift) & np.uint64(2**bits - 1) for name, (shift, bits) in (*_FIELDS.items(), _WORD)
    }


def _most(which: npt.NDArray[np.bool_]) -> bool:
    return bool(which.mean() >= _MAJORITY)


def _numbers(values: npt.NDArray[np.integer]) -> str:
    found = np.unique(values).tolist()
    if len(found) > 3 and found[-1] - found[0] == len(found) - 1:
        return f"{found[0]} to {found[-1]}"
    return ", ".join(map(str, found[:6])) + (f" and {len(found) - 6} more" if len(found) > 6 else "")
