"""Blocks in memory that all workers of a host share, laid out so that it needs no lock and no one's care.

    [ sets: tags of 8 ways | worths of 8 ways ]   [ slots: header, tokens, payload ]

A block may lie in the 8 slots of the set that its hash names; of these the one that is worth least gives way (GDSF:
worth is seconds saved plus the set's clock, which rises to the worth of each block that gave way, so what is never used
again grows old; Cherkasova, HPL-98-69). A writer takes the tag away, writes the slot, and then sets the tag. If two
write the same slot, or one dies half-way, the block does not prove itself and is a miss. So nobody's end leaves
anything to repair.

A block that was loaded is on a device again: it is the first to give way, until it is evicted there once more
("boundary", not in both).
"""

from __future__ import annotations

import math
import mmap
import struct
import time
from typing import Protocol

from kvrelay.core.tier_stats import StoreStats
from kvrelay.errors import ConfigError
from kvrelay.tiers.block import BlockName, Shape, header_of, refusal

NUM_WAYS = 8
ALIGN = 64
_TAGS = struct.Struct(f"<{NUM_WAYS}Q")
_WORTHS = struct.Struct(f"<{NUM_WAYS}d")
_TAG = struct.Struct("<Q")
_WORTH = struct.Struct("<d")
_CLOCK = struct.Struct("<d")
SET_BYTES = _TAGS.size + _WORTHS.size + ALIGN
EMPTY = 0
"""A tag. A block whose hash is 0 is never stored."""


def slot_bytes(shape: Shape) -> int:
    """Of a stored block, with the rest of its last cache line."""
    return -(-shape.stored_bytes // ALIGN) * ALIGN


def num_sets(num_bytes: int, shape: Shape) -> int:
    """How many sets this much memory has."""
    return num_bytes // (SET_BYTES + NUM_WAYS * slot_bytes(shape))


class Memory(Protocol):
    """Shared memory, and the claim to it."""

    memory: mmap.mmap

    def close(self) -> None: ...


class HostStore:
    """A view of the shared memory; several processes have one each. Raises ConfigError if it is too small."""

    medium = "host"

    def __init__(self, memory: Memory, shape: Shape) -> None:
        self.stats = StoreStats()
        self._shape = shape
        self._claim = memory
        self._memory = memoryview(memory.memory)
        self._num_sets = num_sets(len(self._memory), shape)
        if not self._num_sets:
            needed = SET_BYTES + NUM_WAYS * slot_bytes(shape)
            raise ConfigError(f"host_kv_cache is below {needed} bytes, {NUM_WAYS} blocks of this model")
        self._slots_at = self._num_sets * SET_BYTES

    def __repr__(self) -> str:
        return f"HostStore({self._num_sets * NUM_WAYS} slots of {slot_bytes(self._shape)} bytes)"

    def holds(self, sequence_hash: int) -> bool:
        return self._way_of(sequence_hash) is not None

    def worth_again(self, sequence_hash: int, worth_s: float) -> bool:
        way = self._way_of(sequence_hash)
        if way is None:
            return False
        self._set_worth(sequence_hash, way, self._clock(sequence_hash) + worth_s)
        return True

    def load(self, name: BlockName, into: memoryview) -> bool:
        way = self._way_of(name.sequence_hash)
        if way is None:
            self.stats.misses["gone"] += 1
            return False
        began_s = time.perf_counter()
        slot = self._slot(name.sequence_hash, way)
        header = bytes(slot[: self._shape.header_bytes])
        into[:] = slot[self._shape.header_bytes : self._shape.stored_bytes]
        reason = refusal(header, name, self._shape, into)
        if reason is not None:
            self.stats.misses[reason] += 1
            if reason not in ("other", "tokens"):
                self._set_tag(name.sequence_hash, way, EMPTY)
            return False
        self._set_worth(name.sequence_hash, way, 0.0)
        self.stats.num_loaded += 1
        self.stats.loaded_bytes += len(into)
        self.stats.load_s += time.perf_counter() - began_s
        return True

    def store(self, name: BlockName, payload: memoryview, worth_s: float) -> None:
        if name.sequence_hash == EMPTY or self.worth_again(name.sequence_hash, worth_s):
            return
        clock = self._clock(name.sequence_hash)
        way, gives_way_at = self._victim(name.sequence_hash)
        if gives_way_at > clock + worth_s:
            self.stats.drops["worth_less"] += 1
            return
        self._set_tag(name.sequence_hash, way, EMPTY)
        slot = self._slot(name.sequence_hash, way)
        header = header_of(name, self._shape, payload)
        slot[: len(header)] = header
        slot[len(header) : len(header) + len(payload)] = payload
        self._set_worth(name.sequence_hash, way, clock + worth_s)
        self._set_clock(name.sequence_hash, max(clock, gives_way_at))
        self._set_tag(name.sequence_hash, way, name.sequence_hash)
        self.stats.num_stored += 1

    def clear(self) -> int:
        num_blocks = self.count()
        for number in range(self._num_sets):
            self._memory[number * SET_BYTES : (number + 1) * SET_BYTES] = bytes(SET_BYTES)
        return num_blocks

    def count(self) -> int:
        """Blocks of all sets. Reads every tag."""
        found = 0
        for number in range(self._num_sets):
            tags = _TAGS.unpack_from(self._memory, number * SET_BYTES)
            found += NUM_WAYS - tags.count(EMPTY)
        return found

    def close(self) -> None:
        self._claim.close()

    # -- one set ------------------------------------------------------------------------------------------------------

    def _set_at(self, sequence_hash: int) -> int:
        return sequence_hash % self._num_sets * SET_BYTES

    def _way_of(self, sequence_hash: int) -> int | None:
        tags = _TAGS.unpack_from(self._memory, self._set_at(sequence_hash))
        return tags.index(sequence_hash) if sequence_hash in tags and sequence_hash != EMPTY else None

    def _victim(self, sequence_hash: int) -> tuple[int, float]:
        """The way that is empty or worth least, and what it is worth."""
        at = self._set_at(sequence_hash)
        tags = _TAGS.unpack_from(self._memory, at)
        if EMPTY in tags:
            return tags.index(EMPTY), 0.0
        worths = _WORTHS.unpack_from(self._memory, at + _TAGS.size)
        # Memory that others write may hold anything; what is no number gives way first.
        sound = [0.0 if math.isnan(worth) else worth for worth in worths]
        least = min(sound)
        return sound.index(least), least

    def _slot(self, sequence_hash: int, way: int) -> memoryview:
        number = sequence_hash % self._num_sets * NUM_WAYS + way
        start = self._slots_at + number * slot_bytes(self._shape)
        return self._memory[start : start + slot_bytes(self._shape)]

    def _set_tag(self, sequence_hash: int, way: int, tag: int) -> None:
        _TAG.pack_into(self._memory, self._set_at(sequence_hash) + way * _TAG.size, tag)

    def _set_worth(self, sequence_hash: int, way: int, worth_s: float) -> None:
        _WORTH.pack_into(self._memory, self._set_at(sequence_hash) + _TAGS.size + way * _WORTH.size, worth_s)

    def _clock(self, sequence_hash: int) -> float:
        clock: float = _CLOCK.unpack_from(self._memory, self._set_at(sequence_hash) + _TAGS.size + _WORTHS.size)[0]
        return clock if 0.0 <= clock < 1e12 else 0.0

    def _set_clock(self, sequence_hash: int, clock: float) -> None:
        _CLOCK.pack_into(self._memory, self._set_at(sequence_hash) + _TAGS.size + _WORTHS.size, clock)
