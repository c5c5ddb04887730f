"""An engine whose evicted blocks live on: its answers are what they would be without, and it computes less."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.tiers.conftest import PrivateMemory, payload_of
from tests.tiers.engines import DEAR, TieredEngine, expected, prompt_of
from tests.tiers.waiting import settled

from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.core.status import RequestStatus
from kvrelay.core.step_cost import StepCost
from kvrelay.core.tier_stats import StoreStats
from kvrelay.engine.block_pool import Evicted
from kvrelay.engine.request import PrefillMode
from kvrelay.tiers.block import BlockName, Shape
from kvrelay.tiers.disk import DiskStore
from kvrelay.tiers.host import HostStore
from kvrelay.tiers.store import BlockChanges, BlockStore
from kvrelay.tiers.tiers import PRIOR_BYTES_PER_S

MakeTiered = Callable[..., TieredEngine]
PROMPTS = [prompt_of(number) for number in range(8)]


@pytest.fixture
def memory() -> PrivateMemory:
    return PrivateMemory(1 << 20)


@pytest.fixture
def make(tmp_path: Path, memory: PrivateMemory) -> Iterator[MakeTiered]:
    """``make(*kinds)``: an engine with these tiers, over the same memory and directory each time."""
    engines: list[TieredEngine] = []

    def build(*kinds: str | BlockStore, cost: StepCost = DEAR, num_blocks: int = 40) -> TieredEngine:
        def stores(shape: Shape) -> Sequence[BlockStore]:
            return [kind if not isinstance(kind, str) else open_store(kind, shape) for kind in kinds]

        engines.append(TieredEngine(stores, cost=cost, num_blocks=num_blocks))
        return engines[-1]

    def open_store(kind: str, shape: Shape) -> BlockStore:
        if kind == "host":
            return HostStore(memory, shape)
        return DiskStore(tmp_path, shape, 1 << 20, 1e6)

    yield build
    for engine in engines:
        engine.close()


def settle(engine: TieredEngine) -> None:
    engine.tiers.settle(60.0)
    for store in engine.stores:
        settled(store)


class Unsound:
    """A store that says it has everything, and gives what ``fill`` makes."""

    medium = "unsound"

    def __init__(self, fill: Callable[[memoryview], bool]) -> None:
        self.stats, self.changes = StoreStats(), BlockChanges()
        self._fill = fill

    def holds(self, sequence_hash: int) -> bool:
        return True

    def worth_again(self, sequence_hash: int, worth_s: float) -> bool:
        return False

    def load(self, name: BlockName, into: memoryview) -> bool:
        return self._fill(into)

    def store(self, name: BlockName, payload: memoryview, worth_s: float) -> None:
        raise RuntimeError("it stores nothing")

    def clear(self) -> int:
        return 0

    def close(self) -> None: ...


@pytest.mark.parametrize("kinds", [("host",), ("disk",), ("host", "disk")])
def test_evicted_prompts_are_loaded_and_answered_alike(kinds: tuple[str, ...], make: MakeTiered) -> None:
    engine = make(*kinds)
    for _ in range(3):
        for prompt in PROMPTS:
            assert engine.ask(prompt) == [expected(prompt)]
            settle(engine)
    counts = engine.tiers.counts
    assert counts.num_hits >= 2 * len(PROMPTS) - 4
    assert counts.num_failed_loads == 0
    assert engine.core.stats().tokens.num_prefilled < 1.5 * sum(map(len, PROMPTS)), "most of it once"


def test_the_last_token_of_a_prompt_of_whole_blocks_is_computed_and_all_before_its_block_is_loaded(
    make: MakeTiered,
) -> None:
    engine = make("host")
    size = engine.core.pool.block_size
    prompt = prompt_of(1, 6 * size)
    engine.ask(prompt, *PROMPTS[2:7])
    settle(engine)
    before = engine.core.stats().tokens.num_prefilled
    assert engine.ask(prompt) == [expected(prompt)]
    assert engine.core.stats().tokens.num_prefilled - before == size
    assert engine.tiers.counts.num_hit_blocks == 5


def test_changes_of_one_store_are_told_while_another_has_none(make: MakeTiered) -> None:
    """Else a router would not hear of it before the other store changes, too."""
    engine = make("host", "disk")
    assert not engine.tiers.has_events
    for store in engine.stores:
        store.changes.added(7)
        assert engine.tiers.has_events
        engine.tiers.drain_events()
        assert not engine.tiers.has_events


def test_generated_blocks_are_kept_too(make: MakeTiered) -> None:
    engine = make("host")
    (answer,) = engine.ask(PROMPTS[0], max_tokens=30)
    engine.ask(*PROMPTS[1:6])
    settle(engine)
    before = engine.core.stats().tokens.num_prefilled
    longer = [*PROMPTS[0], *answer, 9, 9]
    assert engine.ask(longer) == [expected(longer)]
    assert engine.core.stats().tokens.num_prefilled - before <= 8


def test_a_restarted_worker_begins_with_what_its_predecessor_had(make: MakeTiered) -> None:
    first = make("host", num_blocks=200)
    first.ask(*PROMPTS)
    first.tiers.flush(first.core.pool)
    settle(first)
    second = make("host", num_blocks=200)
    assert second.ask(*PROMPTS) == [expected(prompt) for prompt in PROMPTS]
    assert second.core.stats().tokens.num_prefilled <= 4 * len(PROMPTS)


def test_what_is_computed_as_fast_is_not_loaded(make: MakeTiered) -> None:
    engine = make("host", cost=StepCost(prefill_token_s=1e-9, pair_s=0.0))
    for prompt in PROMPTS * 3:
        assert engine.ask(prompt) == [expected(prompt)]
        settle(engine)
    assert engine.tiers.counts.num_hits == 0
    # In the second round nothing was there: to keep it was not worth it.
    assert engine.tiers.counts.num_not_worth == len(PROMPTS), "each of the third round once, however often it asks"


def test_what_never_returns_is_written_no_more_and_what_returns_is(
    make: MakeTiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.tiers.policy.RETURNS_WINDOW", 8)
    engine = make("host", cost=StepCost(prefill_token_s=1e-3))
    (store,) = engine.stores

    def ask(*numbers: int) -> None:
        for number in numbers:
            assert engine.ask(prompt_of(number)) == [expected(prompt_of(number))]
            settle(engine)

    ask(*range(100, 250))
    assert store.stats.num_stored > 0, "until it was known that none of them returns"
    num_stored = store.stats.num_stored
    ask(*range(250, 270))
    assert store.stats.num_stored == num_stored
    assert store.stats.drops["seldom"] > 0
    ask(1, *range(270, 275))
    assert store.stats.num_stored == num_stored
    ask(1, *range(275, 280))
    assert store.stats.num_stored > num_stored, "evicted twice: a prompt has asked for it"
    assert engine.tiers.counts.num_hits == 0
    ask(1)
    assert engine.tiers.counts.num_hits == 1


def test_a_worker_that_leaves_keeps_what_it_has_whatever_returned(
    make: MakeTiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.tiers.policy.RETURNS_WINDOW", 8)
    engine = make("host", cost=StepCost(prefill_token_s=1e-3))
    for number in range(100, 250):
        engine.ask(prompt_of(number))
        settle(engine)
    (store,) = engine.stores
    cached = engine.core.pool.cached_hashes()
    assert not all(map(store.holds, cached))
    engine.tiers.flush(engine.core.pool)
    assert all(map(store.holds, cached))


def test_a_hit_counts_as_cached_tokens(make: MakeTiered) -> None:
    engine = make("host")
    engine.ask(*PROMPTS)
    settle(engine)
    engine.add(PROMPTS[0])
    outputs = []
    while engine.core.has_unfinished():
        while engine.core.has_work():
            outputs += engine.core.step().outputs
        if engine.core.has_unfinished():
            engine.loaded()
    assert outputs[0].num_cached_tokens == 48


def test_a_request_that_ends_while_its_blocks_load_leaks_nothing(make: MakeTiered) -> None:
    engine = make("host")
    engine.ask(*PROMPTS)
    settle(engine)
    name = engine.add(PROMPTS[0])
    engine.core.step()
    assert engine.core.scheduler.requests[name].status is RequestStatus.LOADING_KV
    engine.core.abort(name)
    assert engine.core.has_unfinished(), "the load may still write the blocks"
    engine.loaded()
    assert not engine.core.has_unfinished()
    assert engine.ask(PROMPTS[0]) == [expected(PROMPTS[0])]


def test_a_preempted_request_loads_what_it_lost(make: MakeTiered) -> None:
    """Answers outgrow the pool: sequences are preempted, and come back with their KV."""
    engine = make("host", num_blocks=36)
    answers = engine.ask(*PROMPTS[:3], max_tokens=40)
    assert answers == [expected(prompt, 40) for prompt in PROMPTS[:3]]
    assert engine.core.stats().num_preemptions > 0


def test_prompts_of_hand_offs_load_too(make: MakeTiered) -> None:
    engine = make("host")
    engine.ask(*PROMPTS)
    settle(engine)
    before = engine.core.stats().tokens.num_prefilled
    name = engine.add(PROMPTS[0], max_tokens=1, mode=PrefillMode.HANDOFF)
    sent: list[int] = []
    token = None
    while token is None:
        while engine.core.has_work():
            for chunk in engine.core.step().handoff_chunks:
                sent += chunk.block_ids
                token = chunk.token_id if chunk.last else token
        if token is None:
            engine.loaded()
    assert [token] == expected(PROMPTS[0], 1)
    assert len(sent) == 13, "loaded blocks are sent like computed ones"
    assert engine.core.stats().tokens.num_prefilled - before == 2
    engine.core.sending_finished(name)


@pytest.mark.parametrize("kinds", [("host",), ("disk",)])
def test_a_cleared_cache_is_cleared_everywhere(kinds: tuple[str, ...], make: MakeTiered) -> None:
    engine = make(*kinds)
    engine.ask(*PROMPTS)
    settle(engine)
    engine.core.clear_cache()
    settle(engine)
    before = engine.core.stats().tokens.num_prefilled
    engine.ask(PROMPTS[0])
    assert engine.core.stats().tokens.num_prefilled - before == len(PROMPTS[0])


def test_a_salt_keeps_prompts_apart(make: MakeTiered) -> None:
    """The hashes under which blocks are kept contain it."""
    engine = make("host", num_blocks=200)
    engine.ask(PROMPTS[0])
    request_hashes = set(engine.core.cached_hashes())
    salted = compute_sequence_hashes(PROMPTS[0], 4, salt="secret")
    assert not request_hashes & set(salted)


def raise_error(_: memoryview) -> bool:
    raise RuntimeError("a broken store")


def fill_with_noise(into: memoryview) -> bool:
    into[:] = payload_of(1)[:1] * len(into)
    return False


@pytest.mark.parametrize("fill", [lambda _: False, fill_with_noise, raise_error], ids=["empty", "torn", "raising"])
def test_a_store_that_fails_costs_time_and_nothing_else(fill: Callable[[memoryview], bool], make: MakeTiered) -> None:
    engine = make(Unsound(fill))
    for prompt in PROMPTS:
        assert engine.ask(prompt) == [expected(prompt)]
    assert engine.tiers.counts.num_failed_loads >= len(PROMPTS)


class Held(Unsound):
    """A store that takes a block when it may."""

    def __init__(self) -> None:
        super().__init__(lambda _: False)
        self.may_store = threading.Event()
        self.stored: list[BlockName] = []

    def holds(self, sequence_hash: int) -> bool:
        return False

    def store(self, name: BlockName, payload: memoryview, worth_s: float) -> None:
        self.may_store.wait()
        self.stored.append(name)


def test_a_full_queue_drops_ends_of_prompts(make: MakeTiered, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not keep up: what waits for it is bounded, and of each prompt the start is kept."""
    monkeypatch.setattr("kvrelay.tiers.tiers.MAX_QUEUED_BYTES", 4096)
    store = Held()
    engine = make(store)
    for number in range(30):
        engine.ask(prompt_of(number))
    assert engine.tiers.stats().num_queued <= 4096 // engine.shape.block_bytes
    store.may_store.set()
    settle(engine)
    assert store.stats.drops["queue"] > 0
    assert sum(name.parent_hash is None for name in store.stored) > 0


def test_blocks_that_are_evicted_one_by_one_are_dropped_in_proportion(
    make: MakeTiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As decodes evict them. Above half of the queue a share of them is still written, until it is full."""
    monkeypatch.setattr("kvrelay.tiers.tiers.MAX_QUEUED_BYTES", 4096)
    store = Held()
    engine = make(store)
    num_queued: list[int] = []
    evicted = engine.tiers.evicted

    def one_by_one(blocks: Sequence[Evicted]) -> None:
        for block in blocks:
            evicted([block])
            num_queued.append(engine.tiers.stats().num_queued)

    engine.core.pool.on_evicted = one_by_one
    for number in range(30):
        engine.ask(prompt_of(number))
    store.may_store.set()
    capacity = 4096 // engine.shape.block_bytes
    assert 0.75 * capacity < max(num_queued) <= capacity
    assert store.stats.drops["queue"] > 0


class Paused(HostStore):
    """Stores a block once it may."""

    def __init__(self, memory: PrivateMemory, shape: Shape) -> None:
        super().__init__(memory, shape)
        self.has_begun, self.may_store = threading.Event(), threading.Event()

    def store(self, name: BlockName, payload: memoryview, worth_s: float) -> None:
        self.has_begun.set()
        self.may_store.wait()
        super().store(name, payload, worth_s)


def test_a_clear_leaves_nothing_of_a_write_that_runs(memory: PrivateMemory) -> None:
    stores: list[Paused] = []

    def paused(shape: Shape) -> Sequence[BlockStore]:
        stores.append(Paused(memory, shape))
        return stores

    engine = TieredEngine(paused)
    engine.ask(*PROMPTS)
    assert stores[0].has_begun.wait(60.0)
    engine.core.clear_cache()
    stores[0].may_store.set()
    assert engine.tiers.settle(60.0)
    assert stores[0].count() == 0
    engine.ask(*PROMPTS)
    assert engine.tiers.settle(60.0)
    assert stores[0].count() > 0, "it is cleared, not closed"
    engine.close()


def test_each_tier_that_nothing_has_used_says_so(
    make: MakeTiered, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk behind host memory gets nothing until a block is evicted twice."""
    caplog.set_level("INFO", "kvrelay.tiers")
    engine = make("host", "disk")
    caplog.clear()
    engine.ask(*PROMPTS)
    settle(engine)
    assert not caplog.text
    monkeypatch.setattr("kvrelay.tiers.carrier.UNUSED_S", 0.0)
    for number in (20, 30):
        engine.ask(*[prompt_of(number + more) for more in range(8)])
        settle(engine)
    assert [record.getMessage() for record in caplog.records] == [
        "the KV cache tier disk is not used yet: it gets what is evicted a second time, and host has the rest"
    ]


def test_a_tier_that_seemed_slow_is_tried_again(make: MakeTiered, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not loaded is not measured: without another try, a bad start or a few slow loads would end its use."""
    monkeypatch.setitem(PRIOR_BYTES_PER_S, "host", 1.0)
    engine = make("host")
    num_hits: list[int] = []
    for _ in range(15):
        engine.ask(*PROMPTS)
        settle(engine)
        num_hits.append(engine.tiers.counts.num_hits)
    assert num_hits[1] == 0, "it seems to take 32 s a block, and computing one 4 s"
    assert num_hits[-1] - num_hits[-2] >= 4, "it has been measured since, and is used"


def test_one_large_eviction_stays_within_the_queue(make: MakeTiered, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt may evict the whole pool at once: what is copied for it is bounded, too."""
    monkeypatch.setattr("kvrelay.tiers.tiers.MAX_QUEUED_BYTES", 1024)
    store = Held()
    engine = make(store, num_blocks=200)
    engine.ask(*PROMPTS)
    engine.ask(prompt_of(20, length=760))
    num_queued = engine.tiers.stats().num_queued
    store.may_store.set()
    settle(engine)
    capacity = 1024 // engine.shape.block_bytes
    assert 0 < num_queued <= capacity
    assert store.stats.drops["queue"] > 0
    assert any(name.parent_hash is None for name in store.stored), "of prompts the starts are kept"
