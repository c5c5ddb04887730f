from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.core.clock import ManualClock
from kvrelay.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.engine.block_pool import BlockPool, BlockState
from kvrelay.engine.cached_free import ByRecency, ByValue, CachedBlock, CachedFree
from kvrelay.engine.pauses import Pauses, Session
from kvrelay.errors import IntegrityError

SIZE = 4


def cache(pool: BlockPool, block_ids: list[int], tokens: list[int]) -> None:
    hashes = compute_sequence_hashes(tokens, SIZE)
    pool.cache_blocks(block_ids, None, hashes, tokens)


def find(pool: BlockPool, tokens: list[int]) -> list[int]:
    return pool.find_prefix(tokens, compute_sequence_hashes(tokens, SIZE))


def take(pool: BlockPool, count: int) -> list[int]:
    block_ids = pool.allocate(count)
    assert block_ids is not None
    return block_ids


def test_a_block_is_in_one_state_at_a_time() -> None:
    pool = BlockPool(4, SIZE)
    first, second = take(pool, 2)
    pool.quarantine([second])
    assert [pool.state(block) for block in (first, second)] == [BlockState.IN_USE, BlockState.QUARANTINED]
    assert repr(pool) == "BlockPool(4 blocks of 4: 2 free (0 cached), 1 in use, 1 quarantined)"
    pool.release([first, second])
    assert pool.state(first) is BlockState.FREE
    assert pool.state(second) is BlockState.QUARANTINED, "a peer may still write to it"
    assert pool.num_free == 3
    pool.lift_quarantine([second])
    assert pool.num_free == 4
    pool.check_integrity()


def test_allocation_is_all_or_nothing_and_adjacent() -> None:
    pool = BlockPool(8, SIZE)
    assert take(pool, 5) == [0, 1, 2, 3, 4]
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(1, after=4) == [5]


def test_a_forgotten_prefix_is_found_no_more() -> None:
    pool = BlockPool(8, SIZE)
    tokens = list(range(16))
    block_ids = take(pool, 4)
    cache(pool, block_ids[:3], tokens[:12])
    hashes = compute_sequence_hashes(tokens, SIZE)
    pool.drain_events()
    pool.forget(block_ids[1:])
    assert pool.drain_events() == [BlockRemoved(tuple(hashes[1:3]))]
    assert find(pool, tokens) == block_ids[:1]
    pool.forget(block_ids[1:])
    assert not pool.has_events
    pool.release(block_ids)
    pool.check_integrity()
    assert (pool.num_free, pool.num_cached) == (8, 1)


def test_a_released_prefix_is_found_again_and_capped_before_the_last_token() -> None:
    pool = BlockPool(8, SIZE)
    tokens = list(range(12))
    block_ids = take(pool, 3)
    cache(pool, block_ids, tokens)
    pool.release(block_ids)
    assert pool.num_free == 8
    assert find(pool, [*tokens, 99]) == block_ids
    assert find(pool, tokens) == block_ids[:2], "the last token has to be computed"
    assert find(pool, [*tokens[:5], 77, 78, 79, 80]) == block_ids[:1]
    assert find(pool, [5, *tokens]) == []
    hit = find(pool, [*tokens, 99])
    assert pool.num_free_among(hit) == 3
    pool.acquire(hit)
    assert pool.num_free == 5
    assert pool.num_free_among(hit) == 0
    pool.check_integrity()


def test_equal_hashes_of_other_tokens_are_no_hit() -> None:
    pool = BlockPool(4, SIZE)
    block_ids = take(pool, 1)
    pool.cache_blocks(block_ids, None, [42], [1, 2, 3, 4])
    assert pool.find_prefix([1, 2, 3, 4, 5], [42]) == block_ids
    assert pool.find_prefix([1, 2, 3, 9, 5], [42]) == []
    assert pool.find_prefix([], []) == []


def test_equal_tokens_behind_another_parent_are_no_hit() -> None:
    pool = BlockPool(4, SIZE)
    first, second = take(pool, 2)
    pool.cache_blocks([first], None, [1], [1] * SIZE)
    pool.cache_blocks([second], 1, [2], [2] * SIZE)
    assert pool.find_prefix([2] * SIZE + [0], [2]) == []


def test_the_first_of_two_copies_stays_findable() -> None:
    pool = BlockPool(8, SIZE)
    tokens = list(range(8))
    first, second = take(pool, 2), take(pool, 2)
    cache(pool, first, tokens)
    cache(pool, second, tokens)
    assert find(pool, [*tokens, 1]) == first
    pool.release(second)
    assert pool.num_cached == 2
    pool.release(first)
    assert find(pool, [*tokens, 1]) == first
    pool.check_integrity()


def test_least_recently_used_tails_are_evicted_first() -> None:
    pool = BlockPool(4, SIZE)
    old, new = take(pool, 2), take(pool, 2)
    cache(pool, old, list(range(8)))
    cache(pool, new, list(range(20, 28)))
    pool.release(old)
    pool.release(new)
    take(pool, 1)
    assert find(pool, [*range(8), 0]) == old[:1], "the tail goes before the head"
    take(pool, 1)
    assert find(pool, [*range(8), 0]) == []
    assert find(pool, [*range(20, 28), 0]) == new


def test_events_tell_what_is_in_the_cache() -> None:
    pool = BlockPool(3, SIZE)
    tokens = list(range(8))
    hashes = compute_sequence_hashes(tokens, SIZE)
    block_ids = take(pool, 2)
    pool.cache_blocks(block_ids[:1], None, hashes[:1], tokens[:4])
    pool.cache_blocks(block_ids[1:], hashes[0], hashes[1:], tokens[4:])
    assert pool.drain_events() == [BlockStored(None, hashes[:1], SIZE), BlockStored(hashes[0], hashes[1:], SIZE)]
    pool.release(block_ids)
    take(pool, 2)
    assert pool.drain_events() == [BlockRemoved((hashes[1],))]
    pool.clear_cache()
    assert pool.drain_events() == [AllBlocksCleared()]
    assert not pool.has_events
    pool.check_integrity()


def test_blocks_behind_a_vanished_parent_stay_private() -> None:
    pool = BlockPool(4, SIZE)
    tokens = list(range(8))
    hashes = compute_sequence_hashes(tokens, SIZE)
    block_ids = take(pool, 2)
    pool.cache_blocks(block_ids[:1], None, hashes[:1], tokens[:4])
    pool.clear_cache()
    pool.drain_events()
    pool.cache_blocks(block_ids[1:], hashes[0], hashes[1:], tokens[4:])
    assert pool.num_cached == 0
    assert pool.drain_events() == []


def test_a_cached_block_knows_its_place_however_much_of_its_prefix_was_cached_before() -> None:
    pool = BlockPool(16, SIZE)
    tokens = list(range(24))
    hashes = compute_sequence_hashes(tokens, SIZE)
    first, second = take(pool, 6), take(pool, 6)
    cache(pool, first[:2], tokens[:8])
    pool.cache_blocks(first[2:3], hashes[1], hashes[2:3], tokens[8:12])
    cache(pool, second, tokens)
    entries = {block_id: entry for block_id, entry in pool.cached_blocks()}
    assert list(entries) == [*first[:3], *second[3:]]
    assert [entry.depth for entry in entries.values()] == [0, 1, 2, 3, 4, 5]
    assert [entry.parent_hash for entry in entries.values()] == [None, *hashes[:5]]


def test_clearing_keeps_blocks_in_use() -> None:
    pool = BlockPool(4, SIZE)
    block_ids = take(pool, 2)
    cache(pool, block_ids, list(range(8)))
    pool.release(block_ids[1:])
    pool.clear_cache()
    assert pool.num_in_use == 1
    assert find(pool, [*range(8), 1]) == []
    pool.check_integrity()


def test_without_prefix_caching_nothing_is_kept() -> None:
    pool = BlockPool(4, SIZE, enable_prefix_caching=False)
    block_ids = take(pool, 2)
    cache(pool, block_ids, list(range(8)))
    assert find(pool, [*range(8), 1]) == []
    assert not pool.has_events


def test_misuse_is_refused() -> None:
    pool = BlockPool(4, SIZE)
    block_ids = take(pool, 2)
    pool.release(block_ids)
    with pytest.raises(IntegrityError, match="released more often"):
        pool.release(block_ids)
    with pytest.raises(IntegrityError, match="cannot be given to a writer"):
        pool.quarantine(block_ids)
    with pytest.raises(IntegrityError, match="not quarantined"):
        pool.lift_quarantine(block_ids)
    cached = take(pool, 1)
    cache(pool, cached, list(range(4)))
    with pytest.raises(IntegrityError, match="cannot be given to a writer"):
        pool.quarantine(cached)


def test_integrity_check_sees_a_lost_block() -> None:
    pool = BlockPool(4, SIZE)
    (block,) = take(pool, 1)
    pool._num_refs[block] = 0  # damage that no public call does
    with pytest.raises(IntegrityError, match=f"block {block} has 0 homes"):
        pool.check_integrity()


def test_integrity_check_sees_a_block_owned_twice() -> None:
    pool = BlockPool(4, SIZE)
    (block,) = take(pool, 1)
    pool._plain.add(block)  # as above
    with pytest.raises(IntegrityError, match=f"block {block} has 2 homes"):
        pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """Holders, writers and prefixes against a model that keeps sets."""

    def policy(self) -> CachedFree:
        return ByRecency()

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, SIZE, cached_free=self.policy())
        self.held: list[list[int]] = []
        self.written: list[list[int]] = []

    @rule(count=st.integers(1, 5))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        block_ids = self.pool.allocate(count)
        assert (block_ids is None) == (count > free)
        if block_ids is not None:
            assert not set(block_ids) & {block for blocks in self.written for block in blocks}
            assert not set(block_ids) & {block for blocks in self.held for block in blocks}
            self.held.append(block_ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def quarantine_own(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        private = [b for b in blocks if self.pool.num_refs(b) == 1 and "not cached" in self.pool.describe(b)]
        private = [b for b in private if self.pool.state(b) is not BlockState.QUARANTINED]
        if private:
            self.pool.quarantine(private)
            self.written.append(private)

    @precondition(lambda self: self.written)
    @rule()
    def lift(self) -> None:
        self.pool.lift_quarantine(self.written.pop())

    @precondition(lambda self: self.held)
    @rule(data=st.data(), stem=st.integers(0, 1))
    def store(self, data: st.DataObject, stem: int) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        if all(self.pool.state(b) is BlockState.IN_USE and "not cached" in self.pool.describe(b) for b in blocks):
            cache(self.pool, blocks, [stem] * SIZE * len(blocks))

    @rule(stem=st.integers(0, 1))
    def hit(self, stem: int) -> None:
        found = find(self.pool, [stem] * (SIZE * 5 + 1))
        if found:
            self.pool.acquire(found)
            self.held.append(found)

    @rule()
    def clear(self) -> None:
        self.pool.clear_cache()

    @invariant()
    def sound(self) -> None:
        self.pool.check_integrity()


class ValuePoolMachine(PoolMachine):
    """The same with pauses of two keys, which begin and end at random."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.pauses = Pauses(self.clock)
        super().__init__()

    def policy(self) -> CachedFree:
        return ByValue(self.clock, self.pauses.prior, lambda block_id: 1.0 + block_id)

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        tenant=st.sampled_from(["", "a"]),
        kind=st.sampled_from(["", "read", "build"]),
        after_s=st.sampled_from([0.0, 1.0, 1e4]),
    )
    def pause(self, data: st.DataObject, tenant: str, kind: str, after_s: float) -> None:
        self.clock.advance(after_s)
        pause = self.pauses.begin(f"r{kind}{after_s}", tenant, {hash(kind): 1}, Session())
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))), pause)
        self.pauses.named(pause.request_id, kind)

    @rule(tenant=st.sampled_from(["", "a"]), kind=st.sampled_from(["", "read", "build"]), is_served=st.booleans())
    def resume(self, tenant: str, kind: str, is_served: bool) -> None:
        pause = self.pauses.end([hash(kind)], tenant)
        if pause is not None:
            self.pauses.resumed(pause, is_served=is_served)


TestPoolMachine, TestValuePoolMachine = PoolMachine.TestCase, ValuePoolMachine.TestCase
TestPoolMachine.settings = TestValuePoolMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, database=None
)


class OneByOne(ByValue):
    def pop(self, count: int, num_children: Sequence[int], cached: Mapping[int, CachedBlock]) -> list[int]:
        return super().pop(1, num_children, cached)


def evictions(policy: type[ByValue], seed: int) -> list[int]:
    """Of a pool with sessions of two keys that share stems, pause, return and branch."""
    draw, clock = random.Random(seed), ManualClock()
    pauses = Pauses(clock)
    gone: list[int] = []
    pool = BlockPool(48, SIZE, cached_free=policy(clock, pauses.prior, lambda block_id: 1.0 + block_id % 5))
    pool.on_evicted = lambda evicted: gone.extend(block.block_id for block in evicted)
    texts = [[draw.randrange(3)] * (SIZE * draw.randint(0, 4)) for _ in range(6)]
    for number in range(150):
        clock.advance(draw.choice((0.0, 0.3, 9.0)))
        at, tenant = draw.randrange(len(texts)), draw.choice(("", "a"))
        text = texts[at] + [draw.randrange(2) for _ in range(SIZE * draw.randint(0, 8))]
        if pause := pauses.end([hash(tuple(texts[at]))], tenant):
            pauses.resumed(pause, is_served=draw.random() < 0.7)
        found = find(pool, [*text, 0])
        pool.acquire(found)
        rest = pool.allocate(len(text) // SIZE - len(found))
        assert rest is not None
        cache(pool, [*found, *rest], text)
        kind = draw.choice(("", "read", "build"))
        pool.release([*found, *rest], pauses.begin(str(number), tenant, {hash(tuple(text)): 1}, Session()))
        pauses.named(str(number), kind)
        texts[at] = text if len(text) < 40 * SIZE else []
        pool.check_integrity()
    return gone


@pytest.mark.parametrize("seed", range(20))
def test_blocks_that_give_way_together_are_those_that_would_one_by_one(seed: int) -> None:
    gone = evictions(ByValue, seed)
    assert len(gone) > 50
    assert gone == evictions(OneByOne, seed)
