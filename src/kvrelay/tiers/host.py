"""Blocks in memory that all workers of a host share, laid out so that it needs no lock and no one's care.

    [ clock, clears ]   [ sets: tags of 8 ways | worths of 8 ways ]   [ slots: header, tokens, payload ]

A block may lie in the 16 slots of the two sets that its hash names; of these an empty one takes it, or the one that is
worth least gives way. With 16 to choose from that is nearly the least of all, so old prompts go as a whole instead of a
block of each prompt. Worth is seconds saved plus the clock, which rises to the worth of what gave way, so what is never
used again grows old (GDSF; Cherkasova, HPL-98-69).

A writer takes the tag away, writes the slot, and then sets the tag. If two write the same slot, or one dies half-way,
the block does not prove itself and is a miss; a tag over another block goes with the first read of it. So nobody's end
leaves anything to repair.

A clear counts itself before it takes the tags away. A writer that finds another count than it began with takes its own
tag away: what it wrote is from before the clear.

A block that was loaded is on a device again: it is the first to give way, until it is evicted there once more
("boundary", not in both).
"""

from __future__ import annotations

import math
import mmap
import struct
from typing import NamedTuple, Protocol

from kvrelay.core.tier_stats import StoreStats
from kvrelay.errors import ConfigError
from kvrelay.tiers.block import BlockName, Shape, header_of, refusal
from kvrelay.tiers.store import BlockChanges

NUM_WAYS = 8
ALIGN = 64
_TAGS = struct.Struct(f"<{NUM_WAYS}Q")
_WORTHS = struct.Struct(f"<{NUM_WAYS}d")
_TAG = struct.Struct("<Q")
_DOUBLE = struct.Struct("<d")
SET_BYTES = _TAGS.size + _WORTHS.size
CLOCK_BYTES = ALIGN
CLEARS_AT = _DOUBLE.size
MAX_CLOCK_S = 1e12
EMPTY = 0
"""A tag. A block whose hash is 0 is never stored."""


def slot_bytes(shape: Shape) -> int:
    """Of a stored block, with the rest of its last cache line."""
    return -(-shape.stored_bytes // ALIGN) * ALIGN


def num_sets(num_bytes: int, shape: Shape) -> int:
    """How many sets this much memory has. Raises ConfigError if it has none."""
    found = (num_bytes - CLOCK_BYTES) // (SET_BYTES + NUM_WAYS * slot_bytes(shape))
    if found < 1:
        raise ConfigError(f"host_kv_cache is below {bytes_of(1, shape)} bytes, {NUM_WAYS} blocks of this model")
    return found


def bytes_of(sets: int, shape: Shape) -> int:
    """The memory of so many sets."""
    return CLOCK_BYTES + sets * (SET_BYTES + NUM_WAYS * slot_bytes(shape))


class Place(NamedTuple):
    """A slot: the way of a set."""

    set: int
    way: int


class Memory(Protocol):
    """Shared memory, and the claim to it."""

    memory: mmap.mmap

    def close(self) -> None: ...


class HostStore:
    """A view of the shared memory; several processes have one each. Raises ConfigError if it is too small."""

    medium = "host"

    def __init__(self, memory: Memory, shape: Shape) -> None:
        self.stats, self.changes = StoreStats(), BlockChanges()
        self._shape = shape
        self._claim = memory
        self._memory = memoryview(memory.memory)
        self._num_sets = num_sets(len(self._memory), shape)
        self._slots_at = CLOCK_BYTES + self._num_sets * SET_BYTES

    def __repr__(self) -> str:
        return f"HostStore({self._num_sets * NUM_WAYS} slots of {slot_bytes(self._shape)} bytes)"

    def holds(self, sequence_hash: int) -> bool:
        return self._find(sequence_hash) is not None

    def worth_again(self, sequence_hash: int, worth_s: float) -> bool:
        place = self._find(sequence_hash)
        if place is None:
            return False
        self._set_worth(place, self._clock + worth_s)
        return True

    def load(self, name: BlockName, into: memoryview) -> bool:
        place = self._find(name.sequence_hash)
        if place is None:
            self.stats.misses["gone"] += 1
            self.changes.removed(name.sequence_hash)
            return False
        slot = self._slot(place)
        header = bytes(slot[: self._shape.header_bytes])
        into[:] = slot[self._shape.header_bytes : self._shape.stored_bytes]
        reason = refusal(header, name, self._shape, into)
        if reason is not None:
            self.stats.misses[reason] += 1
            if reason not in ("other", "tokens"):
                self._forget(place, name.sequence_hash)
            return False
        self._set_worth(place, 0.0)
        self.stats.num_loaded += 1
        return True

    def store(self, name: BlockName, payload: memoryview, worth_s: float) -> None:
        if name.sequence_hash == EMPTY or self.worth_again(name.sequence_hash, worth_s):
            return
        num_clears = self._num_clears
        place, gives_way_at = self._victim(name.sequence_hash)
        clock = self._clock
        if gives_way_at > clock + worth_s:
            self.stats.drops["worth_less"] += 1
            return
        gone = self._tags(place.set)[place.way]
        self._set_tag(place, EMPTY)
        if gone != EMPTY:
            self.changes.removed(gone)
        slot = self._slot(place)
        header = header_of(name, self._shape, payload)
        slot[: len(header)] = header
        slot[len(header) : len(header) + len(payload)] = payload
        self._set_worth(place, clock + worth_s)
        if gives_way_at > clock:
            _DOUBLE.pack_into(self._memory, 0, gives_way_at)
        self._set_tag(place, name.sequence_hash)
        if self._num_clears != num_clears:
            self._forget(place, name.sequence_hash)
            self.stats.drops["cleared"] += 1
            return
        self.stats.num_stored += 1
        self.changes.added(name.sequence_hash)

    def note_all(self) -> None:
        """What is there already counts as added: workers before this one have left it. Reads every tag."""
        for number in range(self._num_sets):
            for tag in self._tags(number):
                if tag != EMPTY:
                    self.changes.added(tag)

    def clear(self) -> int:
        num_blocks = self.count()
        _TAG.pack_into(self._memory, CLEARS_AT, (self._num_clears + 1) % 2**64)
        self._memory[CLOCK_BYTES : self._slots_at] = bytes(self._slots_at - CLOCK_BYTES)
        _DOUBLE.pack_into(self._memory, 0, 0.0)
        return num_blocks

    def count(self) -> int:
        """Blocks of all sets. Reads every tag."""
        return sum(NUM_WAYS - self._tags(number).count(EMPTY) for number in range(self._num_sets))

    def close(self) -> None:
        self._claim.close()

    # -- sets and slots -----------------------------------------------------------------------------------------------

    @property
    def _clock(self) -> float:
        """Memory that others write may hold anything."""
        clock: float = _DOUBLE.unpack_from(self._memory, 0)[0]
        return clock if 0.0 <= clock < MAX_CLOCK_S else 0.0

    @property
    def _num_clears(self) -> int:
        number: int = _TAG.unpack_from(self._memory, CLEARS_AT)[0]
        return number

    def _sets_of(self, sequence_hash: int) -> tuple[int, int]:
        return sequence_hash % self._num_sets, (sequence_hash >> 32) % self._num_sets

    def _tags(self, number: int) -> tuple[int, ...]:
        return _TAGS.unpack_from(self._memory, CLOCK_BYTES + number * SET_BYTES)

    def _find(self, sequence_hash: int) -> Place | None:
        if sequence_hash != EMPTY:
            for number in self._sets_of(sequence_hash):
                tags = self._tags(number)
                if sequence_hash in tags:
                    return Place(number, tags.index(sequence_hash))
        return None

    def _victim(self, sequence_hash: int) -> tuple[Place, float]:
        """The place that is empty or worth least, and what it is worth."""
        found: list[tuple[float, Place]] = []
        for number in self._sets_of(sequence_hash):
            tags = self._tags(number)
            if EMPTY in tags:
                return Place(number, tags.index(EMPTY)), 0.0
            worths = _WORTHS.unpack_from(self._memory, CLOCK_BYTES + number * SET_BYTES + _TAGS.size)
            sound = [0.0 if math.isnan(worth) else worth for worth in worths]
            found.append((min(sound), Place(number, sound.index(min(sound)))))
        least, place = min(found)
        return place, least

    def _slot(self, place: Place) -> memoryview:
        start = self._slots_at + (place.set * NUM_WAYS + place.way) * slot_bytes(self._shape)
        return self._memory[start : start + slot_bytes(self._shape)]

    def _set_tag(self, place: Place, tag: int) -> None:
        _TAG.pack_into(self._memory, CLOCK_BYTES + place.set * SET_BYTES + place.way * _TAG.size, tag)

    def _forget(self, place: Place, sequence_hash: int) -> None:
        """Take the tag away, unless another block has come to the place meanwhile."""
        if self._tags(place.set)[place.way] == sequence_hash:
            self._set_tag(place, EMPTY)
        self.changes.removed(sequence_hash)

    def _set_worth(self, place: Place, worth_s: float) -> None:
        at = CLOCK_BYTES + place.set * SET_BYTES + _TAGS.size + place.way * _DOUBLE.size
        _DOUBLE.pack_into(self._memory, at, worth_s)
