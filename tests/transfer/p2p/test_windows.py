"""Which bytes a peer may touch: its own window's, of the current generation, until the loan ends."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest

from kvrelay.core.window import MemoryWindow, RemoteKey
from kvrelay.transfer.p2p.messages import Get, decode, encode
from kvrelay.transfer.values import TransferOp
from kvrelay.transfer.windows import WindowTable

READ, WRITE = TransferOp.READ, TransferOp.WRITE


KEY = RemoteKey("d#1", 1)


def allowed(table: WindowTable, op: TransferOp, worker: str, key: RemoteKey | None, *pieces: tuple[int, int]) -> bool:
    offsets, lengths = np.array(pieces, np.int64).reshape(-1, 2).T
    with table.touching(op, worker, key, offsets.copy(), lengths.copy()) as refusal:
        return refusal is None


@pytest.fixture
def table() -> WindowTable:
    """Blocks of 100 bytes: worker p may read [0, 200) and write [300, 400) and [500, 600)."""
    table = WindowTable()
    table.open(MemoryWindow(KEY, 1, "p", (1, 0), (5, 3), 100, 100))
    return table


def test_only_the_blocks_of_the_window_may_be_touched(table: WindowTable) -> None:
    assert allowed(table, READ, "p", KEY, (0, 200), (50, 100))
    assert allowed(table, WRITE, "p", KEY, (300, 100), (599, 1))
    for op, piece in ((WRITE, (0, 10)), (READ, (300, 10)), (WRITE, (390, 20)), (WRITE, (300, 300)), (READ, (200, 1))):
        assert not allowed(table, op, "p", KEY, piece)
    assert not allowed(table, WRITE, "p", KEY, (300, 10), (700, 10))
    assert table.num_refused == 6


def test_another_worker_another_generation_and_no_key_are_refused(table: WindowTable) -> None:
    piece = (300, 10)
    assert not allowed(table, WRITE, "q", KEY, piece)
    assert not allowed(table, WRITE, "p", RemoteKey("d#1", 2), piece)
    assert not allowed(table, WRITE, "p", RemoteKey("d#2", 1), piece)
    assert not allowed(table, WRITE, "p", None, piece)


def test_a_later_generation_ends_the_earlier_one(table: WindowTable) -> None:
    table.open(MemoryWindow(RemoteKey("d#1", 2), 2, "q", (), (7,), 100, 100))
    assert not allowed(table, WRITE, "p", KEY, (300, 10))
    assert allowed(table, WRITE, "q", RemoteKey("d#1", 2), (700, 100))
    table.close("d#1", 1)
    assert allowed(table, WRITE, "q", RemoteKey("d#1", 2), (700, 100)), "the end of an earlier loan is not its end"
    table.close("d#1", 2)
    assert not allowed(table, WRITE, "q", RemoteKey("d#1", 2), (700, 100))
    assert table.num_open == 0


def test_a_barred_worker_touches_nothing_until_it_is_admitted(table: WindowTable) -> None:
    table.bar("p")
    assert not allowed(table, WRITE, "p", KEY, (300, 10))
    table.admit("p")
    assert allowed(table, WRITE, "p", KEY, (300, 10))
    open_table = WindowTable(is_enforced=False)
    assert allowed(open_table, WRITE, "p", None, (0, 10**9))
    open_table.bar("p")
    assert not allowed(open_table, WRITE, "p", None, (0, 1))


def test_a_part_of_each_block_is_a_ranks() -> None:
    """Bytes [20, 50) of each block of 100."""
    table = WindowTable()
    table.open(MemoryWindow(KEY, 1, "p", (), (3, 4), 30, 100, 20))
    assert allowed(table, WRITE, "p/1", KEY, (320, 30), (420, 30))
    for piece in ((319, 30), (320, 31), (320, 130), (220, 30)):
        assert not allowed(table, WRITE, "p/1", KEY, piece)


def test_the_end_of_a_loan_waits_for_the_copy_that_is_under_way(table: WindowTable) -> None:
    closed = threading.Event()

    def close() -> None:
        table.close("d#1", 1)
        closed.set()

    closing = threading.Thread(target=close)
    with table.touching(WRITE, "p", KEY, np.array([300]), np.array([10])) as refusal:
        assert refusal is None
        closing.start()
        assert not closed.wait(0.05)
    closing.join(60)
    assert closed.is_set()


def test_peers_of_earlier_versions_know_the_key_as_the_grant() -> None:
    """``messages.VERSION`` has not changed."""
    frame = encode(Get("", 1, 8, bytes(8), bytes(8), RemoteKey("d#1", 2)))
    assert msgspec.msgpack.decode(frame[1:])["grant"] == ["d#1", 2]
    assert decode(frame).key == RemoteKey("d#1", 2)
