"""What the tiers expect of a place that keeps blocks.

A store may lose, damage or refuse anything, at any time: then ``load`` says False, and the block is computed. It never
raises, and a block that ``load`` has accepted has proved itself on the copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from kvrelay.core.tier_stats import StoreStats
from kvrelay.tiers.block import BlockName


class BlockChanges:
    """What a store has gained and lost since ``take``, for the workers' events. From any thread. ``on_first`` is called
    with the first change after a ``take``."""

    def __init__(self) -> None:
        self.on_first: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._is_held: dict[int, bool] = {}
        self._is_ignored = False

    def __bool__(self) -> bool:
        return bool(self._is_held)

    def ignore(self) -> None:
        """No one will ever take them: keep none."""
        self._is_ignored = True
        self.take()

    def added(self, sequence_hash: int) -> None:
        self._note(sequence_hash, True)

    def removed(self, sequence_hash: int) -> None:
        self._note(sequence_hash, False)

    def _note(self, sequence_hash: int, is_held: bool) -> None:
        if self._is_ignored:
            return
        with self._lock:
            is_first = not self._is_held
            self._is_held[sequence_hash] = is_held
        if is_first:
            self.on_first()

    def take(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Blocks that are there, and those that are gone."""
        with self._lock:
            noted, self._is_held = self._is_held, {}
        held = tuple(block for block, is_held in noted.items() if is_held)
        return held, tuple(block for block, is_held in noted.items() if not is_held)


class BlockStore(Protocol):
    """Blocks of one ``Shape``, by sequence hash. ``holds`` and ``worth_again`` are called on the engine's thread, the
    others on the tiers' own."""

    medium: str
    stats: StoreStats
    changes: BlockChanges
    """A block is added when its write is complete. One that another process takes away is noticed when it is missed."""

    def holds(self, sequence_hash: int) -> bool:
        """Whether a block of this hash seems to be here. Cheap, without input or output."""

    def worth_again(self, sequence_hash: int, worth_s: float) -> bool:
        """A block that was evicted: if it is here still, it counts ``worth_s`` again. False: it is not here."""

    def load(self, name: BlockName, into: memoryview) -> bool:
        """Copy the block to ``into``, [block_bytes], and verify it there. False: ``into`` holds anything."""

    def store(self, name: BlockName, payload: memoryview, worth_s: float) -> None:
        """Keep a copy, at the cost of blocks that are worth less. ``worth_s``: seconds that a hit saves."""

    def clear(self) -> int:
        """Forget all blocks of this shape. Returns their number."""

    def close(self) -> None:
        """Idempotent."""


def leading(stores: Sequence[BlockStore], sequence_hashes: Sequence[int]) -> list[BlockStore]:
    """For each of the leading blocks that some store holds, the first that does."""
    found: list[BlockStore] = []
    for sequence_hash in sequence_hashes:
        store = next((store for store in stores if store.holds(sequence_hash)), None)
        if store is None:
            break
        found.append(store)
    return found
