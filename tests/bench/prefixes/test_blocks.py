"""Hit ratios of block caches, by hand and against a naive replay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.bench.prefixes.blocks import chained_blocks, hit_ratios
from kvrelay.errors import InvalidInputError


def test_unlimited_cache_counts_leading_blocks_only() -> None:
    (unlimited,) = hit_ratios([(1, 2, 3), (1, 2, 4), (9, 2, 3)], ())
    assert unlimited.num_blocks is None
    assert unlimited.hit_ratio == pytest.approx(2 / 9)


def test_lru_forgets_what_was_used_longest_ago() -> None:
    requests = [(1,), (2,), (1,), (3,), (2,), (1,)]
    assert [hits.hit_ratio for hits in hit_ratios(requests, (1, 2, 3))] == pytest.approx([3 / 6, 0, 1 / 6, 3 / 6])


def naive_lru(requests: list[list[int]], size: int) -> float:
    order: list[int] = []
    hits = total = 0
    for blocks in requests:
        leading = True
        for block in blocks:
            leading = leading and block in order
            hits += leading
        for block in blocks:
            if block in order:
                order.remove(block)
            order.append(block)
            order = order[-size:]
        total += len(blocks)
    return hits / total if total else 0.0


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=30), st.integers(1, 12))
def test_lru_equals_naive_replay(requests: list[list[int]], size: int) -> None:
    assert hit_ratios(requests, (size,))[1].hit_ratio == pytest.approx(naive_lru(requests, size))


def test_chained_blocks_tell_prefixes_apart() -> None:
    first, second = chained_blocks(b"aaaabbbbcc", 4), chained_blocks(b"xxxxbbbb", 4)
    assert len(first) == 2
    assert first[1] != second[1]
    assert chained_blocks(b"aaaabbbb", 4) == first


def test_cache_needs_a_block() -> None:
    with pytest.raises(InvalidInputError):
        hit_ratios([(1,)], (0,))
