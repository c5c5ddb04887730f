"""Hash vectors, the chain, adapters, and what is not a token."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
import xxhash

from kvrelay.core.hashing import compute_block_hashes, compute_sequence_hashes, local_seed
from kvrelay.errors import InvalidInputError

VECTORS = [
    # tokens, block size, local hashes, sequence hashes
    (
        [1, 2, 3, 4, 5, 6, 7, 8, 9],
        4,
        (14643705804678351452, 16777012769546811212),
        (14643705804678351452, 11145085192222983159),
    ),
    (
        list(range(100_000, 100_032)),
        16,
        (937353047620882141, 10699618466713579764),
        (937353047620882141, 9721965694344780068),
    ),
]


@pytest.mark.parametrize(("tokens", "block_size", "local", "sequence"), VECTORS)
def test_hashes_equal_the_recorded_vectors(
    tokens: list[int], block_size: int, local: tuple[int, ...], sequence: tuple[int, ...]
) -> None:
    hashes = compute_block_hashes(tokens, block_size)
    assert hashes.local == local
    assert hashes.sequence == sequence
    assert compute_sequence_hashes(tokens, block_size) == sequence


def test_local_hashes_are_xxh3_over_little_endian_words() -> None:
    rng = random.Random(7)
    for block_size in (1, 3, 16, 64, 200):
        tokens = [rng.randrange(2**32) for _ in range(block_size * 5 + block_size // 2)]
        expected = tuple(
            xxhash.xxh3_64_intdigest(struct.pack(f"<{block_size}I", *tokens[at : at + block_size]), 1337)
            for at in range(0, block_size * 5, block_size)
        )
        assert compute_block_hashes(tokens, block_size).local == expected


def test_the_chain_names_the_whole_prefix() -> None:
    tokens = list(range(64))
    first, other = compute_block_hashes(tokens, 16), compute_block_hashes([99, *tokens[1:]], 16)
    assert first.sequence[0] == first.local[0]
    assert first.local[1:] == other.local[1:]
    assert not set(first.sequence) & set(other.sequence)
    second_block = struct.pack("<16I", *tokens[16:32])
    assert first.sequence[1] == xxhash.xxh3_64_intdigest(second_block, first.sequence[0])


def test_a_chain_can_be_continued_anywhere() -> None:
    tokens = list(range(160))
    hashes = compute_block_hashes(tokens, 16, lora="adapter")
    for at in range(1, 10):
        parent = hashes.sequence[at - 1]
        rest = compute_block_hashes(tokens[16 * at :], 16, lora="adapter", parent=parent)
        assert rest == (hashes.local[at:], hashes.sequence[at:])
        assert compute_sequence_hashes(tokens[16 * at :], 16, lora="adapter", parent=parent) == hashes.sequence[at:]


@pytest.mark.parametrize("length", [0, 1, 15])
def test_less_than_a_block_has_no_hash(length: int) -> None:
    assert compute_block_hashes([1] * length, 16) == ((), ())
    assert compute_sequence_hashes([1] * length, 16, parent=5) == ()


def test_every_kind_of_sequence_hashes_alike() -> None:
    tokens = [5, 0, 2**32 - 1, 77, 1, 2]
    expected = compute_block_hashes(tokens, 2)
    assert len(expected.local) == 3
    for given in (tuple(tokens), np.array(tokens, dtype=np.uint32), np.array(tokens), np.array(tokens, dtype=">u8")):
        assert compute_block_hashes(given, 2) == expected


def test_adapters_and_seeds_separate() -> None:
    tokens = list(range(32))
    plain, adapted = compute_block_hashes(tokens, 16), compute_block_hashes(tokens, 16, lora="adapter")
    assert not set(plain.local) & set(adapted.local)
    assert not set(plain.sequence) & set(adapted.sequence)
    assert adapted == compute_block_hashes(tokens, 16, local_seed(lora="adapter"))
    assert plain.local != compute_block_hashes(tokens, 16, seed=1).local


@pytest.mark.parametrize(
    "tokens", [[-1, 2], [2**32, 1], [1.5, 2], ["1", "2"], np.array([-1, 2]), np.array([2**32, 1]), np.array([0.5, 1.0])]
)
def test_token_ids_must_be_unsigned_32_bit_integers(tokens: list[int]) -> None:
    with pytest.raises(InvalidInputError):
        compute_block_hashes(tokens, 2)
    with pytest.raises(InvalidInputError):
        compute_block_hashes(tuple(tokens), 2)


def test_a_salt_changes_every_hash_and_is_no_adapter() -> None:
    tokens = list(range(64))
    variants = [{}, {"salt": "a"}, {"salt": "b"}, {"lora": "a"}, {"lora": "a", "salt": "a"}]
    found = [compute_block_hashes(tokens, 16, **variant) for variant in variants]
    for hashes, variant in zip(found, variants):
        assert compute_sequence_hashes(tokens, 16, **variant) == hashes.sequence
    assert len({value for hashes in found for value in (*hashes.local, *hashes.sequence)}) == 2 * 4 * 5 - 5
