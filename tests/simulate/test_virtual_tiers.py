"""KV tiers in virtual time: they decide as the real ones, take the time of their bytes, and belong to a host."""

from __future__ import annotations

import queue
import random
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import pytest
from tests.draws import seeds
from tests.tiers.conftest import PrivateMemory
from tests.tiers.engines import DEAR, PATIENCE_S, build_executor
from tests.tiers.sources import BLOCK_SIZE, NUM_BLOCKS, blocks_of, load_of, request_of
from tests.tiers.waiting import settled

from kvrelay.config import EngineConfig, RouterConfig, TiersConfig
from kvrelay.core.events import BlockRemoved, BlockStored
from kvrelay.core.step_cost import StepCost
from kvrelay.engine.block_pool import Evicted
from kvrelay.engine.kv_source import Hit
from kvrelay.engine.request import Request
from kvrelay.engine.step import StepOutput
from kvrelay.errors import ConfigError
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.cluster import ClusterSpec
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.loop import EventLoop, StepClock
from kvrelay.simulate.simulation import simulate
from kvrelay.simulate.virtual_tiers import SimulatedHost
from kvrelay.tiers.block import shape_of
from kvrelay.tiers.carrier import ThreadCarrier
from kvrelay.tiers.disk import DiskStore
from kvrelay.tiers.host import HostStore, bytes_of
from kvrelay.tiers.store import BlockStore
from kvrelay.tiers.tiers import KvTiers

End = tuple[str, bool, int]
HOST_SETS, DISK_BLOCKS = 8, 100
SHAPE = shape_of("mock", build_executor().kv_layout)


class Side(Protocol):
    """Tiers of one kind, over what they copy from and to."""

    tiers: KvTiers

    def settle(self) -> list[End]:
        """Let all that was given be done. The loads that have ended since the last call."""


class RealSide:
    def __init__(self, kinds: tuple[str, ...], folder: Path) -> None:
        self.executor = build_executor()
        self._stores: list[BlockStore] = []
        if "host" in kinds:
            self._stores.append(HostStore(PrivateMemory(bytes_of(HOST_SETS, SHAPE)), SHAPE))
        if "disk" in kinds:
            self._stores.append(DiskStore(folder, SHAPE, DISK_BLOCKS * SHAPE.stored_bytes, 1e6))
        carrier = ThreadCarrier(self.executor.kv_region, SHAPE.block_bytes)
        self.tiers = KvTiers(SHAPE, self._stores, lambda: DEAR, carrier)
        self._ends: queue.Queue[End] = queue.Queue()
        self.tiers.start(lambda *end: self._ends.put(end))

    def settle(self) -> list[End]:
        assert self.tiers.settle(PATIENCE_S)
        for store in self._stores:
            settled(store)
        return [self._ends.get() for _ in range(self._ends.qsize())]

    def close(self) -> None:
        self.tiers.close()
        self.executor.shutdown()


class VirtualSide:
    def __init__(self, kinds: tuple[str, ...]) -> None:
        config = TiersConfig(
            host_kv_cache=str(bytes_of(HOST_SETS, SHAPE) if "host" in kinds else 0),
            disk_kv_cache=f"DIR,{DISK_BLOCKS * SHAPE.stored_bytes}" if "disk" in kinds else "",
        )
        self.loop = EventLoop()
        costs = Costs(token_bytes=SHAPE.block_bytes // BLOCK_SIZE)
        self.tiers = SimulatedHost(config, costs, BLOCK_SIZE, self.loop).open_tiers(
            lambda: DEAR, StepClock(self.loop.clock)
        )
        self._ends: list[End] = []
        self.tiers.start(lambda *end: self._ends.append(end))

    def settle(self) -> list[End]:
        self.loop.run()
        ends, self._ends = self._ends, []
        return ends


def known(side: Side) -> Counter[tuple[str, str, int]]:
    """What its events tell."""
    told: Counter[tuple[str, str, int]] = Counter()
    for event in side.tiers.drain_events():
        assert isinstance(event, BlockStored | BlockRemoved)
        told.update((type(event).__name__, str(event.medium), block) for block in event.block_hashes)
    return told


def counted(side: Side) -> list[Any]:
    """Everything that is counted and is no time."""
    stats = side.tiers.stats()
    counts = stats.counts
    found: list[Any] = [counts.num_hits, counts.num_hit_blocks, counts.num_not_worth, counts.num_failed_loads]
    for medium, store in stats.stores.items():
        found.append((medium, store.num_loaded, store.num_stored, store.loaded_bytes, +store.drops, +store.misses))
    return found


def found_by(side: Side, request: Request, first: int) -> tuple[int, bool, tuple[str, ...]] | None:
    hit: Hit | None = side.tiers.find(request, first)
    return None if hit is None else (hit.num_blocks, hit.is_pending, hit.media)


@pytest.mark.parametrize("kinds", [("host",), ("disk",), ("host", "disk")])
@pytest.mark.parametrize("seed", seeds(1, 4))
def test_the_same_sequence_leads_to_the_same_decisions(seed: int, kinds: tuple[str, ...], tmp_path: Path) -> None:
    """Prompts of 12 blocks are evicted in part, with chances, and loaded; stores have room for some of 24 prompts."""
    rng = random.Random(seed)
    real, virtual = RealSide(kinds, tmp_path), VirtualSide(kinds)
    num_loaded = 0
    try:
        for _ in range(300):
            request = request_of(rng.randrange(24))
            first, end = sorted(rng.sample(range(NUM_BLOCKS + 1), 2))
            blocks: list[Evicted] = blocks_of(request, rng.choice([1.0, 0.5, 0.01]))[first:end]
            is_load = rng.random() < 0.4
            found = [found_by(side, request, first) for side in (real, virtual)]
            assert found[0] == found[1]
            for side in (real, virtual):
                if is_load and found[0] is not None:
                    side.tiers.load(request, load_of(request, first, found[0][0]), StepOutput())
                elif not is_load:
                    side.tiers.evicted(blocks)
            ends = [side.settle() for side in (real, virtual)]
            assert ends[0] == ends[1]
            num_loaded += len(ends[0])
            assert known(real) == known(virtual)
            assert counted(real) == counted(virtual)
    finally:
        real.close()
    assert num_loaded > 20, "else this says little"


# -- simulated workers ------------------------------------------------------------------------------------------------

STEP = StepCost(step_s=0.01, prefill_s=0.01, prefill_token_s=1e-3, pair_s=0.0, decode_s=0.0, context_s=0.0)
COSTS = Costs(
    step=STEP,
    between_steps_s=0.0,
    hop_s=0.002,
    token_bytes=1000,
    host_bytes_per_s=1e7,
    disk_bytes_per_s=5e6,
    frontend_request_s=0.0005,
    frontend_token_s=0.0,
)
BLOCK_S = 16 * 1000 / 1e7
"""To copy a block of host memory."""
ENGINE = EngineConfig(block_size=16, num_blocks=16, max_num_seqs=4, max_num_batched_tokens=512)
HOST = TiersConfig(host_kv_cache="4MiB")


def prompt(time_s: float, *hash_ids: int, tool: str = "") -> Arrival:
    """Of 16 tokens for each id, and an answer of one token."""
    return Arrival(
        time_s=time_s, prompt_tokens=16 * len(hash_ids), answer_tokens=1, hash_ids=hash_ids, hash_tokens=16, tool=tool
    )


FIRST, OTHER = tuple(range(1, 11)), tuple(range(101, 113))
RETURNING = [prompt(0.0, *FIRST, tool="read"), prompt(1.0, *OTHER), prompt(2.0, *FIRST, 11)]
"""A session of 10 blocks, 12 blocks of another prompt, and the session's next turn: the pool has 16."""


def test_what_the_pool_gave_up_is_loaded_in_the_time_of_its_bytes() -> None:
    result = simulate(ClusterSpec(both=1, engine=ENGINE, tiers=HOST), RETURNING, COSTS)
    _, other, again = result.requests
    (worker,) = result.workers
    assert worker.session_tokens == {"pool": 4 * 16, "host": 6 * 16, "computed": 0}
    assert again.num_cached_tokens == 10 * 16
    assert result.num_computed_tokens == (10 + 12 + 1) * 16
    assert worker.kv_tiers is not None
    store = worker.kv_tiers.stores["host"]
    assert (store.num_stored, store.num_loaded, store.loaded_bytes) == (6 + 7, 6, 6 * 16 * 1000)
    assert store.load_s == pytest.approx(6 * BLOCK_S)
    around_s = 0.0005 + 2 * 0.002
    # The other prompt's step begins with the copies of 6 blocks; 7 of its own are copied while 6 are loaded.
    bare = simulate(ClusterSpec(both=1, engine=ENGINE), RETURNING, COSTS).requests[1]
    assert other.ttft_s == pytest.approx(bare.ttft_s + 6 * BLOCK_S)
    assert again.ttft_s == pytest.approx(around_s + 7 * BLOCK_S + 0.01 + 16e-3)


def test_a_disk_below_host_memory_gets_what_is_evicted_twice() -> None:
    disk = TiersConfig(host_kv_cache="4MiB", disk_kv_cache="DIR,4MiB")
    load = [*RETURNING, prompt(3.0, *OTHER), prompt(4.0, *FIRST, 11)]
    (worker,) = simulate(ClusterSpec(both=1, engine=ENGINE, tiers=disk), load, COSTS).workers
    assert worker.kv_tiers is not None
    stores = worker.kv_tiers.stores
    assert stores["disk"].num_stored > 0
    assert stores["disk"].num_stored < stores["host"].num_stored


@pytest.mark.parametrize(("workers_per_host", "num_computed"), [(1, 63 + 12), (2, 63 + 1)])
def test_workers_of_one_host_share_its_memory(workers_per_host: int, num_computed: int) -> None:
    """Two workers by turns: the second finds what the first one has computed and given up, if they share a host."""
    spec = ClusterSpec(
        both=2, engine=ENGINE, tiers=HOST, workers_per_host=workers_per_host, router=RouterConfig(router="round-robin")
    )
    blocks = tuple(range(1, 12))
    others = [tuple(range(100 * at + 101, 100 * at + 101 + length)) for at, length in enumerate((11, 15, 11, 15))]
    load = [prompt(at, *own) for at, own in enumerate([blocks, *others, (*blocks, 12)])]
    result = simulate(spec, load, COSTS)
    assert [one.worker_id for one in result.requests] == ["b0", "b1"] * 3
    assert result.num_computed_tokens == num_computed * 16


def test_the_router_goes_by_what_host_memory_has() -> None:
    """The worker whose memory has the session gets it again, though both pools have forgotten it."""
    spec = ClusterSpec(both=2, engine=ENGINE, tiers=HOST, workers_per_host=1)
    others = [prompt(1.0 + at, *range(100 * at + 101, 100 * at + 116)) for at in range(6)]
    result = simulate(spec, [prompt(0.0, *FIRST), *others, prompt(9.0, *FIRST, 11)], COSTS)
    first, *between, last = result.requests
    assert {one.worker_id for one in between} == {"b0", "b1"}, "else the pool had it"
    assert last.worker_id == first.worker_id
    assert last.num_cached_tokens == 10 * 16


def test_equal_arguments_give_equal_results() -> None:
    spec = ClusterSpec(both=1, engine=ENGINE, tiers=TiersConfig(host_kv_cache="300KiB", disk_kv_cache="DIR,1MiB"))
    load = [prompt(0.3 * at, *range(40 * (at % 7) + 1, 40 * (at % 7) + 12)) for at in range(40)]
    one, other = (simulate(spec, load, COSTS) for _ in range(2))
    assert [request.tokens_s for request in one.requests] == [request.tokens_s for request in other.requests]
    assert one.workers == other.workers


@pytest.mark.parametrize(
    ("tiers", "engine", "reason"),
    [
        (TiersConfig(host_kv_cache="1KiB"), ENGINE, "host_kv_cache is below"),
        (TiersConfig(disk_kv_cache="DIR,1KiB"), ENGINE, "disk_kv_cache is below"),
        (HOST, EngineConfig(enable_prefix_caching=False), "keep prefixes"),
    ],
)
def test_tiers_that_cannot_be_are_refused(tiers: TiersConfig, engine: EngineConfig, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        simulate(ClusterSpec(both=1, engine=engine, tiers=tiers), RETURNING, COSTS)
