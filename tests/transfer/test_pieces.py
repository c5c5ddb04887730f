"""Plans against a naive copy, element by element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.core.layout import paged_kv
from kvrelay.errors import TransferError
from kvrelay.transfer.pieces import block_pieces, split_pieces
from kvrelay.transfer.values import Pieces

LAYOUT = paged_kv(num_layers=2, num_kv_heads=2, block_size=4, head_dim=2, dtype="bfloat16")


def apply(pieces: Pieces, local: np.ndarray, remote: np.ndarray) -> None:
    """A write, by bytes."""
    for here, there, length in zip(pieces.local_offsets, pieces.remote_offsets, pieces.lengths, strict=True):
        remote[there : there + length] = local[here : here + length]


def test_adjacent_blocks_become_one_piece() -> None:
    pieces = block_pieces(LAYOUT, [4, 5, 6, 9], [0, 1, 2, 7])
    size = LAYOUT.block_bytes
    assert pieces.local_offsets.tolist() == [4 * size, 9 * size]
    assert pieces.remote_offsets.tolist() == [0, 7 * size]
    assert pieces.lengths.tolist() == [3 * size, size]
    assert pieces.num_bytes == 4 * size


def test_blocks_handed_out_backwards_merge_too() -> None:
    assert block_pieces(LAYOUT, [9, 8, 7, 6], [5, 4, 3, 2]).num_pieces == 1


def test_blocks_adjacent_on_one_side_only_do_not_merge() -> None:
    assert block_pieces(LAYOUT, [0, 1, 2], [0, 2, 4]).num_pieces == 3
    assert block_pieces(LAYOUT, [0, 1, 2], [2, 1, 0]).num_pieces == 3


def test_no_blocks_are_an_empty_plan() -> None:
    assert block_pieces(LAYOUT, [], []).num_pieces == 0


@pytest.mark.parametrize(
    ("local", "remote"), [([1], [1, 2]), ([-1], [0]), ([0], [2**31]), ([2**62], [0]), ([2**70], [0]), (["x"], [0])]
)
def test_impossible_block_ids_are_refused(local: list[int], remote: list[int]) -> None:
    with pytest.raises(TransferError):
        block_pieces(LAYOUT, local, remote)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_block_plans_equal_the_naive_copy(data: st.DataObject) -> None:
    num_blocks = 24
    pairs = data.draw(st.lists(st.permutations(range(num_blocks)), min_size=2, max_size=2))
    count = data.draw(st.integers(0, num_blocks))
    local_ids, remote_ids = pairs[0][:count], pairs[1][:count]
    if data.draw(st.booleans()):
        local_ids, remote_ids = sorted(local_ids), sorted(remote_ids)
    size = LAYOUT.block_bytes
    local = np.arange(num_blocks * size, dtype=np.int64)
    remote = np.full(num_blocks * size, -1, dtype=np.int64)
    expected = remote.copy().reshape(num_blocks, size)
    expected[remote_ids] = local.reshape(num_blocks, size)[local_ids]
    pieces = block_pieces(LAYOUT, local_ids, remote_ids)
    apply(pieces, local, remote)
    np.testing.assert_array_equal(remote.reshape(num_blocks, size), expected)
    assert pieces.num_bytes == count * size


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(1, 40)), max_size=12), st.integers(1, 60))
def test_split_plans_move_the_same_bytes_in_small_parts(pieces: list[tuple[int, int, int]], max_bytes: int) -> None:
    local, remote, lengths = (np.array([piece[i] for piece in pieces], dtype=np.int64) for i in range(3))
    parts = list(split_pieces(Pieces(local, remote, lengths), max_bytes))
    assert parts
    assert all(part.num_bytes <= max_bytes for part in parts)
    moved = [
        (int(a) + i, int(b) + i)
        for part in parts
        for a, b, length in zip(part.local_offsets, part.remote_offsets, part.lengths, strict=True)
        for i in range(length)
    ]
    assert moved == [(a + i, b + i) for a, b, length in pieces for i in range(length)]
