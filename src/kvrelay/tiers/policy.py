"""What is worth keeping, and what is worth loading. Pure."""

from __future__ import annotations

from collections import OrderedDict

QUEUE_SOFT = 0.5
"""Below this fill of the write queue everything is written."""
NEW_WEIGHT = 0.2
MAX_SAMPLE = 4.0
"""A load counts as at most this many times the mean: a pause of the process says nothing of the store."""
FORGOTTEN = 0.05
"""Of the mean, with each prompt that it keeps from loading."""
LOAD_OVERHEAD_S = 0.0005
"""A load costs a way to another thread and back, and a step more until the request begins."""


def share_to_write(fill: float) -> float:
    """The share of evicted blocks that is still written when the queue is ``fill`` full, 0 to 1: it falls evenly, so
    that a burst of evictions loses a part of each prompt's end instead of all of some prompts."""
    return min(max((1.0 - fill) / (1.0 - QUEUE_SOFT), 0.0), 1.0)


class SecondOffer:
    """Admits a block when it is offered again: most blocks are never used twice, and a disk wears.

    Remembers the latest ``capacity`` hashes.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        self._capacity = capacity
        self._offered: OrderedDict[int, None] = OrderedDict()

    def admit(self, sequence_hash: int) -> bool:
        """Whether it was offered before."""
        if sequence_hash in self._offered:
            del self._offered[sequence_hash]
            return True
        self._offered[sequence_hash] = None
        if len(self._offered) > self._capacity:
            self._offered.popitem(last=False)
        return False


class LoadTime:
    """How long a block of one store takes to load: a moving mean, from ``prior_s`` on."""

    def __init__(self, prior_s: float) -> None:
        self.block_s = prior_s

    def took(self, num_blocks: int, seconds: float) -> None:
        """A load of some blocks has ended."""
        if num_blocks > 0:
            self.block_s += NEW_WEIGHT * (min(seconds / num_blocks, MAX_SAMPLE * self.block_s) - self.block_s)

    def refused(self) -> None:
        """A prompt was computed because a load would take longer. What is not loaded is not measured, so without this
        some slow loads would close the store for good; now it is tried again after a while."""
        self.block_s *= 1.0 - FORGOTTEN
