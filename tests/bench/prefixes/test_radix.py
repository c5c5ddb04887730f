"""Shared prefixes: against a tree written naively, and on sets whose answer is known by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.bench.prefixes.radix import PackedSequences, shared_prefixes
from kvrelay.errors import InvalidInputError

T = TypeVar("T")


def naive(sequences: Sequence[Sequence[T]], min_count: int, min_length: int) -> set[tuple[tuple[T, ...], int]]:
    """Every prefix counted in a table; kept are those that no longer prefix of enough uses extends."""
    counts = Counter(tuple(sequence[:end]) for sequence in sequences for end in range(1, len(sequence) + 1))
    often = {prefix: count for prefix, count in counts.items() if count >= min_count}
    inner = {prefix[:-1] for prefix in often}
    return {(prefix, count) for prefix, count in often.items() if prefix not in inner and len(prefix) > min_length}


texts = st.lists(st.text(alphabet="ab é漢🙂\udcff", max_size=40), min_size=1, max_size=40)
repetitive = st.lists(
    st.tuples(st.sampled_from(["", "a" * 31, "a" * 32 + "é", "a" * 33, "b" * 64]), st.text(alphabet="aé", max_size=5)),
    min_size=1,
    max_size=30,
).map(lambda pairs: [first + second for first, second in pairs])


@settings(deadline=None, max_examples=120)
@given(texts | repetitive, st.integers(2, 5), st.integers(0, 6))
def test_text_equals_naive_count(sequences: list[str], min_count: int, min_length: int) -> None:
    packed = PackedSequences(text.encode("utf-8", "surrogatepass") for text in sequences)
    nodes = shared_prefixes(packed, min_count, min_length)
    found = {(node.content.decode("utf-8", "surrogatepass"), node.count) for node in nodes}
    assert found == {("".join(prefix), count) for prefix, count in naive(sequences, min_count, min_length)}
    assert all(node.length == len(node.content.decode("utf-8", "surrogatepass")) for node in nodes)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.lists(st.integers(250, 260), max_size=12), min_size=1, max_size=40), st.integers(2, 4))
def test_tokens_equal_naive_count(sequences: list[list[int]], min_count: int) -> None:
    packed = PackedSequences((np.array(ids, ">u4").tobytes() for ids in sequences), item_bytes=4)
    nodes = shared_prefixes(packed, min_count, 0)
    found = {(tuple(np.frombuffer(node.content, ">u4").tolist()), node.count) for node in nodes}
    assert found == naive(sequences, min_count, 0)


def test_hand_made_set() -> None:
    sequences = [b"abc one", b"abc two", b"abc two", b"abc zero", b"x", b"y"]
    assert [(n.content, n.count, n.length) for n in shared_prefixes(PackedSequences(sequences), 3, 0)] == [
        (b"abc ", 4, 4)
    ]
    assert [(n.content, n.count) for n in shared_prefixes(PackedSequences(sequences), 2, 0)] == [(b"abc two", 2)]


def test_a_prefix_inside_a_longer_shared_one_is_not_counted_again() -> None:
    sequences = [b"system A. q1", b"system A. q2", b"system B. q1", b"system B. q2", b"system"]
    found = [(n.content, n.count) for n in shared_prefixes(PackedSequences(sequences), 2, 3)]
    assert found == [(b"system A. q", 2), (b"system B. q", 2)]
    assert [(n.content, n.count) for n in shared_prefixes(PackedSequences(sequences), 5, 3)] == [(b"system", 5)]


def test_length_is_a_bound_that_must_be_passed() -> None:
    packed = PackedSequences([b"12345", b"12345"])
    assert len(shared_prefixes(packed, 2, 4)) == 1
    assert shared_prefixes(packed, 2, 5) == []


def test_long_common_prefixes_cross_strides() -> None:
    base = bytes(range(32, 127)) * 20
    packed = PackedSequences([base + b"x", base + b"y", base])
    (node,) = shared_prefixes(packed, 3, 0)
    assert (node.length, node.count) == (len(base), 3)


def test_one_use_is_not_shared() -> None:
    with pytest.raises(InvalidInputError, match="at least 2"):
        shared_prefixes(PackedSequences([b"a"]), 1, 0)
    with pytest.raises(InvalidInputError, match="nothing to measure"):
        PackedSequences([])
    assert shared_prefixes(PackedSequences([b"a"]), 2, 0) == []
