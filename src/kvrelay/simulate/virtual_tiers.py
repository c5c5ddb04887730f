"""KV tiers in virtual time: the workers' own ``KvTiers`` and ``HostStore``, over blocks without a payload.

    SimulatedHost      the memory and the disk that the workers of one host share
    VirtualCarrier     runs a job as it begins, and tells of its end when the clock is there
    VirtualHost, VirtualDisk     decide as the real stores; a block takes its bytes over a bandwidth of ``Costs``

What host memory keeps is decided by its sets of tags and worths (``tiers/host.py``), of which there are as many here as
the real memory would have. Of a disk there is the order of use.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import msgspec

from kvrelay.config import TiersConfig
from kvrelay.core.step_cost import StepCost
from kvrelay.core.tier_stats import StoreStats
from kvrelay.errors import ConfigError
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.loop import EventLoop, StepClock
from kvrelay.tiers.block import BlockName, Shape
from kvrelay.tiers.carrier import Job, Jobs
from kvrelay.tiers.disk import MAX_WAITING
from kvrelay.tiers.disk_index import MAX_FILES, SPARE
from kvrelay.tiers.host import HostStore, bytes_of, num_sets
from kvrelay.tiers.store import BlockChanges, BlockStore
from kvrelay.tiers.tiers import KvTiers

FINGERPRINT = bytes(16)
Spend = Callable[[float], None]
"""``spend(seconds)``: the job that runs takes so much longer."""


class VirtualCarrier:
    """``engine_clock``: of the worker's engine, which copies a block in ``copy_s``. ``catch_up`` shows what the engine
    has done until now."""

    lock = nullcontext()
    is_closed = False

    def __init__(self, loop: EventLoop, engine_clock: StepClock, copy_s: float, catch_up: Callable[[], None]) -> None:
        self.jobs = Jobs()
        self._catch_up = catch_up
        self._loop, self._engine_clock, self._copy_s = loop, engine_clock, copy_s
        self._nothing = memoryview(bytearray())
        self._spent_s = 0.0
        self._is_busy = False

    def start(self, on_unused: Callable[[], None]) -> None:
        """No one reads its log."""

    def wake(self) -> None:
        if not self._is_busy:
            self._is_busy = True
            self._loop.after(0.0, self._next)

    def spend(self, seconds: float) -> None:
        self._spent_s += seconds

    def stopwatch(self) -> float:
        return self._spent_s

    def copy(self, block_id: int) -> bytes:
        self._engine_clock.ahead_s += self._copy_s
        self._spent_s += self._copy_s
        return b""

    def room(self, block_id: int) -> memoryview:
        return self._nothing

    def settle(self, timeout_s: float) -> bool:
        """No virtual time passes in it."""
        return not self._is_busy

    def close(self) -> None:
        """It has no thread."""

    def _next(self) -> None:
        job = self.jobs.next()
        self._is_busy = job is not None
        if job is not None:
            self._catch_up()
            began_s = self._spent_s
            job.run()
            self._loop.after(self._spent_s - began_s, partial(self._end, job))

    def _end(self, job: Job) -> None:
        job.ended()
        self._next()


class _Memory:
    def __init__(self, num_bytes: int) -> None:
        self.memory = mmap.mmap(-1, num_bytes)

    def close(self) -> None:
        """It ends with the simulation."""


class VirtualHost(HostStore):
    """The real one, with blocks of no bytes."""

    def __init__(self, memory: _Memory, bare: Shape, block_s: float, spend: Spend) -> None:
        super().__init__(memory, bare)
        self._block_s, self._spend = block_s, spend
        self.note_all()

    def load(self, name: BlockName, into: memoryview) -> bool:
        self._spend(self._block_s)
        return super().load(name, into)

    def store(self, name: BlockName, payload: memoryview, worth_s: float) -> None:
        self._spend(self._block_s)
        super().store(name, payload, worth_s)


class VirtualDirectory:
    """The blocks of a host's disk; the least recently used go first, as in ``tiers/disk_index.py``."""

    def __init__(self, max_bytes: int, stored_bytes: int) -> None:
        self.blocks: dict[int, None] = {}
        """By use, the latest last."""
        self.changes: list[BlockChanges] = []
        """Of each worker."""
        self._most = min(max_bytes // stored_bytes, MAX_FILES)
        self._spared = min((max_bytes - max_bytes // SPARE) // stored_bytes, MAX_FILES - MAX_FILES // SPARE)

    def use(self, sequence_hash: int) -> None:
        """It was used."""
        del self.blocks[sequence_hash]
        self.blocks[sequence_hash] = None

    def add(self, sequence_hash: int) -> None:
        """It was written. Makes room for more than this one, if there is too much."""
        self.blocks[sequence_hash] = None
        gone = list(self.blocks)[: len(self.blocks) - self._spared] if len(self.blocks) > self._most else []
        for block in gone:
            del self.blocks[block]
        for changes in self.changes:
            changes.added(sequence_hash)
            for block in gone:
                changes.removed(block)


class VirtualDisk:
    """A worker's view of its host's disk. Like a ``DiskStore`` it writes behind a queue."""

    medium = "disk"

    def __init__(self, directory: VirtualDirectory, loop: EventLoop, block_s: float, spend: Spend) -> None:
        self.stats, self.changes = StoreStats(), BlockChanges()
        self._directory, self._loop = directory, loop
        self._block_s, self._spend = block_s, spend
        self._written_s = 0.0
        """When the queue will be empty."""
        directory.changes.append(self.changes)

    def __repr__(self) -> str:
        return f"VirtualDisk({len(self._directory.blocks)} blocks)"

    def holds(self, sequence_hash: int) -> bool:
        return sequence_hash in self._directory.blocks

    def worth_again(self, sequence_hash: int, worth_s: float) -> bool:
        return self.holds(sequence_hash)

    def load(self, name: BlockName, into: memoryview) -> bool:
        self._spend(self._block_s)
        if not self.holds(name.sequence_hash):
            self.stats.misses["gone"] += 1
            return False
        self._directory.use(name.sequence_hash)
        self.stats.num_loaded += 1
        return True

    def store(self, name: BlockName, payload: memoryview, worth_s: float) -> None:
        now_s = self._loop.clock.now()
        if self._written_s - now_s >= MAX_WAITING * self._block_s:
            self.stats.drops["busy"] += 1
            return
        self._written_s = max(self._written_s, now_s) + self._block_s
        self._loop.at(self._written_s, lambda: self._write(name.sequence_hash))

    def _write(self, sequence_hash: int) -> None:
        if self.holds(sequence_hash):
            self._directory.use(sequence_hash)
        else:
            self._directory.add(sequence_hash)
            self.stats.num_stored += 1

    def clear(self) -> int:
        num_blocks = len(self._directory.blocks)
        self._directory.blocks.clear()
        return num_blocks

    def close(self) -> None:
        """Nothing is open."""


class SimulatedHost:
    """What ``config`` gives the workers of one host. Raises ConfigError if that is less than a block."""

    def __init__(self, config: TiersConfig, costs: Costs, block_size: int, loop: EventLoop) -> None:
        self._costs, self._loop = costs, loop
        self._shape = shape = Shape(FINGERPRINT, block_size, costs.token_bytes * block_size)
        self._bare = msgspec.structs.replace(shape, block_bytes=0)
        self._memory: _Memory | None = None
        self._directory: VirtualDirectory | None = None
        if config.host_bytes:
            self._memory = _Memory(bytes_of(num_sets(config.host_bytes, shape), self._bare))
        if config.disk is not None:
            if config.disk[1] < shape.stored_bytes:
                raise ConfigError(f"disk_kv_cache is below {shape.stored_bytes} bytes, one block of this model")
            self._directory = VirtualDirectory(config.disk[1], shape.stored_bytes)

    def open_tiers(
        self, cost: Callable[[], StepCost], engine_clock: StepClock, catch_up: Callable[[], None] = lambda: None
    ) -> KvTiers:
        """Of one worker."""
        host_s = self._shape.block_bytes / self._costs.host_bytes_per_s
        disk_s = self._shape.block_bytes / self._costs.disk_bytes_per_s
        carrier = VirtualCarrier(self._loop, engine_clock, host_s, catch_up)
        stores: list[BlockStore] = []
        if self._memory is not None:
            stores.append(VirtualHost(self._memory, self._bare, host_s, carrier.spend))
        if self._directory is not None:
            stores.append(VirtualDisk(self._directory, self._loop, disk_s, carrier.spend))
        return KvTiers(self._shape, stores, cost, carrier)
