"""The index made of the router's own placements."""

from __future__ import annotations

from kvrelay.core.clock import ManualClock
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.router.approximate import ApproximateIndexer


def scores(indexer: ApproximateIndexer, *locals_: int) -> dict[str, int]:
    holders = indexer.find_holders(compute_sequence_hashes(locals_, 1))
    return {name: depth for depth, group in holders for name in group.names}


def test_placements_expire_and_uses_extend_them() -> None:
    clock = ManualClock()
    indexer = ApproximateIndexer(8.0, clock)
    indexer.place("a", compute_sequence_hashes([1, 2, 3], 1))
    clock.advance(6)
    indexer.place("a", compute_sequence_hashes([1, 2], 1))
    indexer.place("b", compute_sequence_hashes([1], 1))
    assert scores(indexer, 1, 2, 3) == {"a": 3, "b": 1}
    clock.advance(2)
    assert scores(indexer, 1, 2, 3) == {"a": 3, "b": 1}
    clock.advance(2)
    assert scores(indexer, 1, 2, 3) == {"a": 2, "b": 1}
    clock.advance(6)
    assert scores(indexer, 1, 2, 3) == {}
    indexer.index.compact()
    assert repr(indexer) == "ApproximateIndexer(windows=0, blocks=0, PrefixIndex(workers=0, blocks=0, segments=0))"


def test_memory_is_bounded_by_dropping_the_oldest() -> None:
    indexer = ApproximateIndexer(1e9, ManualClock(), max_blocks=100)
    for number in range(1000):
        indexer.place("a", compute_sequence_hashes([number, 1, 2], 1))
        assert indexer.index.num_blocks < 200
    assert scores(indexer, 950, 1) == {}
    assert scores(indexer, 980, 1) == {"a": 2}
    indexer.index.compact()
    indexer.index.check_integrity()
    assert 50 <= indexer.index.num_blocks <= 103


def test_one_prompt_larger_than_the_bound_is_dropped_with_the_next() -> None:
    indexer = ApproximateIndexer(1e9, ManualClock(), max_blocks=10)
    indexer.place("a", compute_sequence_hashes(range(1, 50), 1))
    indexer.place("a", compute_sequence_hashes([100], 1))
    assert scores(indexer, *range(1, 50)) == {}
    assert scores(indexer, 100) == {"a": 1}


def test_blocks_that_are_gone_are_gone_from_every_window() -> None:
    clock = ManualClock()
    indexer = ApproximateIndexer(8.0, clock)
    sequence = compute_sequence_hashes([1, 2, 3], 1)
    for name in ("a", "b", "a"):
        indexer.place(name, sequence)
        clock.advance(3)
    indexer.remove("a", sequence[1:])
    indexer.remove("stranger", sequence)
    assert scores(indexer, 1, 2, 3) == {"a": 1, "b": 3}
    indexer.place("a", sequence)
    assert scores(indexer, 1, 2, 3) == {"a": 3, "b": 3}
    indexer.index.check_integrity()


def test_a_worker_that_left_starts_anew() -> None:
    clock = ManualClock()
    indexer = ApproximateIndexer(8.0, clock)
    indexer.place("a", compute_sequence_hashes([1, 2], 1))
    indexer.place("b", compute_sequence_hashes([1], 1))
    indexer.place("b", ())
    indexer.remove_worker("a")
    indexer.remove_worker("stranger")
    assert scores(indexer, 1, 2) == {"b": 1}
    clock.advance(5)
    indexer.place("a", compute_sequence_hashes([1], 1))
    clock.advance(6)
    assert scores(indexer, 1, 2) == {"a": 1}


def test_a_group_is_given_out_again_until_its_workers_leave() -> None:
    clock = ManualClock()
    indexer = ApproximateIndexer(8.0, clock)
    blocks = compute_sequence_hashes([1, 2], 1)
    for worker_id in ("a", "b"):
        indexer.place(worker_id, blocks)
        ((_, first),), ((_, second),) = indexer.find_holders(blocks), indexer.find_holders(blocks)
        assert first is second
        assert first.names == (worker_id,)
        clock.advance(20)
        assert scores(indexer, 1, 2) == {}
        indexer.index.compact()  # the next holder gets the same bit
