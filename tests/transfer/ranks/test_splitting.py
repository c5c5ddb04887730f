"""Splitting by ranks, against copies block by block in the joined pool."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.core.layout import BlockRun, KVLayout, paged_kv
from kvrelay.core.window import MemoryWindow, RemoteKey
from kvrelay.transfer.layout_mapping import LayoutMapping
from kvrelay.transfer.pieces import NO_PIECES
from kvrelay.transfer.ranks.messages import RankMemory
from kvrelay.transfer.ranks.splitting import RankCut, rank_pairs, split
from kvrelay.transfer.values import Pieces, TransferOp

NUM_BLOCKS = 6
NUM_HEADS, NUM_LAYERS = 2, 2


def layout_of(tp: int, pp: int, block_size: int = 4) -> KVLayout:
    slots = max(NUM_HEADS, tp)
    return paged_kv(NUM_LAYERS, slots, block_size, 2, "uint8", tp, pp, slots // NUM_HEADS)


class Pool:
    """A worker's pool three ways: joined, in a memory per rank, and how it is cut."""

    def __init__(self, layout: KVLayout, kind: str, seed: int) -> None:
        self.layout, self.kind = layout, kind
        size = NUM_BLOCKS * layout.block_bytes
        self.joined = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
        ends = [*layout.rank_offsets[1:], layout.block_bytes]
        self.parts = list(zip(layout.rank_offsets, ends, strict=True))
        memories = [RankMemory(b"", 1, size)]
        if kind == "joined":
            memories = [RankMemory(b"", 1, size, begin=begin, stride=layout.block_bytes) for begin, _ in self.parts]
        elif kind == "own":
            memories = [RankMemory(b"", 1, size, stride=end - begin) for begin, end in self.parts]
        self.cut = RankCut.of(layout, memories)
        blocks = self.joined.reshape(NUM_BLOCKS, -1)
        if kind == "own":
            self.memories = [blocks[:, begin:end].copy().reshape(-1) for begin, end in self.parts]
        else:
            self.memories = [self.joined] * len(memories)

    def now(self) -> np.ndarray:
        """The joined pool as its ranks' memories say."""
        if self.kind != "own":
            return self.joined
        blocks = [memory.reshape(NUM_BLOCKS, -1) for memory in self.memories]
        return np.concatenate(blocks, axis=1).reshape(-1)


def copy(pieces: Pieces, op: TransferOp, here: np.ndarray, there: np.ndarray) -> None:
    sides = pieces.local_offsets.tolist(), pieces.remote_offsets.tolist(), pieces.lengths.tolist()
    for local, remote, length in zip(*sides, strict=True):
        if op is TransferOp.WRITE:
            there[remote : remote + length] = here[local : local + length]
        else:
            here[local : local + length] = there[remote : remote + length]


kinds = st.sampled_from(["one", "joined", "own"])
degrees = st.sampled_from([1, 2, 4])
stages = st.sampled_from([1, 2])


@settings(max_examples=300, deadline=None)
@given(
    sides=st.tuples(*(st.tuples(degrees, stages, kinds, st.sampled_from([2, 4])) for _ in range(2))),
    op=st.sampled_from(list(TransferOp)),
    ids=st.tuples(*(st.permutations(range(NUM_BLOCKS)) for _ in range(2))),
    count=st.integers(1, NUM_BLOCKS),
    cut_at=st.integers(1, 7),
)
def test_ranks_move_the_bytes_that_one_process_would_move(
    sides: tuple[tuple[int, int, str, int], ...], op: TransferOp, ids: tuple[list[int], ...], count: int, cut_at: int
) -> None:
    here, there = (Pool(layout_of(tp, pp, size), kind, seed) for seed, (tp, pp, kind, size) in enumerate(sides))
    mapping = LayoutMapping(here.layout, there.layout)
    pieces = mapping.pieces(op, BlockRun(0, ids[0][:count]), BlockRun(0, ids[1][:count]))
    # Posts are cut at any byte.
    if pieces.num_pieces and pieces.lengths[0] > cut_at:
        shifts = np.array([0, cut_at])
        pieces = Pieces(
            np.concatenate((pieces.local_offsets[0] + shifts, pieces.local_offsets[1:])),
            np.concatenate((pieces.remote_offsets[0] + shifts, pieces.remote_offsets[1:])),
            np.concatenate(([cut_at, pieces.lengths[0] - cut_at], pieces.lengths[1:])),
        )
    expected = here.joined.copy(), there.joined.copy()
    copy(pieces, op, *expected)
    parts = split(pieces, here.cut, there.cut)
    assert len({(part.local, part.remote) for part in parts}) == len(parts)
    assert sum(part.pieces.num_bytes for part in parts) == pieces.num_bytes
    for part in parts:
        copy(part.pieces, op, here.memories[part.local], there.memories[part.remote])
    np.testing.assert_array_equal(here.now(), expected[0])
    np.testing.assert_array_equal(there.now(), expected[1])


def test_nothing_is_no_part() -> None:
    cut = Pool(layout_of(2, 1), "own", 0).cut
    assert split(NO_PIECES, cut, cut) == split(NO_PIECES, None, None) == []


def test_adjacent_blocks_are_one_piece_in_memory_of_the_ranks_own() -> None:
    pool = Pool(layout_of(2, 2), "own", 0)
    whole = Pieces(*(np.array([value]) for value in (0, 0, len(pool.joined))))
    parts = split(whole, pool.cut, pool.cut)
    assert [(part.local, part.remote, part.pieces.num_pieces) for part in parts] == [(i, i, 1) for i in range(4)]


@pytest.mark.parametrize(("ours", "theirs"), [((2, 1), (2, 1)), ((4, 1), (2, 1)), ((1, 2), (2, 2)), ((2, 2), (4, 1))])
def test_ranks_connect_as_the_map_says_and_post_to_no_others(ours: tuple[int, int], theirs: tuple[int, int]) -> None:
    here, there = Pool(layout_of(*ours), "own", 0), Pool(layout_of(*theirs), "own", 1)
    pairs = rank_pairs(here.cut, there.cut)
    for op in TransferOp:
        pieces = LayoutMapping(here.layout, there.layout).pieces(op, BlockRun(0, [0, 1]), BlockRun(0, [2, 3]))
        used = {(part.local, part.remote) for part in split(pieces, here.cut, there.cut)}
        assert used <= set(pairs) or max(ours[0], theirs[0]) > NUM_HEADS  # repeated heads leave a choice


def test_a_rank_connects_to_all_ranks_of_a_worker_of_one_process() -> None:
    cut = Pool(layout_of(2, 2), "own", 0).cut
    assert rank_pairs(None, cut) == [(0, rank) for rank in range(4)]
    assert rank_pairs(cut, None) == [(rank, 0) for rank in range(4)]
    assert rank_pairs(None, None) == [(0, 0)]


@pytest.mark.parametrize("kind", ["own", "joined"])
def test_a_window_is_onto_each_ranks_part_of_its_blocks(kind: str) -> None:
    """Stages of two layers and of one. In a rank's own memory its parts of the blocks are side by side."""
    pool = Pool(paged_kv(3, NUM_HEADS, 4, 2, "uint8", 2, 2), kind, 0)
    size = pool.layout.block_bytes
    window = MemoryWindow(RemoteKey("d#1", 1), 7, "p", (2,), (3, 0), size, size)
    places = [
        (end - begin, size, begin) if kind == "joined" else (end - begin, end - begin, 0) for begin, end in pool.parts
    ]
    assert len({part for part, _, _ in places}) == 2
    assert [(w.block_bytes, w.stride, w.begin) for w in pool.cut.windows(window)] == places


@pytest.mark.parametrize("count", [0, 2, 3, 5])
def test_other_numbers_of_memories_than_ranks_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="not those of the ranks"):
        RankCut.of(layout_of(2, 2), [RankMemory(b"", 1, 1)] * count)
