"""Which bytes a peer may touch: its own grant's, of the current generation, until the loan ends."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvrelay.transfer.grants import GrantTable
from kvrelay.transfer.values import GrantRef, TransferOp

READ, WRITE = TransferOp.READ, TransferOp.WRITE


def rows(*pieces: tuple[int, int]) -> np.ndarray:
    return np.array(pieces, np.int64).reshape(-1, 2)


def allowed(table: GrantTable, op: TransferOp, worker: str, grant: GrantRef | None, *pieces: tuple[int, int]) -> bool:
    offsets, lengths = rows(*pieces).T
    with table.touching(op, worker, grant, offsets.copy(), lengths.copy()) as refusal:
        return refusal is None


@pytest.fixture
def table() -> GrantTable:
    """Worker p may read [0, 200) and write [300, 400) and [500, 600)."""
    table = GrantTable()
    table.open(GrantRef("d#1", 1), 1, "p", rows((100, 100), (0, 100)), rows((500, 100), (300, 100)))
    return table


def test_only_what_was_granted_may_be_touched(table: GrantTable) -> None:
    grant = GrantRef("d#1", 1)
    assert allowed(table, READ, "p", grant, (0, 200), (50, 100))
    assert allowed(table, WRITE, "p", grant, (300, 100), (599, 1))
    for op, piece in ((WRITE, (0, 10)), (READ, (300, 10)), (WRITE, (390, 20)), (WRITE, (300, 300)), (READ, (200, 1))):
        assert not allowed(table, op, "p", grant, piece)
    assert not allowed(table, WRITE, "p", grant, (300, 10), (700, 10))
    assert table.num_refused == 6


def test_another_worker_another_generation_and_no_grant_are_refused(table: GrantTable) -> None:
    piece = (300, 10)
    assert not allowed(table, WRITE, "q", GrantRef("d#1", 1), piece)
    assert not allowed(table, WRITE, "p", GrantRef("d#1", 2), piece)
    assert not allowed(table, WRITE, "p", GrantRef("d#2", 1), piece)
    assert not allowed(table, WRITE, "p", None, piece)


def test_a_later_generation_ends_the_earlier_one(table: GrantTable) -> None:
    table.open(GrantRef("d#1", 2), 2, "q", rows(), rows((700, 100)))
    assert not allowed(table, WRITE, "p", GrantRef("d#1", 1), (300, 10))
    assert allowed(table, WRITE, "q", GrantRef("d#1", 2), (700, 100))
    table.close("d#1", 1)
    assert allowed(table, WRITE, "q", GrantRef("d#1", 2), (700, 100)), "the end of an earlier loan is not its end"
    table.close("d#1", 2)
    assert not allowed(table, WRITE, "q", GrantRef("d#1", 2), (700, 100))
    assert table.num_open == 0


def test_a_barred_worker_touches_nothing_until_it_is_admitted(table: GrantTable) -> None:
    grant = GrantRef("d#1", 1)
    table.bar("p")
    assert not allowed(table, WRITE, "p", grant, (300, 10))
    table.admit("p")
    assert allowed(table, WRITE, "p", grant, (300, 10))
    open_table = GrantTable(is_enforced=False)
    assert allowed(open_table, WRITE, "p", None, (0, 10**9))
    open_table.bar("p")
    assert not allowed(open_table, WRITE, "p", None, (0, 1))


def test_the_end_of_a_loan_waits_for_the_copy_that_is_under_way(table: GrantTable) -> None:
    grant, closed = GrantRef("d#1", 1), threading.Event()

    def close() -> None:
        table.close("d#1", 1)
        closed.set()

    closing = threading.Thread(target=close)
    with table.touching(WRITE, "p", grant, np.array([300]), np.array([10])) as refusal:
        assert refusal is None
        closing.start()
        assert not closed.wait(0.05)
    closing.join(60)
    assert closed.is_set()
