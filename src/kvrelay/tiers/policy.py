"""What is worth keeping, and what is worth loading. Pure."""

from __future__ import annotations

import mmap

QUEUE_SOFT = 0.5
"""Below this fill of the write queue everything is written."""
NEW_WEIGHT = 0.2
MAX_SAMPLE = 4.0
"""A load counts as at most this many times the mean: a pause of the process says nothing of the store."""
FORGOTTEN = 0.05
"""Of the mean, with each prompt that it keeps from loading."""
RETURNS_WINDOW = 128
"""Evicted blocks of a depth over which their share of returns is a mean. What is judged wrong costs little: a block
that returns in spite of a small share is computed once more, and kept from then on."""
MAX_DEPTHS = 24
LOAD_OVERHEAD_S = 0.0005
"""A load costs a way to another thread and back, and a step more until the request begins."""


def share_to_write(fill: float) -> float:
    """The share of evicted blocks that is still written when the queue is ``fill`` full, 0 to 1: it falls evenly, so
    that a burst of evictions loses a part of each prompt's end instead of all of some prompts."""
    return min(max((1.0 - fill) / (1.0 - QUEUE_SOFT), 0.0), 1.0)


class Returns:
    """Which evicted blocks had been evicted before, so that a prompt has asked for them again, and what share of them
    that is. The share is learned apart for each depth in a prompt: beginnings return more often than ends. It begins
    with all.

    Remembers the latest ``num_slots`` hashes or so, a power of two: each new one takes the place of another.
    """

    def __init__(self, num_slots: int = 1 << 20) -> None:
        self._slots = memoryview(mmap.mmap(-1, 8 * num_slots)).cast("Q")
        """Of private memory, which takes room as it is used."""
        self._mask = num_slots - 1
        self._shares = [1.0] * MAX_DEPTHS

    def evicted(self, sequence_hash: int, index: int) -> bool:
        """Whether it has returned. ``index``: of the block in its sequence."""
        slot, depth = sequence_hash & self._mask, min(index.bit_length(), MAX_DEPTHS - 1)
        is_again = self._slots[slot] == sequence_hash
        self._slots[slot] = sequence_hash
        self._shares[depth] += (is_again - self._shares[depth]) / RETURNS_WINDOW
        return is_again

    def share(self, index: int) -> float:
        """Of the blocks about as deep in their prompts as this one, 0 to 1."""
        return self._shares[min(index.bit_length(), MAX_DEPTHS - 1)]


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
