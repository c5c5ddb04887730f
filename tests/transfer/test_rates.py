"""The cost of transfers per token and peer, from a transfer thread's counts."""

from __future__ import annotations

import pytest

from kvrelay.core.events import MAX_FLOWS, MAX_TRANSFER_PEERS, Flow, TransferCost
from kvrelay.transfer.rates import SHARE, TransferRates
from kvrelay.transfer.stats import PeerTransferStats, TransferStats
from kvrelay.transfer.values import TransferOp

TOKEN_BYTES = 1000


def peer(name: str, num_tokens: int, seconds: float, op: TransferOp = TransferOp.WRITE) -> PeerTransferStats:
    return PeerTransferStats(name, op, num_transfers=1, num_bytes=num_tokens * TOKEN_BYTES, seconds=seconds)


def test_a_cost_follows_what_was_moved_since_the_last_sample() -> None:
    rates = TransferRates(TOKEN_BYTES)
    assert rates.update([]) == ()
    assert rates.update([peer("d", 100, 0.1)]) == (TransferCost("d", pytest.approx(1e-3)),)
    assert rates.update([peer("d", 100, 0.1)])[0].token_s == pytest.approx(1e-3), "nothing was moved"
    assert rates.relative_error == 0.0
    (cost,) = rates.update([peer("d", 200, 0.3)])
    assert cost.token_s == pytest.approx(1e-3 + SHARE * 1e-3)
    assert rates.relative_error == pytest.approx(SHARE * 0.5)


def test_reads_and_writes_of_a_pair_count_together_and_failures_not_at_all() -> None:
    rates = TransferRates(TOKEN_BYTES)
    found = rates.update([peer("d", 100, 0.1), peer("d", 100, 0.3, TransferOp.READ), peer("e", 0, 5.0)])
    assert found == (TransferCost("d", pytest.approx(2e-3)),)


def test_departed_workers_are_forgotten_and_the_latest_peers_are_published() -> None:
    rates = TransferRates(TOKEN_BYTES)
    many = [peer(f"d{number}", 10, 0.01) for number in range(MAX_TRANSFER_PEERS + 5)]
    rates.update(many)
    found = rates.update([peer("d0", 20, 0.02), *many[1:]])
    assert len(found) == MAX_TRANSFER_PEERS
    assert found[-1].worker_id == "d0", "used last"
    assert "d1" not in {cost.worker_id for cost in found}
    assert rates.update([peer("", 500, 1.0), many[3]]) == (TransferCost("d3", pytest.approx(1e-3)),)


def test_flows_are_the_largest_of_present_peers() -> None:
    gone = PeerTransferStats("", TransferOp.WRITE, num_transfers=9, num_bytes=10**9)
    many = [PeerTransferStats(f"d{n}", TransferOp.WRITE, 2, 1, n, 3, 0.5) for n in range(MAX_FLOWS)]
    read = PeerTransferStats("d0", TransferOp.READ, 1, 0, 10**6, 1, 0.25)
    flows = TransferStats((gone, *many, read), 0, 0, 0).flows()
    assert len(flows) == MAX_FLOWS
    assert flows[:2] == (Flow("d0", True, 1, 10**6, 0.25), Flow(f"d{MAX_FLOWS - 1}", False, 2, MAX_FLOWS - 1, 0.5))
