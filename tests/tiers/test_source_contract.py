"""What every ``KvSource`` over stores promises the engine, whatever its stores do: each load ends exactly once, with no
more than has arrived, and nothing is written after it or after ``close``."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.tiers.conftest import PrivateMemory, host_bytes
from tests.tiers.engines import DEAR, build_executor, prompt_of
from tests.tiers.test_tiers import Unsound, fill_with_noise, raise_error
from tests.tiers.waiting import settled

from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.block_pool import CachedBlock
from kvrelay.engine.request import Request
from kvrelay.engine.step import KvLoad, StepOutput
from kvrelay.tiers.block import Shape, shape_of
from kvrelay.tiers.disk import DiskStore
from kvrelay.tiers.host import HostStore
from kvrelay.tiers.store import BlockStore
from kvrelay.tiers.tiers import KvTiers

NUM_BLOCKS = 12
PATIENCE_S = 60.0


class Hanging(Unsound):
    """Reads nothing until it may."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        super().__init__(self._wait)

    def _wait(self, _: memoryview) -> bool:
        self.has_begun.set()
        assert self.may_end.wait(PATIENCE_S)
        return False


class Source:
    """A KvTiers over one store and the pool of a mock engine, with the ends of its loads."""

    def __init__(self, open_store: Callable[[Shape], BlockStore]) -> None:
        self.executor = build_executor()
        self.shape = shape_of("mock", self.executor.kv_layout)
        self.store = open_store(self.shape)
        self.tiers = KvTiers(self.executor.kv_region, self.shape, [self.store], lambda: DEAR)
        self.ends: queue.Queue[tuple[str, bool, int]] = queue.Queue()
        self.tiers.start(lambda *end: self.ends.put(end))

    def request(self, number: int = 1) -> Request:
        """Of 12 full blocks and a token."""
        request = Request(f"r{number}", prompt_of(number, NUM_BLOCKS * 4 + 1), SamplingParams(max_tokens=1))
        request.hash_blocks(NUM_BLOCKS, 4)
        return request

    def keep(self, request: Request) -> None:
        """The tier gets all blocks of the request, as the pool would evict them."""
        hashes = request.sequence_hashes
        blocks = [
            (at, CachedBlock(hashes[at], hashes[at - 1] if at else None, 0, tuple(request.token_ids[4 * at :][:4]), at))
            for at in range(NUM_BLOCKS)
        ]
        self.tiers.evicted(blocks)
        assert self.tiers.settle(PATIENCE_S)
        settled(self.store)

    def load(self, request: Request, first: int = 0) -> None:
        blocks = tuple(range(20, 20 + NUM_BLOCKS - first))
        self.tiers.load(request, KvLoad(request.request_id, first, blocks), StepOutput())

    def end(self) -> tuple[str, bool, int]:
        """Of the one load."""
        end = self.ends.get(timeout=PATIENCE_S)
        assert self.tiers.settle(PATIENCE_S)
        assert self.ends.empty(), "a load ends once"
        return end


Make = Callable[[str | BlockStore], Source]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    opened: list[Source] = []

    def build(kind: str | BlockStore) -> Source:
        def open_store(shape: Shape) -> BlockStore:
            if not isinstance(kind, str):
                return kind
            if kind == "host":
                return HostStore(PrivateMemory(host_bytes(256, shape)), shape)
            return DiskStore(tmp_path, shape, 1 << 20, 1e6)

        opened.append(Source(open_store))
        return opened[-1]

    yield build
    for source in opened:
        source.tiers.close()
        source.executor.shutdown()


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_what_was_kept_is_found_and_loaded(kind: str, make: Make) -> None:
    source = make(kind)
    request = source.request()
    assert source.tiers.find(request, 0) is None, "a miss"
    source.keep(request)
    hit = source.tiers.find(request, 0)
    assert hit is not None
    assert hit.num_blocks == NUM_BLOCKS
    assert hit.seconds > 0
    later = source.tiers.find(request, 5)
    assert later is not None
    assert later.num_blocks == NUM_BLOCKS - 5
    assert source.tiers.find(request, NUM_BLOCKS) is None, "the last token is always computed"
    source.load(request, 5)
    assert source.end() == (request.request_id, True, NUM_BLOCKS - 5)


@pytest.mark.parametrize("fill", [lambda _: False, fill_with_noise, raise_error], ids=["dead", "torn", "raising"])
def test_a_load_from_a_store_that_lies_ends_with_nothing(fill: Callable[[memoryview], bool], make: Make) -> None:
    source = make(Unsound(fill))
    request = source.request()
    assert source.tiers.find(request, 0) is not None, "it says that it has everything"
    source.load(request)
    assert source.end() == (request.request_id, False, 0)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_nothing_is_found_after_a_clear_not_even_what_was_being_loaded(kind: str, make: Make) -> None:
    """The load itself ends once, with or without its blocks: the request was under way when the operator cleared."""
    source = make(kind)
    request = source.request()
    source.keep(request)
    source.load(request)
    source.tiers.clear()
    assert source.tiers.find(request, 0) is None, "at once"
    name, is_whole, num_blocks = source.end()
    assert (name, is_whole) == (request.request_id, num_blocks == NUM_BLOCKS)
    settled(source.store)
    assert source.tiers.find(request, 0) is None
    source.load(request)
    assert source.end() == (request.request_id, False, 0)


def test_loads_that_wait_end_when_the_source_is_closed(make: Make) -> None:
    store = Hanging()
    source = make(store)
    for number in range(3):
        source.load(source.request(number))
    assert store.has_begun.wait(PATIENCE_S)
    closing = threading.Thread(target=source.tiers.close)
    closing.start()
    store.may_end.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert sorted(source.ends.get_nowait() for _ in range(3)) == [(f"r{number}", False, 0) for number in range(3)]
    assert source.ends.empty()
