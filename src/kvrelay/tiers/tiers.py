"""The engine's source of KV from host memory and disk: what is kept, what is loaded, and what it is worth.

    engine's thread     find      what the stores hold of a prompt, and whether to load it is faster than to compute it
                        evicted   copy what is worth it ──> writes (bounded)
                        load      ──> reads
    carrier             clears, reads, writes; each block is verified where it lies in the pool ──> ``kv_loaded``

Nothing here may fail a request: whatever goes wrong with a block, it and those after it are computed. Who copies, and
on which clock, is the carrier's (``carrier.py``).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence, Sized
from functools import partial

import msgspec

from kvrelay.core.events import BlockRemoved, BlockStored, KvEvent, LoadCost
from kvrelay.core.hashing import token_blocks
from kvrelay.core.step_cost import StepCost
from kvrelay.core.tier_stats import TierCounts, TierStats
from kvrelay.engine.block_pool import BlockPool, Evicted
from kvrelay.engine.cached_free import CachedBlock
from kvrelay.engine.kv_source import Hit, Loaded
from kvrelay.engine.request import Request
from kvrelay.engine.step import KvLoad, StepOutput
from kvrelay.tiers.block import BlockName, Shape
from kvrelay.tiers.carrier import Carrier, Job
from kvrelay.tiers.policy import LOAD_OVERHEAD_S, QUEUE_SOFT, LoadTime, Returns, share_to_write
from kvrelay.tiers.store import BlockStore, leading

_log = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 64 * 1024 * 1024
"""Of evicted blocks that wait to be written."""
PRIOR_BYTES_PER_S = {"host": 2e9, "disk": 5e8}
FLUSH_S = 2.0
"""A worker that leaves stores what its pool has for at most this long."""


class _Read(msgspec.Struct):
    """A load, and what has come of it: leading blocks, and the seconds that they took."""

    load: KvLoad
    names: list[BlockName]
    stores: list[BlockStore]
    saves_s: float
    num_loaded: int = 0
    seconds: float = 0.0

    @property
    def is_whole(self) -> bool:
        return self.num_loaded == len(self.names)


class _Offer(msgspec.Struct, frozen=True):
    """A block that leaves the pool, and those that should take it."""

    block_id: int
    entry: CachedBlock
    worth_s: float
    stores: list[BlockStore]


class _Write(msgspec.Struct, frozen=True):
    name: BlockName
    payload: bytes
    worth_s: float
    stores: list[BlockStore]


class KvTiers:
    """A ``KvStorage`` over ``stores``, the fastest first. ``cost`` returns the costs of computing."""

    def __init__(
        self, shape: Shape, stores: Sequence[BlockStore], cost: Callable[[], StepCost], carrier: Carrier
    ) -> None:
        self._shape = shape
        self._stores = list(stores)
        self._cost = cost
        self._carrier = carrier
        self._returns = Returns()
        self._times = {s.medium: LoadTime(shape.block_bytes / PRIOR_BYTES_PER_S.get(s.medium, 5e8)) for s in stores}
        self._loaded: Loaded = lambda _, __, ___: None
        prior_s = shape.block_bytes / PRIOR_BYTES_PER_S["host"]
        self._copy_time, self._write_time = LoadTime(prior_s), LoadTime(prior_s)
        """Of a block that is evicted, on the engine's thread, and by the carrier."""
        self._num_reading = 0
        """Blocks of reads that have not ended. This and what follows is changed under the carrier's lock."""
        self._num_clearing = 0
        """Clears that have not ended: until then nothing is found."""
        self._writing: dict[int, int] = {}
        """Blocks that wait to be written, and how often."""
        self._is_awaited = False
        """Whether a request waits for one of them."""
        self._told: Callable[[], None] = lambda: None
        self._kept_share = 0.0
        self.counts = TierCounts()

    def __repr__(self) -> str:
        return f"KvTiers({self._stores!r})"

    def start(self, loaded: Loaded, changed: Callable[[], None] = lambda: None) -> None:
        self._loaded, self._told = loaded, changed
        for store in self._stores:
            store.changes.on_first = changed
            if store.changes:
                changed()
        self._carrier.start(self._tell_unused)

    def close(self) -> None:
        """End the carrier after its present block, and close the stores. Idempotent."""
        self._carrier.close()
        for store in self._stores:
            store.close()

    # -- on the engine's thread ---------------------------------------------------------------------------------------

    @property
    def pending(self) -> Sized:
        return self._writing

    def find(self, request: Request, first_block: int) -> Hit | None:
        if self._num_clearing:
            return None
        hashes = request.sequence_hashes[first_block : (len(request.token_ids) - 1) // self._shape.block_size]
        stores = leading(self._stores, hashes)
        if not stores:
            return self._find_pending(hashes, first_block)
        seconds = self._load_seconds(stores)
        if self._recompute_seconds(len(stores), first_block) <= seconds:
            # Admission asks before the request has blocks, and may ask again; the request is counted as it is placed.
            if request.block_ids:
                self.counts.num_not_worth += 1
                for medium in {store.medium for store in stores}:
                    self._times[medium].refused()
            return None
        return Hit(len(stores), seconds, media=tuple([store.medium for store in stores]))

    def _find_pending(self, hashes: Sequence[int], first_block: int) -> Hit | None:
        """What was just evicted and is not written yet. It can be loaded then."""
        num_blocks = sum(1 for _ in itertools.takewhile(self._writing.__contains__, hashes)) if self._writing else 0
        if not num_blocks:
            return None
        write_s = len(self._carrier.jobs.writes) * self._write_time.block_s
        seconds = write_s + self._load_seconds([self._stores[0]] * num_blocks)
        if self._recompute_seconds(num_blocks, first_block) <= seconds:
            return None
        self._is_awaited = True
        return Hit(num_blocks, seconds, is_pending=True, media=(self._stores[0].medium,) * num_blocks)

    @property
    def has_events(self) -> bool:
        return not self._num_clearing and any([bool(store.changes) for store in self._stores])

    def drain_events(self) -> list[KvEvent]:
        events: list[KvEvent] = []
        if not self._num_clearing:
            for store in self._stores:
                held, gone = store.changes.take()
                if held:
                    events.append(BlockStored(None, held, self._shape.block_size, medium=store.medium))
                if gone:
                    events.append(BlockRemoved(gone, store.medium))
        return events

    def load(self, request: Request, load: KvLoad, output: StepOutput) -> None:
        size, first = self._shape.block_size, load.first_block
        end = first + len(load.block_ids)
        names = []
        for index, tokens in enumerate(token_blocks(request.packed()[first * size : end * size], size), first):
            parent = request.sequence_hashes[index - 1] if index else None
            names.append(BlockName(request.sequence_hashes[index], parent, tokens))
        stores = leading(self._stores, [name.sequence_hash for name in names])
        read = _Read(load, names, stores, self._recompute_seconds(len(stores), first))
        self.counts.num_hits += 1
        with self._carrier.lock:
            self._num_reading += len(names)
            self._carrier.jobs.reads.append(Job(partial(self._read, read), partial(self._read_ended, read)))
            self._carrier.wake()

    def load_s(self, sequence_hash: int) -> float | None:
        store = next((store for store in self._stores if store.holds(sequence_hash)), None)
        return None if store is None else self._times[store.medium].block_s

    def evicted(self, blocks: Sequence[Evicted]) -> None:
        self._offer(blocks, keeps_all=False)

    def _offer(self, blocks: Sequence[Evicted], *, keeps_all: bool) -> None:
        """``keeps_all``: also those that, by experience, no one will ask for again."""
        cost = self._cost()
        offers = [offer for block in blocks if (offer := self._offer_of(block, cost, keeps_all))]
        num_kept = self._num_to_write(len(offers))
        if num_kept < len(offers):
            # The starts of prompts are found more often than their ends, and without them the ends are not found.
            offers.sort(key=lambda offer: offer.entry.depth)
            for store in self._stores:
                store.stats.drops["queue"] += len(offers) - num_kept
        began_s = self._carrier.stopwatch()
        writes = [self._write_of(offer) for offer in offers[:num_kept]]
        if writes:
            self._copy_time.took(len(writes), self._carrier.stopwatch() - began_s)
            with self._carrier.lock:
                for write in writes:
                    self._writing[write.name.sequence_hash] = self._writing.get(write.name.sequence_hash, 0) + 1
                    self._carrier.jobs.writes.append(Job(partial(self._write, write), partial(self._written, write)))
                self._carrier.wake()

    def clear(self) -> None:
        # By the carrier: a write that runs now would leave its block behind a clear from here.
        with self._carrier.lock:
            self._carrier.jobs.writes.clear()
            self._writing.clear()
            self._carrier.jobs.clears.append(Job(self._clear, self._cleared))
            self._num_clearing += 1
            self._carrier.wake()

    def flush(self, pool: BlockPool) -> None:
        """Offer what the pool has cached, before it goes. Waits, for ``FLUSH_S`` at most."""
        until_s = self._carrier.stopwatch() + FLUSH_S
        num_at_once = max(int(MAX_QUEUED_BYTES * QUEUE_SOFT) // self._shape.block_bytes, 1)
        blocks = itertools.starmap(Evicted, pool.cached_blocks())
        while (few := list(itertools.islice(blocks, num_at_once))) and self._carrier.stopwatch() < until_s:
            self._offer(few, keeps_all=True)
            if not self.settle(max(until_s - self._carrier.stopwatch(), 0.0)):
                return

    def settle(self, timeout_s: float) -> bool:
        """Wait until all that was given is done. False: it is not."""
        return self._carrier.settle(timeout_s)

    def stats(self) -> TierStats:
        costs = [(medium, time.block_s / self._shape.block_size) for medium, time in self._times.items()]
        return TierStats(
            self.counts,
            {s.medium: s.stats for s in self._stores},
            len(self._carrier.jobs.writes),
            tuple(LoadCost(medium, token_s, LOAD_OVERHEAD_S) for medium, token_s in costs),
        )

    def _num_to_write(self, num_blocks: int) -> int:
        """Of this many. Decodes evict block by block: what a share leaves of a block is kept for the next ones. A long
        prompt may evict thousands at once: never more than the queue has room for."""
        capacity = max(MAX_QUEUED_BYTES // self._shape.block_bytes, 1)
        num_queued = len(self._carrier.jobs.writes)
        share = share_to_write(num_queued / capacity)
        self._kept_share = self._kept_share + num_blocks * share if share > 0.0 else 0.0
        num_kept = max(min(int(self._kept_share), num_blocks, capacity - num_queued), 0)
        self._kept_share %= 1.0
        return num_kept

    def _offer_of(self, block: Evicted, cost: StepCost, keeps_all: bool) -> _Offer | None:
        """To those stores that should take it; None if there are none."""
        block_id, entry, chance = block
        seconds = cost.extra_seconds(self._shape.block_size, entry.depth * self._shape.block_size)
        worth_s = chance * seconds
        has_returned = self._returns.evicted(entry.sequence_hash, entry.depth)
        wanting = [store for store in self._stores if not store.worth_again(entry.sequence_hash, worth_s)]
        if not has_returned:
            # A disk below another store gets what has proved that it returns.
            wanting = [store for store in wanting if store is self._stores[0]]
            writing_s = self._copy_time.block_s + self._write_time.block_s
            # The share has the chance of a return in it already.
            if wanting and not keeps_all and self._returns.share(entry.depth) * seconds <= writing_s:
                wanting[0].stats.drops["seldom"] += 1
                return None
        return _Offer(block_id, entry, worth_s, wanting) if wanting else None

    def _write_of(self, offer: _Offer) -> _Write:
        """With the block's copy."""
        entry = offer.entry
        name = BlockName(entry.sequence_hash, entry.parent_hash, entry.tokens)
        return _Write(name, self._carrier.copy(offer.block_id), offer.worth_s, offer.stores)

    def _load_seconds(self, stores: Sequence[BlockStore]) -> float:
        """Until all of these blocks are here, with the reads before them."""
        own_s = sum(self._times[store.medium].block_s for store in stores)
        return LOAD_OVERHEAD_S + own_s + self._num_reading * own_s / len(stores)

    def _recompute_seconds(self, num_blocks: int, first_block: int) -> float:
        size = self._shape.block_size
        return self._cost().extra_seconds(num_blocks * size, first_block * size)

    # -- by the carrier -----------------------------------------------------------------------------------------------

    def _write(self, write: _Write) -> None:
        began_s = self._carrier.stopwatch()
        for store in write.stores:
            store.store(write.name, memoryview(write.payload), write.worth_s)
        self._write_time.took(1, self._carrier.stopwatch() - began_s)

    def _written(self, write: _Write) -> None:
        sequence_hash = write.name.sequence_hash
        with self._carrier.lock:
            num_left = self._writing.get(sequence_hash, 1) - 1
            if num_left:
                self._writing[sequence_hash] = num_left
            else:
                self._writing.pop(sequence_hash, None)
            is_awaited, self._is_awaited = self._is_awaited, False
        if is_awaited:
            self._told()

    def _clear(self) -> None:
        for store in self._stores:
            store.clear()
            store.changes.take()  # the pool tells of the clear

    def _cleared(self) -> None:
        with self._carrier.lock:
            self._num_clearing -= 1

    def _read(self, read: _Read) -> None:
        for name, store, block_id in zip(read.names, read.stores, read.load.block_ids):
            began_s = self._carrier.stopwatch()
            is_here = not self._carrier.is_closed and store.load(name, self._carrier.room(block_id))
            seconds = self._carrier.stopwatch() - began_s
            read.seconds += seconds
            if not is_here:
                return
            read.num_loaded += 1
            self._times[store.medium].took(1, seconds)
            store.stats.loaded_bytes += self._shape.block_bytes
            store.stats.load_s += seconds

    def _read_ended(self, read: _Read) -> None:
        self.counts.num_hit_blocks += read.num_loaded
        if read.is_whole:
            self.counts.saved_s += read.saves_s - read.seconds
        else:
            self.counts.num_failed_loads += 1
            self.counts.lost_s += read.seconds
        with self._carrier.lock:
            self._num_reading -= len(read.names)
        self._loaded(read.load.request_id, read.is_whole, read.num_loaded)

    def _tell_unused(self) -> None:
        for store in self._stores:
            if not (store.stats.num_stored or store.stats.num_loaded):
                _log.info("the KV cache tier %s is not used yet: %s", store.medium, self._why_unused(store))

    def _why_unused(self, store: BlockStore) -> str:
        if store.stats.drops:
            return f"its blocks were dropped ({', '.join(sorted(store.stats.drops))})"
        if store is not self._stores[0] and self._stores[0].stats.num_stored:
            return f"it gets what is evicted a second time, and {self._stores[0].medium} has the rest"
        return "the pool has room for all prompts so far"
