"""Both indices do the same: the same scenarios on each, and random interleavings on both at once."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tests.router.radix_tree import RadixTree, StoredByTokens

from kvrelay.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.router.overlap import OverlapScores, ParentNotFoundError
from kvrelay.router.prefix_index import PrefixIndex


class Both:
    """One index of either kind, spoken to in local hashes."""

    def __init__(self, fast: bool) -> None:
        self.fast = PrefixIndex() if fast else None
        self.index = self.fast or RadixTree()

    def stored(self, worker: str, locals_: list[int], start: int = 0) -> None:
        self.index.apply_event(worker, stored(locals_, start))

    def removed(self, worker: str, locals_: list[int], *positions: int) -> None:
        chain = compute_sequence_hashes(locals_, 1)
        self.index.apply_event(worker, BlockRemoved(tuple(chain[at] for at in positions)))

    def find(self, locals_: list[int], early_exit: bool = False) -> OverlapScores:
        return self.index.find_matches(compute_sequence_hashes(locals_, 1) if self.fast else locals_, early_exit)


def stored(locals_: list[int], start: int = 0) -> BlockStored:
    chain = compute_sequence_hashes(locals_, 1)
    return StoredByTokens(chain[start - 1] if start else None, chain[start:], 16, local_hashes=tuple(locals_[start:]))


@pytest.fixture(params=[False, True], ids=["radix-tree", "prefix-index"])
def build(request: pytest.FixtureRequest) -> Callable[..., Both]:
    return lambda: Both(request.param)


def test_scores_count_leading_blocks_per_worker(build: Callable[..., Both]) -> None:
    both = build()
    for worker, depth in (("1", 3), ("2", 2), ("3", 1)):
        both.stored(worker, [11, 12, 13][:depth])
    assert both.find([11, 12, 13]).scores == {"1": 3, "2": 2, "3": 1}
    assert both.find([11, 12, 99]).scores == {"1": 2, "2": 2, "3": 1}
    assert both.find([99, 12, 13]).scores == {}
    assert both.find([]).scores == {}


def test_early_exit_stops_where_one_worker_is_left(build: Callable[..., Both]) -> None:
    both = build()
    both.stored("a", [1, 2, 3, 4, 5])
    both.stored("b", [1, 2])
    assert both.find([1, 2, 3, 4, 5], early_exit=True).scores == {"a": 3, "b": 2}
    both.stored("c", [7, 8, 9])
    assert both.find([7, 8, 9], early_exit=True).scores == {"c": 1}


def test_a_hole_in_the_middle_ends_the_prefix_until_it_is_filled(build: Callable[..., Both]) -> None:
    both = build()
    both.stored("a", [1, 2, 3, 4])
    both.stored("b", [1, 2, 3, 4])
    both.removed("a", [1, 2, 3, 4], 1)
    assert both.find([1, 2, 3, 4]).scores == {"a": 1, "b": 4}
    both.stored("a", [1, 2], 1)
    assert both.find([1, 2, 3, 4]).scores == {"a": 4, "b": 4}


def test_a_missing_parent_is_an_error_and_changes_nothing(build: Callable[..., Both]) -> None:
    both = build()
    both.stored("a", [1, 2, 3])
    with pytest.raises(ParentNotFoundError) as caught:
        both.stored("b", [1, 2, 3, 4], 3)
    assert caught.value.worker_id == "b"
    assert both.find([1, 2, 3, 4]).scores == {"a": 3}


def test_clear_and_remove_worker(build: Callable[..., Both]) -> None:
    both = build()
    both.stored("a", [1, 2, 3])
    both.stored("b", [1, 2])
    both.index.apply_event("a", AllBlocksCleared())
    assert both.find([1, 2, 3]).scores == {"b": 2}
    both.stored("a", [1])
    assert both.find([1, 2, 3]).scores == {"a": 1, "b": 2}
    both.index.remove_worker("b")
    both.index.remove_worker("b")
    both.index.remove_worker("stranger")
    assert both.find([1, 2, 3]).scores == {"a": 1}


def test_removing_absent_blocks_changes_nothing(build: Callable[..., Both]) -> None:
    both = build()
    both.stored("a", [1, 2])
    both.removed("a", [5, 6], 0, 1)
    both.removed("stranger", [1, 2], 0)
    both.stored("a", [1, 2])
    assert both.find([1, 2]).scores == {"a": 2}


def test_dump_and_load(build: Callable[..., Both]) -> None:
    both = build()
    both.stored("a", [1, 2, 3])
    both.stored("b", [1, 2, 7, 8])
    both.stored("a", [1, 2, 7], 2)
    copy = build()
    copy.index.load(both.index.dump())
    for query in ([1, 2, 3], [1, 2, 7, 8], [1, 9]):
        assert copy.find(query).scores == both.find(query).scores
    assert copy.find([1, 2, 7, 8]).scores == {"a": 3, "b": 4}


def random_prompt(rng: random.Random) -> list[int]:
    """A walk down a narrow tree, so that prompts share prefixes of every length."""
    return [rng.randrange(1, 3) if rng.random() < 0.25 else 1 for _ in range(rng.randrange(1, 25))]


def random_event(rng: random.Random) -> KvEvent:
    kind, prompt = rng.random(), random_prompt(rng)
    if kind < 0.55:
        return stored(prompt, rng.randrange(len(prompt)) if rng.random() < 0.5 else 0)
    if kind < 0.997:
        chain = list(compute_sequence_hashes(prompt, 1))
        wanted = (
            chain[-rng.randrange(1, 6) :] if rng.random() < 0.5 else rng.sample(chain, rng.randrange(1, 1 + len(chain)))
        )
        if rng.random() < 0.5:
            wanted.reverse()
        return BlockRemoved(tuple(wanted))
    return AllBlocksCleared()


@pytest.mark.parametrize("seed", range(4))
def test_random_interleavings_of_ten_thousand_events(seed: int) -> None:
    rng = random.Random(seed)
    tree, index = RadixTree(), PrefixIndex()
    refused = 0
    for number in range(10_000):
        worker = f"w{rng.randrange(2 + 3 * seed)}"
        if rng.random() < 0.004:
            tree.remove_worker(worker)
            index.remove_worker(worker)
        event, failures = random_event(rng), []
        for each in (tree, index):
            try:
                each.apply_event(worker, event)
            except ParentNotFoundError as error:
                failures.append((error.worker_id, error.parent_hash))
        assert len(failures) in (0, 2)
        refused += bool(failures)
        query, early = random_prompt(rng), rng.random() < 0.3
        assert index.find_matches(compute_sequence_hashes(query, 1), early) == tree.find_matches(query, early), (
            number,
            query,
        )
        if number % 500 == 499:
            index.check_integrity()
    assert 0 < refused < 8000
    index.compact()
    index.check_integrity()
    held_by_tree = sorted((chain.worker_id, block) for chain in tree.dump() for block in chain.block_hashes)
    held_by_index = sorted((chain.worker_id, block) for chain in index.dump() for block in chain.block_hashes)
    assert held_by_index == held_by_tree
