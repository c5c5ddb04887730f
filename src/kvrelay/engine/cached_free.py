"""The cached blocks that no request holds, and which of them gives way first. Pure.

Two policies: by recency, as the pool always had it, and by value, which is

    (chance that the blocks are wanted soon) x (seconds to have them again)

per block. Blocks are released as *groups*, one per sequence. A group waits in a queue with those whose pauses are
expected to be alike, in the order of release. The chance that a log-normal pause ends soon first rises with its age and
then falls, so in each queue the least valuable group is the newest or the oldest. Hence a choice compares the two ends
of a few queues, whatever the number of blocks.

A group gives way from its end. A block on which other cached blocks rest gives way after them: without it they would
not be found.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
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
MIN_HORIZON_S, MAX_HORIZON_S = 1.0, 300.0
MEDIANS, SHARES = (-4, 9), (-4, 0)
"""Queues are apart by powers of two of the expected seconds, and of the share that returns."""


class CachedFree(Protocol):
    """Block ids, each at most once."""

    def __len__(self) -> int: ...

    def __contains__(self, block_id: object) -> bool: ...

    def add(self, block_ids: list[int], pause: Pause | None) -> None:
        """These blocks of one sequence, its end first, are held no more. ``pause``: what the sequence waits for."""

    def remove(self, block_id: int) -> None:
        """It is held again. Raises KeyError if it is not here."""

    def pop(self, num_children: Sequence[int]) -> int:
        """Take out the block that gives way. ``num_children``: by block id, how many cached blocks follow it."""

    @property
    def chance_later(self) -> float:
        """That the block which gave way last is wanted later, within what a tier keeps it for; 0 to 1."""

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

    def pop(self, num_children: Sequence[int]) -> int:
        return self._blocks.popitem(last=False)[0]

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


class _Group(msgspec.Struct, eq=False):
    """Blocks that were released together, the sequence's end last."""

    blocks: dict[int, None]
    since_s: float
    fit: PauseFit
    shift: float
    queue: _QueueKey | None


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
        self._queues: dict[_QueueKey, OrderedDict[_Group, None]] = {}
        self._shared, self._bare = self._outside(), self._outside()
        """Blocks that others rest on, and those that others rested on."""
        self._chosen: tuple[_Group, _QueueKey, bool] | None = None
        """The group that gives way, its queue, and whether it was the newest there."""
        self._block_interval_s = 0.0
        """Between two blocks that give way, a moving mean."""
        self._chosen_s, self._num_popped = clock.now(), 0
        self._gave_way: _Group | None = None
        """The group of the block that gave way last; None: blocks of several sequences."""
        self._later: tuple[_Group, float] | None = None
        """A group of which blocks give way, and its chance."""

    def _outside(self) -> _Group:
        return _Group({}, 0.0, self._prior, 0.0, None)

    def __len__(self) -> int:
        return len(self._home)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._home

    def __repr__(self) -> str:
        queues = ", ".join(f"{key.median}/{key.share}: {len(groups)}" for key, groups in self._queues.items())
        return f"ByValue({len(self._home)} blocks, {len(self._shared.blocks)} shared; groups by queue: {queues})"

    def add(self, block_ids: list[int], pause: Pause | None) -> None:
        fit, shift = (self._prior, 0.0) if pause is None else (pause.fit, pause.session.shift)
        group = _Group(dict.fromkeys(reversed(block_ids)), self._clock.now(), fit, shift, None)
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

    def pop(self, num_children: Sequence[int]) -> int:
        while True:
            group = self._bare if self._bare.blocks else self._least()
            if group is None:
                break
            block_id, _ = group.blocks.popitem()
            if not group.blocks:
                self._dequeue(group)
            if not num_children[block_id]:
                del self._home[block_id]
                self._num_popped += 1
                self._gave_way = None if group is self._bare else group
                return block_id
            self._home[block_id] = self._shared
            self._shared.blocks[block_id] = None
        block_id = next(iter(self._shared.blocks))
        self.remove(block_id)
        self._num_popped += 1
        self._gave_way = None
        return block_id

    @property
    def chance_later(self) -> float:
        """The pause's chance to end within some horizons. It is computed once for each choice: a group gives way block
        by block. What several sequences begin with is wanted."""
        group = self._gave_way
        if group is None:
            return 1.0
        if self._later is None or self._later[0] is not group:
            elapsed_s = self._clock.now() - group.since_s
            self._later = group, group.fit.chance(elapsed_s, LATER_HORIZONS * self.horizon_s, group.shift)
        return self._later[1]

    def bared(self, block_id: int) -> None:
        if self._home.get(block_id) is self._shared:
            del self._shared.blocks[block_id]
            self._bare.blocks[block_id] = None
            self._home[block_id] = self._bare

    def newest(self) -> Iterator[int]:
        groups = [group for queue in self._queues.values() for group in queue]
        groups.sort(key=lambda group: group.since_s, reverse=True)
        return chain(self._shared.blocks, self._bare.blocks, *[group.blocks for group in groups])

    def clear(self) -> list[int]:
        blocks = list(self._home)
        for queue in self._queues.values():
            for group in queue:
                group.queue = None
        self._home.clear()
        self._queues.clear()
        self._shared, self._bare, self._chosen = self._outside(), self._outside(), None
        self._gave_way = self._later = None
        return blocks

    def value(self, group_of: int) -> float:
        """Of the group with this block, now: seconds per block."""
        return self._value(self._home[group_of], self._clock.now())

    def _enqueue(self, group: _Group) -> None:
        fit = group.fit
        median = _clamped((fit.mean + group.shift) / math.log(2.0), MEDIANS)
        share = _clamped(math.log2(max(fit.share, 1e-3)), SHARES)
        group.queue = key = _QueueKey(median, share, fit.is_narrow)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = OrderedDict()
        queue[group] = None

    def _dequeue(self, group: _Group) -> None:
        key, group.queue = group.queue, None
        if key is None:
            return
        queue = self._queues[key]
        del queue[group]
        if not queue:
            del self._queues[key]

    def _least(self) -> _Group | None:
        """The group that gives way; None if there are none."""
        if self._chosen is not None:
            group, key, is_newest = self._chosen
            if group.queue == key and group.blocks:
                return group
            queue = self._queues.get(key)
            if queue and self._num_popped < BLOCKS_AT_ONCE:
                group = next(reversed(queue)) if is_newest else next(iter(queue))
                self._chosen = group, key, is_newest
                return group
        return self._choose()

    def _choose(self) -> _Group | None:
        self._later = None
        now_s = self._clock.now()
        least, found = math.inf, None
        for key, queue in self._queues.items():
            oldest = next(iter(queue))
            worth = self._value(oldest, now_s)
            if worth < least:
                least, found, self._chosen = worth, oldest, (oldest, key, False)
            if key.is_narrow and len(queue) > 1:
                newest = next(reversed(queue))
                worth = self._value(newest, now_s)
                if worth < least:
                    least, found, self._chosen = worth, newest, (newest, key, True)
        if self._num_popped:
            interval_s = (now_s - self._chosen_s) / self._num_popped
            self._block_interval_s += NEW_WEIGHT * (interval_s - self._block_interval_s)
            self._chosen_s, self._num_popped = now_s, 0
        return found

    @property
    def horizon_s(self) -> float:
        """How long all blocks last at the rate at which they give way: what returns later returns too late."""
        return min(max(self._block_interval_s * len(self._home), MIN_HORIZON_S), MAX_HORIZON_S)

    def _value(self, group: _Group, now_s: float) -> float:
        chance = group.fit.chance(now_s - group.since_s, self.horizon_s, group.shift)
        return chance * self._block_s(next(reversed(group.blocks)))
