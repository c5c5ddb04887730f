"""What every ``SourceBeyond`` promises the engine, whatever it reads from does: host memory, disk, another worker.

A miss is None, a hit can be loaded, what is pending can be had later. Each load ends exactly once, with no more than
has arrived, and nothing is written after it or after ``close``. The storages' own promises are at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.tiers.sources import (
    BLOCK_SIZE,
    FAULTS,
    NUM_BLOCKS,
    PATIENCE_S,
    PeersUnderTest,
    SourceUnderTest,
    TiersUnderTest,
    request_of,
)
from tests.tiers.test_tiers import Unsound, fill_with_noise, raise_error
from tests.tiers.waiting import settled

from kvrelay.tiers.store import BlockStore

KINDS = ("host", "disk", "peer")
STORAGES = ("host", "disk")


class Hanging(Unsound):
    """Reads nothing until it may."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        super().__init__(self._wait)

    def _wait(self, _: memoryview) -> bool:
        self.has_begun.set()
        assert self.may_end.wait(PATIENCE_S)
        return False


Make = Callable[..., SourceUnderTest]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """``make(kind)``, or with a store for the tiers."""
    opened: list[SourceUnderTest] = []

    def build(kind: str, store: BlockStore | None = None) -> SourceUnderTest:
        opened.append(PeersUnderTest() if kind == "peer" else TiersUnderTest(kind, tmp_path, store))
        return opened[-1]

    yield build
    for given in opened:
        given.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_kept_is_found_and_loaded(kind: str, make: Make) -> None:
    given, request = make(kind), request_of()
    assert given.find(request, 0) is None, "a miss"
    given.keep(request)
    hit = given.find(request, 0)
    assert hit is not None
    assert (hit.num_blocks, hit.is_pending) == (NUM_BLOCKS, False)
    assert hit.seconds > 0
    later = given.find(request, 5)
    assert later is not None
    assert later.num_blocks == NUM_BLOCKS - 5
    assert later.seconds < hit.seconds
    assert given.find(request, NUM_BLOCKS) is None, "the last token is always computed"
    given.load(request, 5, NUM_BLOCKS - 5)
    assert given.end() == (request.request_id, True, NUM_BLOCKS - 5)
    assert given.is_right(5, NUM_BLOCKS - 5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_token_is_computed_even_if_it_ends_a_block(kind: str, make: Make) -> None:
    given, request = make(kind), request_of()
    given.keep(request)
    del request.token_ids[NUM_BLOCKS * BLOCK_SIZE :]
    hit = given.find(request, 0)
    assert hit is not None
    assert hit.num_blocks == NUM_BLOCKS - 1


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_costs_the_blocks_that_did_not_come(kind: str, fault: str, make: Make) -> None:
    given, request = make(kind), request_of()
    given.fail(fault, request)
    if given.find(request, 0) is None:
        assert fault == "full", "a miss"
        return
    given.load(request, 0, NUM_BLOCKS)
    num_loaded = given.loads[fault]
    assert given.end() == (request.request_id, False, num_loaded)
    assert given.is_right(0, num_loaded)
    counts = given.source.stats().counts
    assert counts.num_hit_blocks == num_loaded
    assert counts.num_failed_loads == (num_loaded == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_load_keeps_no_one_from_asking_and_counts_in_the_next_estimate(kind: str, make: Make) -> None:
    given, request, other = make(kind), request_of(1), request_of(1)
    given.keep(request)
    other.holder = request.holder
    waiting, go_on = given.hold()
    before = given.find(request, 0)
    given.load(request, 0, NUM_BLOCKS)
    assert waiting.wait(PATIENCE_S)
    during = given.find(other, 0)
    assert before is not None
    assert during is not None
    assert during.seconds > before.seconds
    go_on.set()
    assert given.end() == (request.request_id, True, NUM_BLOCKS)
    assert given.is_right(0, NUM_BLOCKS)


@pytest.mark.parametrize("kind", STORAGES)
def test_what_waits_to_be_written_is_pending_and_then_a_hit(kind: str, make: Make) -> None:
    given, request = make(kind), request_of()
    store, may_go = given.store.store, threading.Event()
    given.store.store = lambda *block: may_go.wait(PATIENCE_S) and store(*block)
    given.evict(request)
    hit = given.find(request, 0)
    assert hit is not None
    assert hit.is_pending
    assert hit.num_blocks == NUM_BLOCKS
    assert given.source.pending
    may_go.set()
    assert given.source.settle(PATIENCE_S)
    settled(given.store)
    hit = given.find(request, 0)
    assert hit is not None
    assert not hit.is_pending
    assert not given.source.pending


@pytest.mark.parametrize("fill", [lambda _: False, fill_with_noise, raise_error], ids=["dead", "torn", "raising"])
def test_a_load_from_a_store_that_has_nothing_ends_with_nothing(fill: Callable[[memoryview], bool], make: Make) -> None:
    given, request = make("", Unsound(fill)), request_of()
    assert given.find(request, 0) is not None, "it says that it has everything"
    given.load(request, 0, NUM_BLOCKS)
    assert given.end() == (request.request_id, False, 0)


@pytest.mark.parametrize("kind", STORAGES)
def test_nothing_is_found_after_a_clear_not_even_what_was_being_loaded(kind: str, make: Make) -> None:
    """The load itself ends once, with or without its blocks: the request was under way when the operator cleared."""
    given, request = make(kind), request_of()
    given.keep(request)
    given.load(request, 0, NUM_BLOCKS)
    given.source.clear()
    assert given.find(request, 0) is None, "at once"
    name, is_whole, num_blocks = given.end()
    assert (name, is_whole) == (request.request_id, num_blocks == NUM_BLOCKS)
    settled(given.store)
    assert given.find(request, 0) is None
    given.load(request, 0, NUM_BLOCKS)
    assert given.end() == (request.request_id, False, 0)


def test_loads_that_wait_end_when_the_source_is_closed(make: Make) -> None:
    store = Hanging()
    given = make("", store)
    for number in range(3):
        given.load(request_of(number), 0, NUM_BLOCKS)
    assert store.has_begun.wait(PATIENCE_S)
    closing = threading.Thread(target=given.source.close)
    closing.start()
    store.may_end.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert sorted(given.ends.take() for _ in range(3)) == [(f"r{number}", False, 0) for number in range(3)]
    assert given.ends.is_empty
