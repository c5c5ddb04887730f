"""What the contract suite of sources runs on: each source with something to read from, and its faults.

A source under test writes into the pool of a mock engine, whose KV the suite compares byte by byte.
"""

from __future__ import annotations

import asyncio
import ctypes
import queue
import random
import shutil
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from tests.tiers.conftest import PrivateMemory, host_bytes
from tests.tiers.engines import DEAR, build_executor, prompt_of
from tests.tiers.waiting import settled
from tests.worker.cluster import LOOPBACK, Client, Cluster, Node, cluster
from tests.worker.test_prefixes import AtRead

from kvrelay.config import WorkerRole
from kvrelay.core.handoff import PrefixHolder, new_prefix_id
from kvrelay.core.layout import MemoryRegion
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.token_ids import to_bytes
from kvrelay.engine.block_pool import Evicted
from kvrelay.engine.cached_free import CachedBlock
from kvrelay.engine.kv_source import Hit, SourceBeyond
from kvrelay.engine.request import Request
from kvrelay.engine.step import KvLoad, StepOutput
from kvrelay.tiers.block import BlockName, shape_of
from kvrelay.tiers.carrier import ThreadCarrier
from kvrelay.tiers.disk import DiskStore
from kvrelay.tiers.host import CLOCK_BYTES, SET_BYTES, HostStore, num_sets
from kvrelay.tiers.store import BlockStore
from kvrelay.tiers.tiers import KvTiers
from kvrelay.worker.prefixes import PeerPrefixes

NUM_BLOCKS, BLOCK_SIZE = 12, 4
TARGET = 20
"""Loads go to the blocks of the pool from here on, which nothing else uses."""
PATIENCE_S = 60.0
FAULTS = ("torn", "full", "lying", "dead")


class SourceUnderTest(Protocol):
    """``loads`` how many blocks arrive in spite of each fault."""

    source: SourceBeyond
    loads: dict[str, int]

    def keep(self, request: Request) -> None:
        """What it reads from has all blocks of the request now."""

    def fail(self, fault: str, request: Request) -> None:
        """What it reads from is torn, lying or dead from now on, or was too full to keep this request."""

    def hold(self) -> tuple[threading.Event, threading.Event]:
        """Loads wait: the first event tells that one does, the second lets them go on."""

    def find(self, request: Request, first: int) -> Hit | None: ...

    def load(self, request: Request, first: int, num_blocks: int) -> None: ...

    def end(self) -> tuple[str, bool, int]:
        """Of the one load that was begun."""

    def is_right(self, first: int, num_blocks: int) -> bool:
        """Whether these blocks of what was kept are in the pool."""

    def close(self) -> None: ...


def request_of(number: int = 1) -> Request:
    """Of 12 full blocks and a token."""
    request = Request(f"r{number}", prompt_of(number, NUM_BLOCKS * BLOCK_SIZE + 1), SamplingParams(max_tokens=1))
    request.hash_blocks(NUM_BLOCKS, BLOCK_SIZE)
    return request


def memory_of(region: MemoryRegion) -> memoryview:
    return memoryview((ctypes.c_ubyte * region.num_bytes).from_address(region.address)).cast("B")


def load_of(request: Request, first: int, num_blocks: int) -> KvLoad:
    return KvLoad(request.request_id, first, tuple(range(TARGET + first, TARGET + first + num_blocks)))


class Ends:
    """The ends of a source's loads."""

    def __init__(self, source: SourceBeyond) -> None:
        self._ends: queue.Queue[tuple[str, bool, int]] = queue.Queue()
        source.start(lambda *end: self._ends.put(end))

    def take(self) -> tuple[str, bool, int]:
        return self._ends.get(timeout=PATIENCE_S)

    @property
    def is_empty(self) -> bool:
        return self._ends.empty()


class TiersUnderTest:
    """A KvTiers over one store and the pool of a mock engine."""

    def __init__(self, kind: str, folder: Path, store: BlockStore | None = None) -> None:
        self.loads = dict.fromkeys(FAULTS, 0)
        self.executor = build_executor()
        self.shape = shape_of("mock", self.executor.kv_layout)
        self._folder = folder
        self._memory = PrivateMemory(host_bytes(256, self.shape))
        self.store = store or self._open(kind)
        carrier = ThreadCarrier(self.executor.kv_region, self.shape.block_bytes)
        self.tiers = self.source = KvTiers(self.shape, [self.store], lambda: DEAR, carrier)
        self.ends = Ends(self.tiers)
        self._pool = memory_of(self.executor.kv_region)
        """What is kept lies in its first blocks."""
        num_bytes = NUM_BLOCKS * self.shape.block_bytes
        self._pool[:num_bytes] = random.Random(7).randbytes(num_bytes)

    def _open(self, kind: str) -> BlockStore:
        if kind == "host":
            return HostStore(self._memory, self.shape)
        return DiskStore(self._folder, self.shape, 1 << 20, 1e6)

    def evict(self, request: Request) -> None:
        self.tiers.evicted(blocks_of(request))

    def keep(self, request: Request) -> None:
        self.evict(request)
        assert self.tiers.settle(PATIENCE_S)
        settled(self.store)

    def fail(self, fault: str, request: Request) -> None:
        if fault == "full":
            self.store.store = lambda name, payload, worth_s: None
        elif fault == "lying":
            self.store.holds = lambda sequence_hash: True
        else:
            self.keep(request)
            if fault == "torn":
                self._tear()
            elif isinstance(self.store, DiskStore):
                shutil.rmtree(self._folder)
            else:
                self.store.load = _broken

    def _tear(self) -> None:
        if isinstance(self.store, DiskStore):
            for path in (path for path in self._folder.rglob("*") if path.is_file()):
                path.write_bytes(path.read_bytes()[: self.shape.header_bytes + 1])
            return
        memory = memoryview(self._memory.memory)
        slots_at = CLOCK_BYTES + num_sets(len(memory), self.shape) * SET_BYTES
        memory[slots_at:] = bytes(byte ^ 1 for byte in memory[slots_at:])

    def hold(self) -> tuple[threading.Event, threading.Event]:
        waiting, go_on, load = threading.Event(), threading.Event(), self.store.load

        def held(name: BlockName, into: memoryview) -> bool:
            waiting.set()
            assert go_on.wait(PATIENCE_S)
            return load(name, into)

        self.store.load = held
        return waiting, go_on

    def find(self, request: Request, first: int) -> Hit | None:
        return self.tiers.find(request, first)

    def load(self, request: Request, first: int, num_blocks: int) -> None:
        self.tiers.load(request, load_of(request, first, num_blocks), StepOutput())

    def end(self) -> tuple[str, bool, int]:
        end = self.ends.take()
        assert self.tiers.settle(PATIENCE_S)
        assert self.ends.is_empty, "a load ends once"
        return end

    def is_right(self, first: int, num_blocks: int) -> bool:
        size = self.shape.block_bytes
        kept = self._pool[first * size : (first + num_blocks) * size]
        return kept == self._pool[(TARGET + first) * size : (TARGET + first + num_blocks) * size]

    def close(self) -> None:
        self.tiers.close()
        self.executor.shutdown()


def blocks_of(request: Request, chance: float = 1.0) -> list[Evicted]:
    """As the pool would evict them from its first blocks."""
    hashes, size = request.sequence_hashes, BLOCK_SIZE
    return [
        Evicted(
            at,
            CachedBlock(
                hashes[at], hashes[at - 1] if at else None, to_bytes(request.token_ids[size * at :][:size]), at
            ),
            chance,
        )
        for at in range(NUM_BLOCKS)
    ]


def _broken(name: BlockName, into: memoryview) -> bool:
    into[:] = bytes(len(into))
    raise RuntimeError("a broken store")


class PeersUnderTest:
    """A PeerPrefixes of one worker, and another worker that holds prefixes. The cluster runs on a thread."""

    LIE = 5
    """Blocks that are still there of those which the router promises."""

    def __init__(self) -> None:
        self.loads = {**dict.fromkeys(FAULTS, 0), "lying": self.LIE}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stack = AsyncExitStack()
        self._at_read: AtRead | None = None
        self._shared: Cluster
        self._holder: Node
        self._reader: Node
        self._client: Client
        self._do(self._start())
        worker, facts = self._reader.worker, self._reader.engine.facts
        self.source = PeerPrefixes(
            self._reader.id, facts.kv_layout, worker.prefill.handoffs, lambda: worker.inspect().lease.term, lambda: DEAR
        )
        self.ends = Ends(self.source)
        self._kept: list[int] = []
        self._other = new_prefix_id(self._holder.id)

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    async def _start(self) -> None:
        self._shared = await self._stack.enter_async_context(cluster(transfer=replace(LOOPBACK, kv_checksums=True)))
        # Of the holder's pool a prefix of the suite is less than what may be lent.
        self._holder = await self._shared.join(WorkerRole.BOTH, block_size=BLOCK_SIZE, num_blocks=64)
        self._reader = await self._shared.join(WorkerRole.BOTH, block_size=BLOCK_SIZE)
        nodes = (self._holder, self._reader)
        await self._shared.until(lambda: all(len(node.worker.inspect().peers.leased) == 2 for node in nodes))
        self._client = await self._shared.client(self._holder)

    def keep(self, request: Request, num_blocks: int = NUM_BLOCKS) -> None:
        self._do(self._compute(request, num_blocks))
        request.holder = PrefixHolder(self._holder.id, NUM_BLOCKS * BLOCK_SIZE)

    async def _compute(self, request: Request, num_blocks: int) -> None:
        tokens = request.token_ids[: num_blocks * BLOCK_SIZE + 1]
        self._client.send(request.request_id, tuple(tokens), max_tokens=1)
        assert len(await self._client.answer(request.request_id)) == 1
        self._kept = await self._holder.engine.call(lambda core: core.pool.find_prefix(tokens, request.sequence_hashes))

    def fail(self, fault: str, request: Request) -> None:
        self.keep(request, self.LIE if fault == "lying" else NUM_BLOCKS)
        if fault == "torn":
            self._shared.fabric.faults.corrupt_next = 1
        elif fault == "full":
            self._do(self._fill(request))
        elif fault == "dead":
            self._do(self._holder.kill(self._shared))

    async def _fill(self, request: Request) -> None:
        """Another reader has so much of what may be lent that this prefix would be too much."""
        tokens = tuple(prompt_of(99, NUM_BLOCKS * BLOCK_SIZE + 1))
        self._client.send("other", tokens, max_tokens=1)
        await self._client.answer("other")
        lent = await self._holder.engine.call(lambda core: core.lend_prefix(self._other, tokens, None))
        assert lent is not None
        self._stack.push_async_callback(self._holder.engine.call, lambda core: core.end_loan(self._other, 1))

    def hold(self) -> tuple[threading.Event, threading.Event]:
        held = AtRead(self._reader)
        return held.has_come, held.may_go

    def find(self, request: Request, first: int) -> Hit | None:
        return self.source.find(request, first)

    def load(self, request: Request, first: int, num_blocks: int) -> None:
        self.source.load(request, load_of(request, first, num_blocks), StepOutput())

    def end(self) -> tuple[str, bool, int]:
        end = self.ends.take()
        self._do(self._shared.until(lambda: not self._reader.worker.prefill.handoffs.prefixes))
        assert self.ends.is_empty, "a load ends once"
        return end

    def is_right(self, first: int, num_blocks: int) -> bool:
        here = self._reader.core.executor.checksum_blocks(range(TARGET + first, TARGET + first + num_blocks))
        return here == self._holder.core.executor.checksum_blocks(self._kept[first : first + num_blocks])

    def close(self) -> None:
        self._do(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()
