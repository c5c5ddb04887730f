"""Hash vectors, the chain, adapters, and what is not a token."""

from __future__ import annotations

import random
import struct
from array import array

import pytest
import xxhash

from kvrelay.core.hashing import compute_sequence_hashes
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


def local_hashes(tokens: list[int], block_size: int) -> tuple[int, ...]:
    """Of each complete block: that of a prompt which it begins."""
    return tuple(
        block_hash
        for at in range(0, len(tokens), block_size)
        for block_hash in compute_sequence_hashes(tokens[at : at + block_size], block_size)
    )


@pytest.mark.parametrize(("tokens", "block_size", "local", "sequence"), VECTORS)
def test_hashes_equal_the_recorded_vectors(
    tokens: list[int], block_size: int, local: tuple[int, ...], sequence: tuple[int, ...]
) -> None:
    assert local_hashes(tokens, block_size) == local
    assert compute_sequence_hashes(tokens, block_size) == sequence


def test_hashes_are_xxh3_over_little_endian_words() -> None:
    rng = random.Random(7)
    for block_size in (1, 3, 16, 64, 200):
        tokens = [rng.randrange(2**32) for _ in range(block_size * 5 + block_size // 2)]
        blocks = [struct.pack(f"<{block_size}I", *tokens[at * block_size : (at + 1) * block_size]) for at in range(5)]
        assert local_hashes(tokens, block_size) == tuple(xxhash.xxh3_64_intdigest(block, 1337) for block in blocks)
        link, chain = 1337, []
        for block in blocks:
            chain.append(link := xxhash.xxh3_64_intdigest(block, link))
        assert compute_sequence_hashes(tokens, block_size) == tuple(chain)


def test_the_chain_names_the_whole_prefix() -> None:
    tokens = list(range(64))
    first, other = compute_sequence_hashes(tokens, 16), compute_sequence_hashes([99, *tokens[1:]], 16)
    assert not set(first) & set(other)


def test_a_chain_can_be_continued_anywhere() -> None:
    tokens = list(range(160))
    hashes = compute_sequence_hashes(tokens, 16, lora="adapter")
    for at in range(1, 10):
        parent = hashes[at - 1]
        assert compute_sequence_hashes(tokens[16 * at :], 16, lora="adapter", parent=parent) == hashes[at:]


@pytest.mark.parametrize("length", [0, 1, 15])
def test_less_than_a_block_has_no_hash(length: int) -> None:
    assert compute_sequence_hashes([1] * length, 16) == ()
    assert compute_sequence_hashes([1] * length, 16, parent=5) == ()


def test_every_kind_of_sequence_hashes_alike() -> None:
    tokens = [5, 0, 2**32 - 1, 77, 1, 2]
    expected = compute_sequence_hashes(tokens, 2)
    assert len(expected) == 3
    for given in (tuple(tokens), array("I", tokens)):
        assert compute_sequence_hashes(given, 2) == expected


@pytest.mark.parametrize("tokens", [[-1, 2], [2**32, 1], [1.5, 2], ["1", "2"]])
def test_token_ids_must_be_unsigned_32_bit_integers(tokens: list[int]) -> None:
    with pytest.raises(InvalidInputError):
        compute_sequence_hashes(tokens, 2)
    with pytest.raises(InvalidInputError):
        compute_sequence_hashes(tuple(tokens), 2)


def test_an_adapter_and_a_salt_change_every_hash_and_are_not_mixed_up() -> None:
    tokens = list(range(64))
    variants = [{}, {"salt": "a"}, {"salt": "b"}, {"lora": "a"}, {"lora": "a", "salt": "a"}]
    found = [compute_sequence_hashes(tokens, 16, **variant) for variant in variants]
    assert len({value for hashes in found for value in hashes}) == 4 * 5
