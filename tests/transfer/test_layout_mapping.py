"""Plans between unequal layouts of all kinds of regions, against a dense reference copy, value by value."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.transfer.exchanging import exchanging_ranks

from kvrelay.core.layout import BlockRun, KVLayout, KVRegion, RegionCut, paged_kv
from kvrelay.errors import IncompatiblePeerError, TransferError
from kvrelay.transfer.layout_mapping import LayoutMapping
from kvrelay.transfer.pieces import block_pieces, check_bounds
from kvrelay.transfer.values import Pieces, TransferOp

UNTOUCHED = -1
NUM_BLOCKS = 12

Values = npt.NDArray[np.int32]


def layout(*, tp: int = 1, pp: int = 1, block: int = 4, layers: int = 4, heads: int = 2, head_dim: int = 2) -> KVLayout:
    """A worker of a model with so many layers and KV heads."""
    replicas = max(1, tp // heads)
    return paged_kv(layers, heads * replicas, block, head_dim, "int32", tp, pp, replicas)


def cut(model: tuple[KVRegion, ...], *, tp: int, stages: list[list[int]], block: int) -> KVLayout:
    """A worker of any model. ``stages``: of each region, its layers on each stage."""
    regions = [
        RegionCut(region, tuple(layers), max(1, tp // region.num_heads))
        for region, layers in zip(model, stages, strict=True)
    ]
    return KVLayout(block, tuple(regions), tp)


class Pool:
    """A worker's pool, written one value at a time, rank by rank, as the ranks themselves address it."""

    def __init__(self, shape: KVLayout) -> None:
        self.shape = shape
        self.ranks = {
            (stage, rank, number): np.full(
                (
                    NUM_BLOCKS,
                    each.stage_layers[stage],
                    each.region.num_vectors,
                    each.num_slots // shape.tp_size,
                    shape.block_size // each.region.entry_tokens if each.region.entry_tokens else 1,
                    each.region.entry_values,
                ),
                UNTOUCHED,
                np.int32,
            )
            for stage, rank in itertools.product(range(shape.pp_size), range(shape.tp_size))
            for number, each in enumerate(shape.regions)
        }

    def bytes(self) -> npt.NDArray[np.uint8]:
        """A copy of the whole memory."""
        blocks = np.concatenate([part.reshape(NUM_BLOCKS, -1) for part in self.ranks.values()], axis=1)
        return blocks.reshape(-1).view(np.uint8)

    def heads_of(self, region: KVRegion, tp_rank: int) -> list[int]:
        """The model's heads that a rank holds (the executor's rule)."""
        tp = self.shape.tp_size
        if tp > region.num_heads:
            return [tp_rank * region.num_heads // tp]
        share = region.num_heads // tp
        return list(range(tp_rank * share, (tp_rank + 1) * share))

    def put(self, dense: list[Values], table: list[int], tokens: range) -> None:
        for (stage, rank, number), memory in self.ranks.items():
            region, layers = self.shape.regions[number].region, self.shape.regions[number].stage_layers
            first = sum(layers[:stage])
            own = dense[number][:, first : first + layers[stage]][:, :, :, self.heads_of(region, rank)]
            size = self.shape.block_size
            for token in tokens:
                entry_tokens = region.entry_tokens or size
                memory[table[token // size], :, :, :, token % size // entry_tokens] = own[token // entry_tokens]


def dense_kv(shape: KVLayout, num_tokens: int) -> list[Values]:
    """Of each region, [entry, layer, vector, head, value], no value twice."""
    found: list[Values] = []
    for number, region in enumerate(shape.model):
        num_entries = -(-num_tokens // (region.entry_tokens or shape.block_size))
        size = (num_entries, region.num_layers, region.num_vectors, region.num_heads, region.entry_values)
        found.append((np.arange(math.prod(size)) + 10**8 * number).astype(np.int32).reshape(size))
    return found


def carry_out(op: TransferOp, pieces: Pieces, local: npt.NDArray[np.uint8], remote: npt.NDArray[np.uint8]) -> None:
    check_bounds(pieces, local.size, remote.size, "peer")
    for here, there, length in zip(pieces.local_offsets, pieces.remote_offsets, pieces.lengths, strict=True):
        if op is TransferOp.WRITE:
            remote[there : there + length] = local[here : here + length]
        else:
            local[here : here + length] = remote[there : there + length]


def is_merged(op: TransferOp, pieces: Pieces) -> bool:
    """Whether no two pieces could be one."""
    starts = set(zip(pieces.local_offsets.tolist(), pieces.remote_offsets.tolist(), strict=True))
    ends = (pieces.local_offsets + pieces.lengths, pieces.remote_offsets + pieces.lengths)
    return not starts & set(zip(*(each.tolist() for each in ends), strict=True))


def run_of(table: list[int], size: int, begin: int, end: int) -> BlockRun:
    """The blocks that hold the tokens [begin, end)."""
    return BlockRun(begin // size, table[begin // size : -(-end // size)])


def check(op: TransferOp, local: KVLayout, remote: KVLayout, begin: int, end: int, tables: list[list[int]]) -> None:
    """Move the tokens [begin, end), begin a whole unit; everything else stays as it was."""
    mapping = LayoutMapping(local, remote)
    here, there = Pool(local), Pool(remote)
    source, target = (here, there) if op is TransferOp.WRITE else (there, here)
    source_table, target_table = tables if op is TransferOp.WRITE else tables[::-1]
    unit = mapping.unit_tokens
    moved = range(begin, -(-end // unit) * unit)
    dense = dense_kv(local, moved.stop)
    source.put(dense, source_table, moved)
    expected = Pool(target.shape)
    expected.put(dense, target_table, moved)
    runs = [run_of(table, shape.block_size, begin, end) for table, shape in zip(tables, (local, remote), strict=True)]
    pieces = mapping.pieces(op, runs[0], runs[1], begin, moved.stop)
    memories = here.bytes(), there.bytes()
    carry_out(op, pieces, *memories)
    np.testing.assert_array_equal(memories[op is TransferOp.WRITE], expected.bytes())
    assert is_merged(op, pieces)
    if not local.has_states:
        assert pieces.num_bytes == len(moved) * target.shape.block_bytes // target.shape.block_size


DEGREES = (1, 2, 4)
CASES = list(itertools.product(DEGREES, repeat=4))


@pytest.mark.parametrize("blocks", [(16, 16), (16, 32), (32, 16), (32, 32)])
@pytest.mark.parametrize("op", list(TransferOp))
def test_every_pair_of_degrees_and_block_sizes_is_covered(op: TransferOp, blocks: tuple[int, int]) -> None:
    rng = np.random.default_rng(7)
    for tp_here, pp_here, tp_there, pp_there in CASES:
        local = layout(tp=tp_here, pp=pp_here, block=blocks[0], head_dim=1)
        remote = layout(tp=tp_there, pp=pp_there, block=blocks[1], head_dim=1)
        tables = [rng.permutation(NUM_BLOCKS).tolist() for _ in range(2)]
        check(op, local, remote, 32, 75, tables)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[KVLayout, KVLayout]:
    heads, layers = draw(st.sampled_from([1, 2, 4, 6])), draw(st.sampled_from([1, 2, 4, 6]))

    def one() -> KVLayout:
        tp = draw(st.sampled_from([n for n in range(1, 9) if heads % n == 0 or n % heads == 0]))
        pp = draw(st.sampled_from([n for n in range(1, layers + 1) if layers % n == 0]))
        block = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
        return layout(tp=tp, pp=pp, block=block, layers=layers, heads=heads)

    return one(), one()


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_plans_of_random_layouts_equal_the_dense_copy(data: st.DataObject) -> None:
    local, remote = data.draw(layouts())
    unit = math.gcd(local.block_size, remote.block_size)
    limit = NUM_BLOCKS * min(local.block_size, remote.block_size)
    begin = data.draw(st.integers(0, limit // unit - 1)) * unit
    end = data.draw(st.integers(begin + 1, limit))
    tables = [data.draw(st.permutations(range(NUM_BLOCKS))) for _ in range(2)]
    if data.draw(st.booleans()):
        tables = [sorted(table) for table in tables]
    check(data.draw(st.sampled_from(TransferOp)), local, remote, begin, end, tables)


KINDS = (
    KVRegion("kv", 4, 4, 2, "int32"),
    KVRegion("window", 2, 2, 3, "int32", window=128),
    KVRegion("latent", 3, 1, 5, "int32", num_vectors=1),
    KVRegion("compressed", 2, 1, 3, "int32", num_vectors=1, entry_tokens=2),
    KVRegion("packed", 2, 2, 7, "int32", num_vectors=1, entry_tokens=4),
    KVRegion("state", 2, 4, 6, "int32", num_vectors=1, entry_tokens=0),
    KVRegion("tail", 1, 1, 3, "int32", num_vectors=1, entry_tokens=0),
    KVRegion("draft", 1, 2, 2, "int32"),
)


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[KVLayout, KVLayout]:
    """Two workers of a model with some kinds of regions, whose layers lie on their stages in any numbers."""
    model = tuple(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4, unique=True)))
    has_states = any(not region.entry_tokens for region in model)
    sizes = draw(st.lists(st.sampled_from([4, 8, 12]), min_size=2, max_size=2))

    def one(block: int) -> KVLayout:
        pp = draw(st.integers(1, 3))
        cuts = [sorted(draw(st.integers(0, region.num_layers)) for _ in range(pp - 1)) for region in model]
        ends = [[0, *each, region.num_layers] for each, region in zip(cuts, model, strict=True)]
        stages = [[after - before for before, after in itertools.pairwise(each)] for each in ends]
        return cut(model, tp=draw(st.sampled_from([1, 2, 4])), stages=stages, block=block)

    return one(sizes[0]), one(sizes[0] if has_states else sizes[1])


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_mixtures_of_regions_equal_the_dense_copy(data: st.DataObject) -> None:
    local, remote = data.draw(mixtures())
    assert local.flaw is remote.flaw is None
    unit = math.gcd(local.block_size, remote.block_size)
    limit = NUM_BLOCKS * min(local.block_size, remote.block_size)
    begin = data.draw(st.integers(0, limit // unit - 1)) * unit
    end = data.draw(st.integers(begin + 1, limit))
    tables = [data.draw(st.permutations(range(NUM_BLOCKS))) for _ in range(2)]
    check(data.draw(st.sampled_from(TransferOp)), local, remote, begin, end, tables)


def test_states_do_not_move_between_blocks_of_unlike_sizes() -> None:
    here, there = (cut(KINDS[5:6], tp=1, stages=[[2]], block=block) for block in (4, 8))
    with pytest.raises(IncompatiblePeerError, match="states lie at the ends of blocks: block_size is 8 there, 4 here"):
        LayoutMapping(here, there)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("op", list(TransferOp))
def test_equal_ranks_alone_talk_when_tp_is_equal(op: TransferOp, heads: int) -> None:
    shape = layout(tp=4, heads=heads)
    assert exchanging_ranks(shape, shape, op) == {(0, 0), (1, 1), (2, 2), (3, 3)}
    pairs = exchanging_ranks(layout(tp=4, pp=2, heads=heads), shape, op)
    assert {(a % 4, b) for a, b in pairs} == {(0, 0), (1, 1), (2, 2), (3, 3)}


@pytest.mark.parametrize(("tp", "pp"), list(itertools.product(DEGREES, repeat=2)))
def test_equal_layouts_move_one_piece_for_each_run_of_adjacent_blocks(tp: int, pp: int) -> None:
    shape = layout(tp=tp, pp=pp)
    mapping = LayoutMapping(shape, shape)
    local, remote = [4, 5, 6, 9], [0, 1, 2, 7]
    for op in TransferOp:
        pieces = mapping.pieces(op, BlockRun(0, local), BlockRun(0, remote))
        simple = block_pieces(shape, local, remote)
        assert pieces.lengths.tolist() == simple.lengths.tolist()
        assert pieces.remote_offsets.tolist() == simple.remote_offsets.tolist()
    assert mapping.is_plain


def test_stages_side_by_side_are_the_layers_in_order() -> None:
    # A worker of two stages has the same bytes in the same places as one of a single stage.
    mapping = LayoutMapping(layout(pp=2), layout())
    assert mapping.is_plain
    assert mapping.pieces(TransferOp.WRITE, BlockRun(0, [3, 4]), BlockRun(0, [7, 8])).num_pieces == 1


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1), (4, 1), (4, 2), (8, 1)])
def test_no_choice_among_repeated_heads_leaves_fewer_pieces(tp: int, pp: int) -> None:
    """All choices of a copy for each rank of the target, for a source with every head on ``copies`` ranks."""
    heads, layers = 2, 2
    source, target = layout(tp=8, heads=heads, layers=layers), layout(tp=tp, pp=pp, heads=heads, layers=layers)
    mapping = LayoutMapping(source, target)
    found = mapping.pieces(TransferOp.WRITE, BlockRun(0, [0]), BlockRun(0, [0])).num_pieces
    cell_bytes = source.regions[0].cell_bytes(source.block_size)
    part_bytes, replicas = next(source.parts(0)).num_bytes, target.regions[0].head_replicas
    fewest = math.inf
    slots = [slot // replicas for slot in range(target.regions[0].num_slots)]
    for choice in itertools.product(range(4), repeat=len(slots)):
        pieces, end = 0, -1
        for stage, rank in itertools.product(range(pp), range(tp)):
            own = range(rank * len(slots) // tp, (rank + 1) * len(slots) // tp)
            for layer, kv, slot in itertools.product(range(layers // pp), range(2), own):
                copy = slots[slot] * 4 + choice[slot]
                start = copy * part_bytes + ((stage * layers // pp + layer) * 2 + kv) * cell_bytes
                pieces += start != end
                end = start + cell_bytes
        fewest = min(fewest, pieces)
    assert found <= fewest


def test_a_slice_of_the_heads_is_one_piece_for_each_layer_and_k_or_v() -> None:
    whole, halves = layout(heads=4, layers=2), layout(tp=2, heads=4, layers=2)
    pieces = LayoutMapping(whole, halves).pieces(TransferOp.WRITE, BlockRun(0, [3]), BlockRun(0, [0]))
    assert pieces.lengths.tolist() == [2 * 4 * 2 * 4] * 8
    assert pieces.remote_offsets.tolist() == [64 * i for i in range(8)]


def test_blocks_outside_the_common_tokens_are_left_alone() -> None:
    mapping = LayoutMapping(layout(block=16), layout(block=32))
    pieces = mapping.pieces(TransferOp.WRITE, BlockRun(3, [5]), BlockRun(0, [1, 2]))
    assert pieces.num_bytes == 16 * layout().bytes_per_token
    assert (pieces.remote_offsets >= 2 * layout(block=32).block_bytes).all()
    assert mapping.pieces(TransferOp.WRITE, BlockRun(4, [5]), BlockRun(0, [1, 2])).num_pieces == 0
    assert mapping.pieces(TransferOp.WRITE, BlockRun(0, []), BlockRun(0, [])).num_pieces == 0


def test_tokens_that_are_not_whole_units_are_refused() -> None:
    mapping = LayoutMapping(layout(block=16), layout(block=32))
    run = BlockRun(0, [0, 1])
    with pytest.raises(TransferError):
        mapping.pieces(TransferOp.WRITE, run, run, first_token=8)
    with pytest.raises(TransferError):
        mapping.pieces(TransferOp.WRITE, run, run, end_token=8)
    with pytest.raises(TransferError):
        mapping.pieces(TransferOp.WRITE, BlockRun(0, [-1]), run)


@pytest.mark.parametrize(
    "other",
    [
        layout(layers=6),
        layout(heads=4),
        layout(head_dim=4),
        paged_kv(4, 2, 4, 2, "float32"),
        paged_kv(4, 2, 4, 2, "text"),
        KVLayout(4, (RegionCut(KVRegion("kv", 4, 2, 2, "int32"), (2, 1)),)),
        KVLayout(4, (RegionCut(KVRegion("latent", 4, 2, 2, "int32"), (4,)),)),
        paged_kv(4, 2, 4, 2, "int32", tp_size=4),
        paged_kv(4, 4, 4, 2, "int32", tp_size=2, head_replicas=2),
        paged_kv(4, 3, 4, 2, "int32", tp_size=3, head_replicas=2),
    ],
)
def test_what_no_plan_covers_is_refused(other: KVLayout) -> None:
    with pytest.raises(IncompatiblePeerError):
        LayoutMapping(layout(), other)
    with pytest.raises(IncompatiblePeerError):
        LayoutMapping(other, layout())
