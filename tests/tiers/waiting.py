"""A disk writes on its own thread: wait for it."""

from __future__ import annotations

from kvrelay.tiers.disk import DiskStore
from kvrelay.tiers.store import BlockStore

PATIENCE_S = 60.0


def settled(store: BlockStore) -> BlockStore:
    """The store, after it has done what it was given."""
    if isinstance(store, DiskStore):
        store.settle(PATIENCE_S)
    return store
