"""The KV pool's bookkeeping: which blocks are held, which may be reused, which must not be touched.

It owns every block of one pool and the prefix cache over them. It does not know requests or workers, and never sees the
memory itself. Each block is in exactly one state:

    free          no references. Either *plain* (no useful content, kept as extents of adjacent ids) or *cached* (found
                  by its hash; ``cached_free.py`` says which is evicted when plain blocks run out)
    in use        one reference per holder; a cached block may have many, and holders beyond the first only read
    quarantined   a remote peer may still write to it: it becomes free when its last
                  reference is dropped and the quarantine is lifted

A block enters the cache when it is full and computed (``cache_blocks``). Of two equal blocks the first stays in the
cache. A hit compares token ids, so colliding hashes are harmless.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from kvrelay.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvrelay.core.hashing import token_blocks
from kvrelay.engine.cached_free import ByRecency, CachedBlock, CachedFree
from kvrelay.engine.free_extents import FreeExtents
from kvrelay.engine.pauses import Pause
from kvrelay.errors import IntegrityError


class BlockState(enum.Enum):
    FREE = "free"
    IN_USE = "in use"
    QUARANTINED = "quarantined"


class Evicted(NamedTuple):
    """A block that leaves the cache. ``chance``: that it is wanted later, see ``CachedFree.chance_later``."""

    block_id: int
    entry: CachedBlock
    chance: float = 1.0


_sequence_hash = attrgetter("sequence_hash")


class BlockPool:
    """Reference counts, free blocks and prefix cache of ``num_blocks`` blocks of ``block_size`` tokens, whose ids begin
    with ``first_block``."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        first_block: int = 0,
        cached_free: CachedFree | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_ids = range(first_block, first_block + num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._num_refs = [0] * self.block_ids.stop
        self._quarantined: set[int] = set()
        self._plain = FreeExtents()
        if num_blocks:
            self._plain.add(first_block, num_blocks)
        self._cached_free: CachedFree = ByRecency() if cached_free is None else cached_free
        self._num_children = [0] * self.block_ids.stop
        """Cached blocks whose parent the block is."""
        self._cached: dict[int, CachedBlock] = {}
        self._block_of_hash: dict[int, int] = {}
        self._events: list[KvEvent] = []
        self.on_evicted: Callable[[Sequence[Evicted]], None] | None = None
        """Gets blocks that leave the cache, while they still hold what they held."""

    def __repr__(self) -> str:
        return (
            f"BlockPool({self.num_blocks} blocks of {self.block_size}: {self.num_free} free "
            f"({len(self._cached_free)} cached), {self.num_in_use} in use, {self.num_quarantined} quarantined)"
        )

    # -- numbers ------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can give, cached ones included."""
        return self.num_plain + len(self._cached_free)

    @property
    def num_plain(self) -> int:
        """Blocks that ``allocate`` can give without an eviction."""
        return len(self._plain)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - self.num_free - len(self._quarantined)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.block_size)

    def num_refs(self, block_id: int) -> int:
        return self._num_refs[block_id]

    def state(self, block_id: int) -> BlockState:
        if block_id in self._quarantined:
            return BlockState.QUARANTINED
        return BlockState.IN_USE if self._num_refs[block_id] else BlockState.FREE

    # -- references ---------------------------------------------------------------------------------------------------

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """``count`` blocks with one reference each, adjacent where possible; None (and no change) if too few are free.

        ``after``: preferably the blocks directly follow this block.
        """
        if count > self.num_free:
            return None
        missing = count - len(self._plain)
        if missing > 0:
            self._evict(missing)
        block_ids, num_refs = self._plain.take(count, after), self._num_refs
        for block_id in block_ids:
            num_refs[block_id] = 1
        return block_ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each: blocks of a prefix hit, or blocks that are held already."""
        for block_id in block_ids:
            if self._num_refs[block_id] == 0 and block_id not in self._quarantined:
                # A KeyError here means that a plain free block was taken without ``allocate``.
                self._cached_free.remove(block_id)
            self._num_refs[block_id] += 1

    def release(self, block_ids: Sequence[int], pause: Pause | None = None) -> None:
        """Drop one reference to each. Blocks without references become free, the last block first, so that the tail of
        a prefix is evicted before its head. ``pause``: what the sequence with these blocks waits for."""
        num_refs = self._num_refs
        for block_id in block_ids:
            if num_refs[block_id] <= 0:
                raise IntegrityError(f"block {block_id} is released more often than it was taken")
            num_refs[block_id] -= 1
        self._free_unheld(block_ids, pause)

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """A peer may write to these blocks from now on. They must be in use, not cached, and not quarantined yet."""
        for block_id in block_ids:
            if block_id in self._quarantined or block_id in self._cached or not self._num_refs[block_id]:
                raise IntegrityError(f"block {block_id} cannot be given to a writer: {self.describe(block_id)}")
        self._quarantined.update(block_ids)

    def lift_quarantine(self, block_ids: Sequence[int]) -> None:
        """No peer will write to these blocks any more."""
        for block_id in block_ids:
            if block_id not in self._quarantined:
                raise IntegrityError(f"block {block_id} is not quarantined: {self.describe(block_id)}")
            self._quarantined.discard(block_id)
        self._free_unheld(block_ids, None)

    def _free_unheld(self, block_ids: Sequence[int], pause: Pause | None) -> None:
        cached, rested, num_refs, quarantined = self._cached, list[int](), self._num_refs, self._quarantined
        for block_id in reversed(block_ids):
            if num_refs[block_id] or block_id in quarantined:
                continue
            if block_id in cached:
                rested.append(block_id)
            else:
                self._plain.add(block_id)
        if rested:
            self._cached_free.add(rested, pause)

    # -- prefix cache -------------------------------------------------------------------------------------------------

    def find_prefix(self, token_ids: Sequence[int], sequence_hashes: Sequence[int]) -> list[int]:
        """Blocks that hold the longest cached prefix of ``token_ids``, whose complete blocks have these hashes.

        No reference is taken. Capped at ``len(token_ids) - 1`` tokens rounded down to a block, since the last token has
        to be computed to get the next one.
        """
        found: list[int] = []
        size, known = self.block_size, self._block_of_hash
        num_blocks = min(len(sequence_hashes), (len(token_ids) - 1) // size)
        if num_blocks <= 0 or sequence_hashes[0] not in known:
            return found
        parent: int | None = None
        for sequence_hash, tokens in zip(sequence_hashes, token_blocks(token_ids[: num_blocks * size], size)):
            block_id = known.get(sequence_hash)
            if block_id is None:
                break
            entry = self._cached[block_id]
            if entry.parent_hash != parent or entry.tokens != tokens:
                break
            found.append(block_id)
            parent = sequence_hash
        return found

    def entry(self, block_id: int) -> CachedBlock:
        """Of a cached block. Raises KeyError for others."""
        return self._cached[block_id]

    def cached_hashes(self) -> list[int]:
        """Sequence hashes of all blocks in the prefix cache, those in use included."""
        return list(self._block_of_hash)

    def cached_blocks(self) -> Iterator[tuple[int, CachedBlock]]:
        """All blocks in the prefix cache with their ids: those in use, then the most recently used."""
        yield from ((block_id, entry) for block_id, entry in self._cached.items() if block_id not in self._cached_free)
        yield from ((block_id, self._cached[block_id]) for block_id in self._cached_free.newest())

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """How many of these cached blocks are free now. Acquiring the blocks lowers ``num_free`` by this number."""
        return sum(block_id in self._cached_free for block_id in block_ids)

    def cache_blocks(
        self,
        block_ids: Sequence[int],
        parent_hash: int | None,
        sequence_hashes: Sequence[int],
        token_ids: Sequence[int],
    ) -> None:
        """Add these consecutive blocks, which are full and computed, to the cache after ``parent_hash``.

        ``token_ids`` are the blocks' tokens, flat. A block whose hash is cached already stays private. Blocks after a
        parent that is not cached stay private too: no lookup could reach them.
        """
        if not self.enable_prefix_caching:
            return
        size, known, cached = self.block_size, self._block_of_hash, self._cached
        parent_id = None if parent_hash is None else known.get(parent_hash)
        is_reachable = parent_hash is None or parent_id is not None
        depth = 0 if parent_id is None else cached[parent_id].depth + 1
        first, stored_after = 0, parent_hash  # the first block that is not reported yet, and the hash before it
        cut = token_blocks(token_ids, size)

        def report(end: int) -> None:
            if first < end:
                self._events.append(BlockStored(stored_after, tuple(sequence_hashes[first:end]), size))

        fresh = set(sequence_hashes)
        if is_reachable and len(fresh) == len(block_ids) and known.keys().isdisjoint(fresh):
            # Most blocks are new, and of long prompts there are hundreds: no Python per block but for its children.
            parents, depths = (parent_hash, *sequence_hashes), itertools.count(depth)
            cached.update(zip(block_ids, map(CachedBlock, sequence_hashes, parents, cut, depths)))
            known.update(zip(sequence_hashes, block_ids))
            before = block_ids[:-1] if parent_id is None else (parent_id, *block_ids)[: len(block_ids)]
            for block_id in before:
                self._num_children[block_id] += 1
            report(len(block_ids))
            return
        for at, (block_id, sequence_hash, tokens) in enumerate(zip(block_ids, sequence_hashes, cut)):
            if sequence_hash in known:
                report(at)
                parent_id = known[sequence_hash]
                is_reachable, depth = True, cached[parent_id].depth + 1
                first, stored_after = at + 1, sequence_hash
            elif is_reachable:
                cached[block_id] = CachedBlock(sequence_hash, parent_hash, tokens, depth)
                known[sequence_hash] = block_id
                if parent_id is not None:
                    self._num_children[parent_id] += 1
                parent_id = block_id
                depth += 1
            else:
                first = at + 1
            parent_hash = sequence_hash
        report(len(block_ids))

    def clear_cache(self) -> None:
        """Forget every prefix; blocks in use stay in use."""
        self._cached.clear()
        self._block_of_hash.clear()
        self._num_children = [0] * self.block_ids.stop
        for block_id in self._cached_free.clear():
            self._plain.add(block_id)
        self._events.append(AllBlocksCleared())

    def forget(self, block_ids: Iterable[int]) -> None:
        """No prefix is found any more in these blocks, which are in use."""
        forgotten = self._uncache([block_id for block_id in block_ids if block_id in self._cached])
        if forgotten:
            self._events.append(BlockRemoved(tuple(map(_sequence_hash, forgotten))))

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def drain_events(self) -> list[KvEvent]:
        """The changes of the prefix cache since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _evict(self, count: int) -> None:
        block_ids: list[int] = []
        entries: list[CachedBlock] = []
        offered: list[Evicted] = []
        while len(block_ids) < count:
            run = self._cached_free.pop(count - len(block_ids), self._num_children, self._cached)
            block_ids += run
            entries += self._uncache(run)
            if self.on_evicted is not None:
                offered += map(Evicted, run, entries[-len(run) :], itertools.repeat(self._cached_free.chance_later))
        self._plain.add_all(block_ids)
        if self.on_evicted is not None:
            self.on_evicted(offered)
        self._events.append(BlockRemoved(tuple(map(_sequence_hash, entries))))

    def _uncache(self, block_ids: Sequence[int]) -> list[CachedBlock]:
        """What these cached blocks were. Their children stay, if there are any: they are found again once the same
        block is cached again."""
        known, num_children = self._block_of_hash, self._num_children
        entries = list(map(self._cached.pop, block_ids))
        for block_id, entry in zip(block_ids, entries):
            del known[entry.sequence_hash]
            num_children[block_id] = 0
        for entry in entries:
            parent_id = known.get(entry.parent_hash)  # type: ignore[arg-type]  # no block has the hash None
            if parent_id is not None and num_children[parent_id]:
                num_children[parent_id] -= 1
                if not num_children[parent_id]:
                    self._cached_free.bared(parent_id)
        return entries

    # -- checks -------------------------------------------------------------------------------------------------------

    def describe(self, block_id: int) -> str:
        cached = "cached" if block_id in self._cached else "not cached"
        return f"{self.state(block_id).value}, {self._num_refs[block_id]} references, {cached}"

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every block is in exactly one state and the cache maps agree."""
        plain = {start + offset for start, length in self._plain.extents().items() for offset in range(length)}
        if len(plain) != len(self._plain) or sum(self._plain.extents().values()) != len(plain):
            raise IntegrityError("extents of free blocks overlap")
        for block_id in self.block_ids:
            held = self._num_refs[block_id] > 0 or block_id in self._quarantined
            homes = (block_id in plain) + (block_id in self._cached_free) + held
            if homes != 1:
                raise IntegrityError(f"block {block_id} has {homes} homes: {self.describe(block_id)}")
            if self._num_children[block_id] and block_id not in self._cached:
                raise IntegrityError(f"block {block_id} is not cached, and has children")
            if block_id in plain and block_id in self._cached:
                raise IntegrityError(f"block {block_id} is cached and plain")
            if block_id in self._cached_free and block_id not in self._cached:
                raise IntegrityError(f"block {block_id} is free as cached, but is not cached")
        if len(self._block_of_hash) != len(self._cached):
            raise IntegrityError("the cache's two maps differ in size")
        for block_id, entry in self._cached.items():
            if self._block_of_hash.get(entry.sequence_hash) != block_id:
                raise IntegrityError(f"block {block_id} is not found under its hash")
