"""The cached blocks that no request holds, and which of them gives way first. Pure.

Two policies: by recency, as the pool always had it, and by value, which is

    (chance that the blocks are wanted soon) x (seconds to have them again)

per block. Blocks are released as *groups*, one per sequence. A group waits in a queue with those whose pauses are
expected to be alike, in the order of release. The chance that a log-normal pause ends soon first rises with its age and
then falls, so in each queue the least valuable group is the newest or the oldest. Hence a choice compares the two ends
of a few queues, whatever the number of blocks.

A group gives way from its end. A block on which other cached blocks rest gives way after them: without it they would
not be found.

No key holds more by value than recency would leave it: the API key whose place in the order of releases is the oldest
gives up a block, and value says which of its own. A block that is kept takes over the place of the one that went
instead (LRU with swapping; Cao, Felten and Li, "Application-controlled file caching policies", 1994). A key may hold
less: what by its own returns is wanted less than anything as old as the oldest place gives way before it.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from kvrelay.core.clock import Clock
from kvrelay.engine.pauses import Pause, PauseFit

BLOCKS_AT_ONCE = 16
"""After a comparison of the queues so many blocks are taken before the next, from one end of one queue; of a larger
group all."""
NEW_WEIGHT = 0.1
LATER_HORIZONS = 4.0
"""What a pool gives up lasts in host memory or on disk for longer than it would have lasted here."""
LATER_WEIGHT = 0.3
"""Of the latest group in the mean of its key. So no block counts as more than three of its key's mean."""
KEPT_HORIZONS = 2.0
"""What value keeps lasts for longer than the mean of all blocks; what returns after that returns too late."""
MIN_HORIZON_S, MAX_HORIZON_S = 1.0, 300.0
MEDIANS, SHARES = (-4, 9), (-4, 0)
"""Queues are apart by powers of two of the expected seconds, and of the share that returns."""


class CachedBlock(msgspec.Struct, frozen=True, gc=False):
    """The keys of a cached block. ``parent_hash`` is the sequence hash of the block before it (None: the root),
    ``tokens`` what ``core.hashing.token_blocks`` makes of its tokens. There may be millions, and none holds an object
    that could refer to it: the garbage collector need not look for cycles."""

    sequence_hash: int
    parent_hash: int | None
    tokens: bytes
    depth: int
    """Number of the block in its sequence, from 0."""


class CachedFree(Protocol):
    """Block ids, each at most once."""

    def __len__(self) -> int: ...

    def __contains__(self, block_id: object) -> bool: ...

    def add(self, block_ids: list[int], pause: Pause | None) -> None:
        """These blocks of one sequence, its end first, are held no more. ``pause``: what the sequence waits for."""

    def remove(self, block_id: int) -> None:
        """It is held again. Raises KeyError if it is not here."""

    def pop(self, count: int, num_children: Sequence[int], cached: Mapping[int, CachedBlock]) -> list[int]:
        """Take out the next blocks that give way, 1 to ``count``, with one ``chance_later``. ``num_children``: by block
        id, how many of the ``cached`` blocks follow it."""

    @property
    def chance_later(self) -> float:
        """That the blocks which gave way last are wanted later, within what a tier keeps it for. With API keys in parts
        of what the key's blocks have in the mean: in a tier no key holds more than by recency, either."""

    def bared(self, block_id: int) -> None:
        """No cached block follows this one any more, because they gave way."""

    def newest(self) -> Iterator[int]:
        """All, roughly the most recently used first."""

    def clear(self) -> list[int]:
        """Take out all."""


class ByRecency:
    """The least recently used block gives way."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._blocks

    def add(self, block_ids: list[int], pause: Pause | None) -> None:
        self._blocks.update(dict.fromkeys(block_ids))

    def remove(self, block_id: int) -> None:
        del self._blocks[block_id]

    def pop(self, count: int, num_children: Sequence[int], cached: Mapping[int, CachedBlock]) -> list[int]:
        return [self._blocks.popitem(last=False)[0] for _ in range(count)]

    @property
    def chance_later(self) -> float:
        """Nothing is known of it."""
        return 1.0

    def bared(self, block_id: int) -> None:
        """Recency alone counts."""

    def newest(self) -> Iterator[int]:
        return reversed(self._blocks)

    def clear(self) -> list[int]:
        blocks, self._blocks = list(self._blocks), OrderedDict()
        return blocks


class _QueueKey(NamedTuple):
    """What the pauses of a queue have in common."""

    median: int
    share: int
    is_narrow: bool


class _Share(msgspec.Struct, eq=False):
    """What one API key has here, or all keys. ``num_spare``: places in the order of releases beyond the number of its
    blocks. ``mean_later``: the chance of those that gave way."""

    has_key: bool = False
    queues: dict[_QueueKey, OrderedDict[_Group, None]] = msgspec.field(default_factory=dict)
    chosen: tuple[_Group, _QueueKey, bool] | None = None
    """The group that gives way, its queue, and whether it was the newest there."""
    chosen_at: int = 0
    """How many blocks had given way then."""
    num_spare: int = 0
    mean_later: float = 0.0


class _Group(msgspec.Struct, eq=False):
    """Blocks that were released together, the sequence's end last. ``num_places``: in the order of releases; each block
    has one until its key pays with it."""

    blocks: dict[int, None]
    since_s: float
    fit: PauseFit
    shift: float
    share: _Share
    num_places: int = 0
    queue: _QueueKey | None = None


def _clamped(value: float, bounds: tuple[int, int]) -> int:
    return min(max(round(value), bounds[0]), bounds[1])


class ByValue:
    """The block that is worth least gives way. ``block_s`` tells in how many seconds a block is had again if it gives
    way."""

    def __init__(self, clock: Clock, prior: PauseFit, block_s: Callable[[int], float]) -> None:
        self._clock = clock
        self._prior = prior
        self._block_s = block_s
        self._home: dict[int, _Group] = {}
        self._shares: dict[str, _Share] = {}
        """By API key. What was learned of a key outlives its blocks."""
        self._all = _Share()
        self._places: OrderedDict[_Group, None] = OrderedDict()
        """Groups with places, in the order of release."""
        self._shared, self._bare = self._outside(), self._outside()
        """Blocks that others rest on, and those that others rested on."""
        self._block_interval_s = 0.0
        """Between two blocks that give way, a moving mean."""
        self._num_popped = 0
        self._chosen = clock.now(), 0
        """When a choice was made last, and how many blocks had given way then."""
        self._turn: tuple[_Group, _Group] | None = None
        """The group that gives way now, and the one that pays with its places. It holds until one of both has none, or
        any group changes."""
        self._gave_way: _Group | None = None
        """The group of the block that gave way last; None: blocks of several sequences."""
        self._later: tuple[_Group, float] | None = None
        """A group of which blocks give way, and its chance."""

    def _outside(self) -> _Group:
        return _Group({}, 0.0, self._prior, 0.0, _Share())

    def __len__(self) -> int:
        return len(self._home)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._home

    def __repr__(self) -> str:
        return f"ByValue({len(self._home)} blocks of {len(self._shares)} keys, {len(self._shared.blocks)} shared)"

    def add(self, block_ids: list[int], pause: Pause | None) -> None:
        tenant, fit, shift = ("", self._prior, 0.0) if pause is None else (pause.tenant, pause.fit, pause.session.shift)
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = _Share(bool(tenant))
        blocks = dict.fromkeys(reversed(block_ids))
        group = _Group(blocks, self._clock.now(), fit, shift, share, len(blocks))
        self._places[group] = None
        self._home.update(dict.fromkeys(block_ids, group))
        if pause is not None:
            pause.on_changed = partial(self._changed, group, pause)
        self._enqueue(group)

    def _changed(self, group: _Group, pause: Pause) -> None:
        if group.queue is not None:
            self._dequeue(group)
            group.fit, group.shift = pause.fit, pause.session.shift
            self._enqueue(group)

    def remove(self, block_id: int) -> None:
        group = self._home.pop(block_id)
        del group.blocks[block_id]
        if not group.blocks:
            self._dequeue(group)
        self._leave(group)

    def pop(self, count: int, num_children: Sequence[int], cached: Mapping[int, CachedBlock]) -> list[int]:
        run: list[int] = []
        while not run:
            group = self._gave_way = self._bare if self._bare.blocks else self._least()
            if group is None:
                run = [next(iter(self._shared.blocks))]
                self.remove(run[0])
                break
            block_id, _ = group.blocks.popitem()
            if num_children[block_id]:
                self._home[block_id] = self._shared
                self._shared.blocks[block_id] = None
            else:
                del self._home[block_id]
                run = [block_id]
                if count > 1 and self._turn is not None and group is not self._bare:
                    self._pop_before(run, count - 1, num_children, cached)
            if not group.blocks:
                self._dequeue(group)
        self._num_popped += len(run)
        return run

    def _pop_before(
        self, run: list[int], count: int, num_children: Sequence[int], cached: Mapping[int, CachedBlock]
    ) -> None:
        """Add to ``run``, which has one block, up to ``count`` of the same turn on which only the one before rests."""
        assert self._turn is not None
        least, pays = self._turn
        parent_hash = cached[run[0]].parent_hash
        for block_id in list(itertools.islice(reversed(least.blocks), min(count, pays.num_places))):
            entry = cached[block_id]
            if num_children[block_id] != 1 or entry.sequence_hash != parent_hash:
                break
            del least.blocks[block_id], self._home[block_id]
            run.append(block_id)
            parent_hash = entry.parent_hash
        if len(run) > 1:
            self._leave(pays, len(run) - 1)

    @property
    def chance_later(self) -> float:
        """The pause's chance to end within some horizons. It is computed once for each choice: a group gives way block
        by block. What several sequences begin with is wanted."""
        group = self._gave_way
        if group is None or group is self._bare:
            return 1.0
        if self._later is None or self._later[0] is not group:
            elapsed_s = self._clock.now() - group.since_s
            chance, share = group.fit.chance(elapsed_s, LATER_HORIZONS * self.horizon_s, group.shift), group.share
            if share.has_key or len(self._shares) > 1:  # with keys, those that say nothing have none
                share.mean_later += (LATER_WEIGHT if share.mean_later else 1.0) * (chance - share.mean_later)
                chance /= max(share.mean_later, 1e-9)
            self._later = group, chance
        return self._later[1]

    def bared(self, block_id: int) -> None:
        if self._home.get(block_id) is self._shared:
            del self._shared.blocks[block_id]
            self._bare.blocks[block_id] = None
            self._home[block_id] = self._bare

    def newest(self) -> Iterator[int]:
        groups = [group for queue in self._all.queues.values() for group in queue]
        groups.sort(key=lambda group: group.since_s, reverse=True)
        return itertools.chain(self._shared.blocks, self._bare.blocks, *[group.blocks for group in groups])

    def clear(self) -> list[int]:
        blocks = list(self._home)
        for group in self._home.values():
            group.queue = None
        self._home.clear()
        self._shares.clear()
        self._places.clear()
        self._all, self._shared, self._bare = _Share(), self._outside(), self._outside()
        self._gave_way = self._later = self._turn = None
        return blocks

    def value(self, group_of: int) -> float:
        """Of the group with this block, now: seconds per block."""
        return self._value(self._home[group_of], self._clock.now(), self._kept_s)

    def _enqueue(self, group: _Group) -> None:
        fit = group.fit
        median = _clamped((fit.mean + group.shift) / math.log(2.0), MEDIANS)
        share = _clamped(math.log2(max(fit.share, 1e-3)), SHARES)
        group.queue = key = _QueueKey(median, share, fit.is_narrow)
        for keys in (group.share, self._all):
            keys.queues.setdefault(key, OrderedDict())[group] = None

    def _dequeue(self, group: _Group) -> None:
        key, group.queue = group.queue, None
        self._turn = None
        if key is None:
            return
        for keys in (group.share, self._all):
            queue = keys.queues[key]
            del queue[group]
            if not queue:
                del keys.queues[key]

    def _least(self) -> _Group | None:
        """The group that gives way, for a place of its key; None if there are none."""
        while self._turn is None:
            if not self._places:
                return None
            oldest = next(iter(self._places))
            if oldest.share.num_spare:
                oldest.share.num_spare -= 1
                self._leave(oldest)
            else:
                self._turn = self._turn_of(oldest)
        least, pays = self._turn
        self._leave(pays)
        return least

    def _turn_of(self, oldest: _Group) -> tuple[_Group, _Group]:
        """The group that gives way for this place, and the one that pays with a place: the same if it is wanted
        less than anything as old as the place."""
        least = self._least_of(self._all)
        if least.share is oldest.share:
            return least, oldest
        # Nothing that the other key says of its blocks counts.
        now_s, horizon_s = self._clock.now(), self._kept_s
        if self._chance(least, now_s, horizon_s) < self._prior.chance(now_s - oldest.since_s, horizon_s):
            return least, least
        if self._num_popped - self._all.chosen_at >= BLOCKS_AT_ONCE:
            self._all.chosen = None
        return self._least_of(oldest.share), oldest

    def _leave(self, group: _Group, count: int = 1) -> None:
        """A block of it is here no more, and a place of it neither; or ``count``, which it has."""
        group.num_places -= count
        if group.num_places > 0:
            return
        self._turn = None
        if group.num_places < 0:
            group.num_places = 0
            group.share.num_spare += 1
        else:
            del self._places[group]

    def _least_of(self, share: _Share) -> _Group:
        """The one worth least. There is one."""
        if share.chosen is not None:
            group, key, is_newest = share.chosen
            if group.queue == key and group.blocks:
                return group
            queue = share.queues.get(key)
            if queue and self._num_popped - share.chosen_at < BLOCKS_AT_ONCE:
                group = next(reversed(queue)) if is_newest else next(iter(queue))
                share.chosen = group, key, is_newest
                return group
        share.chosen, share.chosen_at = self._choose(share), self._num_popped
        return share.chosen[0]

    def _choose(self, share: _Share) -> tuple[_Group, _QueueKey, bool]:
        self._later = None
        now_s, horizon_s = self._clock.now(), self._kept_s
        ends = [(next(iter(queue)), key, False) for key, queue in share.queues.items()]
        narrow = [(key, queue) for key, queue in share.queues.items() if key.is_narrow and len(queue) > 1]
        ends += [(next(reversed(queue)), key, True) for key, queue in narrow]
        found = ends[0]
        if len(ends) > 1:
            found = min(ends, key=lambda end: self._value(end[0], now_s, horizon_s))
        chosen_s, num_popped = self._chosen
        if self._num_popped > num_popped:
            interval_s = (now_s - chosen_s) / (self._num_popped - num_popped)
            self._block_interval_s += NEW_WEIGHT * (interval_s - self._block_interval_s)
            self._chosen = now_s, self._num_popped
        return found

    @property
    def horizon_s(self) -> float:
        """How long all blocks last at the rate at which they give way."""
        return min(max(self._block_interval_s * len(self._home), MIN_HORIZON_S), MAX_HORIZON_S)

    @property
    def _kept_s(self) -> float:
        return max(KEPT_HORIZONS * self._block_interval_s * len(self._home), MIN_HORIZON_S)

    def _value(self, group: _Group, now_s: float, horizon_s: float) -> float:
        return self._chance(group, now_s, horizon_s) * self._block_s(next(reversed(group.blocks)))

    def _chance(self, group: _Group, now_s: float, horizon_s: float) -> float:
        return group.fit.chance(now_s - group.since_s, horizon_s, group.shift)
