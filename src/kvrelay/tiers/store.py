"""What the tiers expect of a place that keeps blocks.

A store may lose, damage or refuse anything, at any time: then ``load`` says False, and the block is computed. It never
raises, and a block that ``load`` has accepted has proved itself on the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvrelay.core.tier_stats import StoreStats
from kvrelay.tiers.block import BlockName


class BlockStore(Protocol):
    """Blocks of one ``Shape``, by sequence hash. ``holds`` and ``worth_again`` are called on the engine's thread, the
    others on the tiers' own."""

    medium: str
    stats: StoreStats

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
