"""PrefixIndex: what only it has: segments, bits, the pass over all segments, bounded memory."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from tests.router.radix_tree import scores_of

from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.errors import IntegrityError
from kvrelay.router.prefix_index import PrefixIndex


def chain(rng: random.Random, length: int) -> tuple[int, ...]:
    return compute_sequence_hashes([rng.getrandbits(32) for _ in range(length)], 1)


def test_blocks_that_the_same_workers_hold_are_one_segment() -> None:
    index, blocks = PrefixIndex(), chain(random.Random(1), 512)
    for worker in ("a", "b", "c"):
        for at in range(0, 512, 8):
            index.store(worker, blocks[at - 1] if at else None, blocks[at : at + 8])
    assert (index.num_blocks, index.num_segments) == (512, 1)
    assert scores_of(index, blocks) == {"a": 512, "b": 512, "c": 512}


def test_eviction_from_the_tail_makes_no_more_segments_than_there_are_depths() -> None:
    index, blocks = PrefixIndex(), chain(random.Random(1), 300)
    for worker in ("a", "b", "c"):
        index.store(worker, None, blocks)
    for at in range(299, 99, -1):
        index.remove("b", (blocks[at],))
    assert index.num_segments == 2
    index.remove("c", blocks[150:][::-1])
    assert index.num_segments == 3
    assert scores_of(index, blocks) == {"a": 300, "b": 100, "c": 150}
    index.check_integrity()


def test_the_pass_joins_segments_that_removals_split() -> None:
    index, blocks = PrefixIndex(), chain(random.Random(2), 400)
    index.store("a", None, blocks)
    index.store("b", None, blocks)
    for at in range(0, 400, 2):
        index.remove("b", (blocks[at],))
    for at in range(1, 400, 2):
        index.remove("b", (blocks[at],))
    index.compact()
    assert (index.num_segments, index.num_blocks) == (1, 400)
    assert scores_of(index, blocks) == {"a": 400}
    index.check_integrity()


def test_bits_are_given_again_only_when_no_segment_has_them() -> None:
    rng = random.Random(3)
    index = PrefixIndex()
    common = chain(rng, 20)
    for generation in range(300):
        worker = f"w{generation}"
        index.store(worker, None, common)
        index.store(worker, None, chain(rng, 5))
        assert scores_of(index, common).get(worker) == 20
        if generation >= 3:
            index.clear_worker(f"w{generation - 3}")
        assert len(scores_of(index, common)) == min(generation + 1, 3)
    index.compact()
    index.check_integrity()
    assert index.worker_ids == ("w297", "w298", "w299")
    assert index.num_blocks == 20 + 3 * 5
    assert max(mask for _, mask in index.find_steps(common)).bit_length() < 80


def test_a_block_twice_in_one_event_is_one_block() -> None:
    index = PrefixIndex()
    index.store("a", None, (1, 2, 2, 1, 3))
    assert index.num_blocks == 3
    index.check_integrity()


def test_contradicting_chains_do_no_harm() -> None:
    """Two workers that give the same hash different parents, as a collision or a broken engine would."""
    index = PrefixIndex()
    index.store("a", None, (1, 2, 3))
    index.store("b", None, (9, 2, 8))
    index.store("b", 9, (3, 1))
    index.check_integrity()
    for query in ((1, 2, 3), (9, 2, 8), (9, 3, 1), (2,), (3, 1)):
        assert all(depth <= len(query) for depth in scores_of(index, query).values())
    index.remove("a", (3, 2, 1))
    index.remove("b", (9, 2, 8, 3, 1))
    index.check_integrity()
    assert index.num_blocks == 0


def test_storing_and_removing_a_million_blocks_leaves_nothing() -> None:
    """Soak: stored and removed in chains with shared heads, by workers that come and go; it ends where it began."""
    rng = random.Random(5)
    index = PrefixIndex()
    keep = chain(rng, 50)
    index.store("keeper", None, keep)
    index.compact()
    begin = (index.num_blocks, index.num_segments, index.worker_ids)
    heads = [chain(rng, 64) for _ in range(10)]
    stored = 0
    while stored < 1_000_000:
        held = []
        for number in range(20):
            worker, head = f"w{number % 7}", heads[rng.randrange(10)]
            tail = tuple(rng.getrandbits(64) for _ in range(400))
            index.store(worker, None, head)
            index.store(worker, head[-1], tail)
            held.append((worker, head, tail))
            stored += len(head) + len(tail)
        for worker, head, tail in held:
            if rng.random() < 0.8:
                index.remove(worker, tail[::-1])
                index.remove(worker, head)
        for number in range(7):
            index.clear_worker(f"w{number}")
        assert index.num_blocks < 20_000
    index.compact()
    index.check_integrity()
    assert (index.num_blocks, index.num_segments, index.worker_ids) == begin
    assert scores_of(index, keep) == {"keeper": 50}
    index.store("later", None, keep)
    ((_, mask),) = index.find_steps(keep)
    assert mask.bit_length() < 64


def test_the_integrity_check_finds_damage() -> None:
    index = PrefixIndex()
    index.store("a", None, (1, 2, 3))
    index.check_integrity()
    index.table.segment_of[4] = index.table.segment_of[3]
    with pytest.raises(IntegrityError):
        index.check_integrity()


def test_scores_stay_right_with_many_workers() -> None:
    index, blocks = PrefixIndex(), chain(random.Random(7), 100)
    for number in range(1024):
        index.store(f"w{number}", None, blocks[: 1 + number % 100])
    scores = scores_of(index, blocks)
    assert scores == {f"w{number}": 1 + number % 100 for number in range(1024)}
    assert index.holds("w5", blocks[5])
    assert not index.holds("w5", blocks[6])
    assert not index.holds("stranger", blocks[0])


def test_memory_bytes_matches_the_measured_memory() -> None:
    rng = random.Random(9)
    tracemalloc.start()
    try:
        index = PrefixIndex()
        for number in range(200):
            index.store(f"w{number % 8}", None, chain(rng, 100))
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert index.memory_bytes() == pytest.approx(used, rel=0.25)
