"""Small pieces by way of a buffer: the same bytes, and the buffer is never used by two posts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contracts.test_transport import Pair, make_end

from kvrelay.config import TransferConfig
from kvrelay.core.layout import BlockRun, KVLayout, paged_kv
from kvrelay.errors import FatalError
from kvrelay.transfer.layout_mapping import LayoutMapping
from kvrelay.transfer.nixl import NixlTransport
from kvrelay.transfer.packing import ALWAYS, MAX_LOST, NEVER, NIXL_RULE, PackingBuffer, stage
from kvrelay.transfer.values import Pieces, TransferOp

PIECE = 8


@st.composite
def some_pieces(draw: st.DrawFn) -> Pieces:
    """Pieces that overlap on neither side, in any order."""
    count = draw(st.integers(1, 12))
    local, remote = (draw(st.permutations(range(16)))[:count] for _ in range(2))
    lengths = draw(st.lists(st.sampled_from([1, 3, PIECE]), min_size=count, max_size=count))
    return Pieces(
        *(np.array(each, dtype=np.int64) for each in ([PIECE * i for i in local], [PIECE * i for i in remote], lengths))
    )


def copied(target: np.ndarray, at: np.ndarray, source: np.ndarray, where: np.ndarray, lengths: np.ndarray) -> None:
    for there, here, length in zip(at, where, lengths, strict=True):
        target[there : there + length] = source[here : here + length]


@given(some_pieces())
@settings(max_examples=100, deadline=None)
def test_by_way_of_the_buffer_the_same_bytes_move(pieces: Pieces) -> None:
    source = np.arange(128, dtype=np.uint8)
    packed, wire = (staged := stage(pieces)).packed, staged.wire
    direct, target, buffer = np.full(128, 255, np.uint8), np.full(128, 255, np.uint8), np.zeros(128, np.uint8)
    copied(direct, pieces.remote_offsets, source, pieces.local_offsets, pieces.lengths)
    copied(buffer, packed.remote_offsets, source, packed.local_offsets, packed.lengths)
    copied(target, wire.remote_offsets, buffer, wire.local_offsets, wire.lengths)
    np.testing.assert_array_equal(target, direct)
    direct, target = np.full(128, 255, np.uint8), np.full(128, 255, np.uint8)
    copied(direct, pieces.local_offsets, source, pieces.remote_offsets, pieces.lengths)
    copied(buffer, wire.local_offsets, source, wire.remote_offsets, wire.lengths)
    copied(target, packed.local_offsets, buffer, packed.remote_offsets, packed.lengths)
    np.testing.assert_array_equal(target, direct)
    assert wire.num_bytes == pieces.num_bytes
    assert (wire.remote_offsets[1:] > (wire.remote_offsets + wire.lengths)[:-1]).all()


def layout(tp: int = 1, block: int = 16) -> KVLayout:
    return paged_kv(8, 8, block, 128, "bfloat16", tp)


@pytest.mark.parametrize(
    ("local", "remote", "pays"),
    [(layout(), layout(), False), (layout(), layout(block=32), True), (layout(block=32), layout(), True)],
)
def test_the_rule_packs_small_pieces_only(local: KVLayout, remote: KVLayout, pays: bool) -> None:
    runs = [BlockRun(0, range(64 * 16 // shape.block_size)) for shape in (local, remote)]
    pieces = LayoutMapping(local, remote).pieces(TransferOp.WRITE, *runs)
    assert NIXL_RULE.pays(pieces, stage(pieces).wire.num_pieces) == pays
    assert not NEVER.pays(pieces, 1)


PLAN = Pieces(np.array([0, 16, 32]), np.array([40, 48, 56]), np.array([8, 8, 8]))


class Memory:
    """A pool, and a buffer over it whose copy is loaded."""

    def __init__(self, register: Callable[[int, int], None] | None = None) -> None:
        self.pool = np.arange(64, dtype=np.uint8)
        self.registered: list[int] = []
        self.buffer = PackingBuffer(register or (lambda address, num_bytes: self.registered.append(address)))
        if self.take(0) is not None:
            self.buffer.give_back(0, is_complete=True)
        self.buffer.close()

    def take(self, handle: int, op: TransferOp = TransferOp.WRITE) -> tuple[Pieces, int] | None:
        return self.buffer.take(handle, op, self.pool.ctypes.data, PLAN, ALWAYS)


def test_one_post_at_a_time_has_the_buffer() -> None:
    memory = Memory()
    taken = memory.take(1)
    assert taken is not None
    wire, address = taken
    assert (wire.remote_offsets.tolist(), wire.lengths.tolist()) == ([40], [24])
    assert memory.registered == [address]
    assert memory.take(2) is None
    memory.buffer.give_back(2, is_complete=True)
    assert memory.take(3) is None
    memory.buffer.give_back(1, is_complete=True)
    assert memory.take(4) is not None
    assert memory.registered == [address]


def test_what_a_failed_read_has_left_is_not_unpacked_and_its_buffer_not_used_again() -> None:
    memory = Memory()
    before = memory.pool.copy()
    for handle in range(MAX_LOST):
        assert memory.take(handle, TransferOp.READ) is not None
        memory.buffer.give_back(handle, is_complete=False)
    np.testing.assert_array_equal(memory.pool, before)
    assert len(set(memory.registered)) == MAX_LOST
    assert memory.take(9) is None


def test_a_buffer_that_cannot_be_registered_is_done_without() -> None:
    def refuse(address: int, num_bytes: int) -> None:
        raise FatalError("no")

    memory = Memory(refuse)
    assert memory.take(1) is None
    assert memory.take(2) is None


@pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="NIXL is not installed")
@pytest.mark.parametrize("op", list(TransferOp))
def test_nixl_moves_the_same_bytes_either_way(op: TransferOp) -> None:
    names = [f"staging-{op.value}-{role}" for role in ("p", "d")]
    transports = [NixlTransport(TransferConfig(), name) for name in names]
    ends = [make_end(transport, names[seed], seed, None) for seed, transport in enumerate(transports)]
    pair, prefill, decode = Pair(*ends), ends[0].pool, ends[1].pool
    try:
        here, there = paged_kv(2, 2, 4, 16, "float32", tp_size=2), paged_kv(2, 2, 8, 16, "float32")
        pieces = LayoutMapping(here, there).pieces(op, BlockRun(0, [5, 9, 7, 8]), BlockRun(0, [20, 3]))
        before = prefill.copy(), decode.copy()
        results = []
        transports[0].rule = ALWAYS
        assert pair.move(op, pieces) is None
        transports[0].staging.close()
        for rule in (NEVER, ALWAYS):
            prefill[:], decode[:] = before
            transports[0].rule = rule
            assert pair.move(op, pieces, b"done") is None
            results.append((prefill.copy(), decode.copy()))
        pair.poll_until(lambda: pair.decode.payloads == [b"done"] * 2)
        for one, other in zip(*results, strict=True):
            np.testing.assert_array_equal(one, other)
        assert not (np.array_equal(before[0], results[0][0]) and np.array_equal(before[1], results[0][1]))
        assert transports[0].staging.num_staged >= 1
    finally:
        for transport in transports:
            transport.close()
