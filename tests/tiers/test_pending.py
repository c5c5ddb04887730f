"""Two prompts that begin alike and come together: the beginning is loaded once. And what tiers hold is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.patience import until
from tests.tiers.conftest import PrivateMemory, host_bytes
from tests.tiers.engines import DEAR, PATIENCE_S, TieredEngine, expected, prompt_of

from kvrelay.core.clock import ManualClock
from kvrelay.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import RequestStatus
from kvrelay.core.step_cost import StepCost
from kvrelay.engine.kv_source import Arriving, Hit
from kvrelay.engine.request import Request
from kvrelay.engine.step import KvLoad
from kvrelay.tiers.block import BlockName, Shape
from kvrelay.tiers.disk import DiskStore
from kvrelay.tiers.host import HostStore


class Held(HostStore):
    """Its reads and writes wait for ``may_go``."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.may_go = threading.Event()
        self.may_go.set()
        self.num_begun = 0

    def load(self, name: BlockName, into: memoryview) -> bool:
        self.num_begun += 1
        assert self.may_go.wait(PATIENCE_S)
        return super().load(name, into)

    def store(self, name: BlockName, payload: memoryview, worth_s: float) -> None:
        assert self.may_go.wait(PATIENCE_S)
        super().store(name, payload, worth_s)


class HeldEngine(TieredEngine):
    store: Held
    own_cost = DEAR
    """What the engine says of itself; the mock computes in no time."""

    def __init__(self) -> None:
        super().__init__(lambda shape: [Held(PrivateMemory(host_bytes(256, shape)), shape)])
        self.store = self.stores[0]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldEngine]:
    engine = HeldEngine()
    costs = type(engine.core.scheduler.token_budget.costs)
    monkeypatch.setattr(costs, "cost", property(lambda _: engine.own_cost))
    yield engine
    engine.store.may_go.set()
    engine.close()


def fill(engine: HeldEngine) -> None:
    """The prompt 1 has left the pool, and the tier has it."""
    for number in (1, 2, 3, 4):
        assert engine.ask(prompt_of(number)) == [expected(prompt_of(number))]
    assert engine.tiers.settle(PATIENCE_S)


def steps(engine: HeldEngine) -> None:
    while engine.core.has_work():
        engine.core.step()


def test_the_second_of_two_waits_for_the_load_of_the_first(engine: HeldEngine) -> None:
    fill(engine)
    engine.store.may_go.clear()
    first, second = engine.add(prompt_of(1)), engine.add([*prompt_of(1), 7, 8, 9])
    steps(engine)
    states = {name: request.status for name, request in engine.core.scheduler.requests.items()}
    assert states == {first: RequestStatus.LOADING_KV, second: RequestStatus.WAITING}
    third = engine.add(prompt_of(9))
    steps(engine)
    assert third not in engine.core.scheduler.requests, "what needs none of it passes"
    engine.store.may_go.set()
    answers = engine.run()
    assert answers[first] == expected(prompt_of(1))
    assert answers[second] == expected([*prompt_of(1), 7, 8, 9])
    assert engine.store.num_begun == 12, "each block once"
    assert engine.tiers.counts.num_hits == 1


def test_the_second_computes_if_that_is_sooner(engine: HeldEngine) -> None:
    fill(engine)
    engine.own_cost = StepCost(prefill_token_s=1e-9, pair_s=0.0)
    engine.store.may_go.clear()
    first, second = engine.add(prompt_of(1)), engine.add(prompt_of(1))
    engine.core.step()
    assert engine.core.scheduler.requests[first].status is RequestStatus.LOADING_KV
    assert engine.core.scheduler.requests[second].status is not RequestStatus.WAITING
    engine.store.may_go.set()
    answers = engine.run()
    assert answers[first] == answers[second] == expected(prompt_of(1))


def test_the_second_goes_on_if_the_load_of_the_first_fails(engine: HeldEngine) -> None:
    fill(engine)
    engine.store.may_go.clear()
    names = [engine.add(prompt_of(1)) for _ in range(3)]
    steps(engine)
    engine.core.abort(names[0])
    engine.store.clear()
    engine.store.may_go.set()
    answers = engine.run()
    assert answers[names[1]] == answers[names[2]] == expected(prompt_of(1))


def test_what_is_being_written_is_waited_for(engine: HeldEngine) -> None:
    assert engine.ask(prompt_of(1)) == [expected(prompt_of(1))]
    engine.store.may_go.clear()
    for number in (2, 3, 4):
        engine.ask(prompt_of(number))
    name = engine.add(prompt_of(1))
    steps(engine)
    assert engine.core.scheduler.requests[name].status is RequestStatus.WAITING
    engine.store.may_go.set()
    assert engine.tiers.settle(PATIENCE_S)
    assert engine.run()[name] == expected(prompt_of(1))
    assert engine.tiers.counts.num_hits == 1


# -- events -----------------------------------------------------------------------------------------------------------


class Known:
    """What a router would know of each medium."""

    def listening(self, drain: Callable[[], list[KvEvent]]) -> Callable[[], list[KvEvent]]:
        def drained() -> list[KvEvent]:
            events = drain()
            self.hear(events)
            return events

        return drained

    def __init__(self) -> None:
        self.held: dict[str | None, set[int]] = {}

    def hear(self, events: list[KvEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
            elif isinstance(event, BlockStored):
                self.held.setdefault(event.medium, set()).update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.held.setdefault(event.medium, set()).difference_update(event.block_hashes)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_blocks_are_told_when_they_are_written_and_when_they_are_gone(kind: str, tmp_path: Path) -> None:
    def open_store(shape: Shape) -> list[HostStore | DiskStore]:
        if kind == "host":
            return [HostStore(PrivateMemory(host_bytes(16, shape)), shape)]
        return [DiskStore(tmp_path, shape, 16 * shape.stored_bytes, 1e6)]

    engine, known = TieredEngine(open_store), Known()
    engine.core.drain_events = known.listening(engine.core.drain_events)
    store = engine.stores[0]

    def is_true() -> bool:
        assert engine.tiers.settle(PATIENCE_S)
        engine.core.drain_events()
        told = known.held.get(kind, set())
        return bool(told) and all(store.holds(block) for block in told)

    try:
        for number in range(1, 8):
            engine.ask(prompt_of(number))
        until(is_true)
        assert known.held[None] == set(engine.core.cached_hashes())
        assert 0 < len(known.held[kind]) <= 16, "those that gave way were told"
        engine.core.clear_cache()

        def is_forgotten() -> bool:
            engine.core.drain_events()
            return not any(known.held.values())

        assert engine.tiers.settle(PATIENCE_S)
        until(is_forgotten)
    finally:
        engine.close()


def test_what_workers_before_have_left_is_told(tmp_path: Path) -> None:
    before = TieredEngine(lambda shape: [DiskStore(tmp_path, shape, 1 << 24, 1e6)])
    for number in range(1, 6):
        before.ask(prompt_of(number))
    before.tiers.flush(before.core.pool)
    before.stores[0].settle(PATIENCE_S)
    before.close()
    after, known = TieredEngine(lambda shape: [DiskStore(tmp_path, shape, 1 << 24, 1e6)]), Known()

    def all_told() -> bool:
        known.hear(after.core.drain_events())
        return len(known.held.get("disk", ())) >= 5 * 13

    try:
        until(all_told)
    finally:
        after.close()


def test_a_load_that_is_late_is_waited_for_as_long_again_as_it_has_lasted() -> None:
    """An estimate may be wrong by far, and computing what arrives a moment later is the dearer mistake."""
    clock = ManualClock()
    arriving = Arriving(4, clock, lambda: StepCost(prefill_token_s=0.1, pair_s=0.0))
    first, second = (Request(name, prompt_of(1), SamplingParams(max_tokens=1)) for name in ("first", "second"))
    for request in (first, second):
        request.hash_blocks(12, 4)
    load = KvLoad("first", 2, tuple(range(5)))
    arriving.begun(first, load, 0.5)
    assert arriving.find(second, 2) == Hit(5, 0.5, is_pending=True)
    assert arriving.find(second, 4) == Hit(3, 0.5, is_pending=True), "from there on"
    assert arriving.find(second, 1) is None, "the block before is not among them"
    clock.advance(1.5)
    assert arriving.find(second, 2) == Hit(5, 1.5, is_pending=True), "computing 20 tokens takes 2 s"
    clock.advance(0.6)
    assert arriving.find(second, 2) is None
    arriving.ended(first)
    assert not arriving.pending
    assert arriving.find(second, 2) is None
