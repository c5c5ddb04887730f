"""Both indices do the same: the same scenarios on each, and random interleavings on both at once."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tests.router.radix_tree import RadixTree, StoredByTokens, scores_of

from kvrelay.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.router.overlap import ParentNotFoundError
from kvrelay.router.prefix_index import PrefixIndex


class Both:
    """One index of either kind, spoken to in local hashes."""

    def __init__(self, fast: bool) -> None:
        self.index = PrefixIndex() if fast else RadixTree()

    def stored(self, worker: str, locals_: list[int], start: int = 0) -> None:
        self.index.apply_event(worker, stored(locals_, start))

    def removed(self, worker: str, locals_: list[int], *positions: int) -> None:
        chain = compute_sequence_hashes(locals_, 1)
        self.index.apply_event(worker, BlockRemoved(tuple(chain[at] for at in positions)))

    def find(self, locals_: list[int]) -> dict[str, int]:
        if isinstance(self.index, RadixTree):
            return self.index.scores(locals_)
        return scores_of(self.index, compute_sequence_hashes(locals_, 1))


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
    assert both.find([11, 12, 13]) == {"1": 3, "2": 2, "3": 1}
    assert both.find([11, 12, 99]) == {"1": 2, "2": 2, "3": 1}
    assert both.find([99, 12, 13]) == {}
    assert both.find([]) == {}


def test_a_hole_in_the_middle_ends_the_prefix_until_it_is_filled(build: Callable[..., Both]) -> None:
    both = build()
    both.stored("a", [1, 2, 3, 4])
    both.stored("b", [1, 2, 3, 4])
    both.removed("a", [1, 2, 3, 4], 1)
    assert both.find([1, 2, 3, 4]) == {"a": 1, "b": 4}
    both.stored("a", [1, 2], 1)
    assert both.find([1, 2, 3, 4]) == {"a": 4, "b": 4}


def test_a_missing_parent_is_an_error_and_changes_nothing(build: Callable[..., Both]) -> None:
    both = build()
    both.stored("a", [1, 2, 3])
    with pytest.raises(ParentNotFoundError) as caught:
        both.stored("b", [1, 2, 3, 4], 3)
    assert caught.value.worker_id == "b"
    assert both.find([1, 2, 3, 4]) == {"a": 3}


def test_clear_worker(build: Callable[..., Both]) -> None:
    both = build()
    both.stored("a", [1, 2, 3])
    both.stored("b", [1, 2])
    both.index.apply_event("a", AllBlocksCleared())
    assert both.find([1, 2, 3]) == {"b": 2}
    both.stored("a", [1])
    assert both.find([1, 2, 3]) == {"a": 1, "b": 2}
    both.index.clear_worker("b")
    both.index.clear_worker("b")
    both.index.clear_worker("stranger")
    assert both.find([1, 2, 3]) == {"a": 1}


def test_removing_absent_blocks_changes_nothing(build: Callable[..., Both]) -> None:
    both = build()
    both.stored("a", [1, 2])
    both.removed("a", [5, 6], 0, 1)
    both.removed("stranger", [1, 2], 0)
    both.stored("a", [1, 2])
    assert both.find([1, 2]) == {"a": 2}


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
            tree.clear_worker(worker)
            index.clear_worker(worker)
        event, failures = random_event(rng), []
        for each in (tree, index):
            try:
                each.apply_event(worker, event)
            except ParentNotFoundError as error:
                failures.append((error.worker_id, error.parent_hash))
        assert len(failures) in (0, 2)
        refused += bool(failures)
        query = random_prompt(rng)
        assert scores_of(index, compute_sequence_hashes(query, 1)) == tree.scores(query), (number, query)
        if number % 500 == 499:
            index.check_integrity()
    assert 0 < refused < 8000
    index.compact()
    index.check_integrity()
    for worker in index.worker_ids:
        assert sorted(index.blocks_of(worker)) == sorted(tree.blocks_of(worker))
