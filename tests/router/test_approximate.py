"""The index made of the router's own placements."""

from __future__ import annotations

import random

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
    assert repr(indexer) == "ApproximateIndexer(placements=0, stretches=0)"


def test_memory_is_bounded_by_dropping_the_oldest() -> None:
    indexer = ApproximateIndexer(1e9, ManualClock(), max_blocks=100)
    for number in range(1000):
        indexer.place("a", compute_sequence_hashes([number, 1, 2], 1))
    assert scores(indexer, 950, 1) == {}
    assert scores(indexer, 980, 1) == {"a": 2}
    assert repr(indexer) == "ApproximateIndexer(placements=33, stretches=33)"


def test_one_prompt_larger_than_the_bound_is_dropped_with_the_next() -> None:
    indexer = ApproximateIndexer(1e9, ManualClock(), max_blocks=10)
    indexer.place("a", compute_sequence_hashes(range(1, 50), 1))
    indexer.place("a", compute_sequence_hashes([100], 1))
    assert scores(indexer, *range(1, 50)) == {}
    assert scores(indexer, 100) == {"a": 1}


def test_blocks_that_are_gone_end_the_placements_that_end_with_them() -> None:
    clock = ManualClock()
    indexer = ApproximateIndexer(8.0, clock)
    sequence = compute_sequence_hashes([1, 2, 3], 1)
    for name in ("a", "b", "a"):
        indexer.place(name, sequence)
        clock.advance(3)
    indexer.place("b", sequence[:1])
    indexer.place("a", sequence[:1])
    indexer.remove("a", sequence[:0:-1])
    indexer.remove("stranger", sequence)
    assert scores(indexer, 1, 2, 3) == {"a": 1, "b": 3}
    indexer.place("b", sequence)
    assert scores(indexer, 1, 2, 3) == {"a": 1, "b": 3}
    indexer.remove("b", sequence)
    assert scores(indexer, 1, 2, 3) == {"a": 1}
    indexer.place("a", sequence)
    assert scores(indexer, 1, 2, 3) == {"a": 3}
    clock.advance(20)
    assert scores(indexer, 1, 2, 3) == {}
    assert repr(indexer) == "ApproximateIndexer(placements=0, stretches=0)"


def test_any_placements_are_found_as_in_a_list_of_them() -> None:
    rng = random.Random(7)
    for _ in range(40):
        clock = ManualClock()
        indexer = ApproximateIndexer(8.0, clock)
        placed: list[tuple[float, str, tuple[int, ...]]] = []
        for _ in range(120):
            sequence = compute_sequence_hashes([rng.randrange(2) for _ in range(rng.randrange(12))], 1)
            worker_id = rng.choice("abc")
            if rng.random() < 0.05:
                indexer.remove_worker(worker_id)
                placed = [entry for entry in placed if entry[1] != worker_id]
            elif rng.random() < 0.6:
                indexer.place(worker_id, sequence)
                placed.append((clock.now(), worker_id, sequence))
            else:
                clock.advance(rng.random() * 2)
            expected: dict[str, int] = {}
            for placed_s, name, known in placed:
                if placed_s >= clock.now() - 8.0 and (common := len({*known} & {*sequence})):
                    expected[name] = max(expected.get(name, 0), common)
            found = indexer.find_holders(sequence)
            assert {name: depth for depth, group in found for name in group.names} == expected
            assert [depth for depth, _ in found] == sorted({depth for depth, _ in found})
        clock.advance(9)
        assert indexer.find_holders(()) == []
        assert repr(indexer) == "ApproximateIndexer(placements=0, stretches=0)"


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
