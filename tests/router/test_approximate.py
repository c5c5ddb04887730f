"""The index made of the router's own placements."""

from __future__ import annotations

from kvrelay.core.clock import ManualClock
from kvrelay.core.hashing import chain_hashes
from kvrelay.router.approximate import ApproximateIndexer


def scores(indexer: ApproximateIndexer, *locals_: int) -> dict[str, int]:
    index, sequence = indexer.index, chain_hashes(locals_)
    return {name: depth for depth, mask in indexer.find_steps(sequence) for name in index.names(mask)}


def test_placements_expire_and_uses_extend_them() -> None:
    clock = ManualClock()
    indexer = ApproximateIndexer(10.0, clock)
    indexer.place("a", chain_hashes([1, 2, 3]))
    clock.advance(6)
    indexer.place("a", chain_hashes([1, 2]))
    indexer.place("b", chain_hashes([1]))
    assert scores(indexer, 1, 2, 3) == {"a": 3, "b": 1}
    clock.advance(6)
    assert scores(indexer, 1, 2, 3) == {"a": 2, "b": 1}
    clock.advance(6)
    assert scores(indexer, 1, 2, 3) == {}
    assert repr(indexer).startswith("ApproximateIndexer(placements=0, blocks=0")


def test_memory_is_bounded_by_dropping_the_oldest() -> None:
    indexer = ApproximateIndexer(1e9, ManualClock(), max_blocks=100)
    for number in range(1000):
        indexer.place("a", chain_hashes([number, 1, 2]))
    assert indexer.index.num_blocks == 99
    assert scores(indexer, 966, 1) == {}
    assert scores(indexer, 967, 1) == {"a": 2}
    indexer.index.check_integrity()


def test_a_worker_that_left_starts_anew() -> None:
    clock = ManualClock()
    indexer = ApproximateIndexer(10.0, clock)
    indexer.place("a", chain_hashes([1, 2]))
    indexer.place("b", chain_hashes([1]))
    indexer.place("b", ())
    indexer.remove_worker("a")
    indexer.remove_worker("stranger")
    assert scores(indexer, 1, 2) == {"b": 1}
    clock.advance(5)
    indexer.place("a", chain_hashes([1]))
    clock.advance(6)
    assert scores(indexer, 1, 2) == {"a": 1}
