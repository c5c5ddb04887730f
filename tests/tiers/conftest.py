"""Stores of every kind over the same shape, and memory in place of a broker's."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvrelay.core.layout import paged_kv
from kvrelay.core.token_ids import to_bytes
from kvrelay.tiers.block import BlockName, Shape, shape_of
from kvrelay.tiers.disk import DiskStore
from kvrelay.tiers.host import HostStore, slot_bytes
from kvrelay.tiers.store import BlockStore

LAYOUT = paged_kv(1, 1, 4, 2, "float32")
SHAPE = shape_of("model", LAYOUT)
KINDS = ("host", "disk")
MakeStore = Callable[..., BlockStore]


class PrivateMemory:
    """What a broker would hand out, of this process alone."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = mmap.mmap(-1, num_bytes)

    def close(self) -> None:
        """The test's other stores may still use it."""


def host_bytes(num_blocks: int, shape: Shape = SHAPE) -> int:
    """Memory for about so many blocks."""
    return 64 + num_blocks * (slot_bytes(shape) + 16)


def name_of(number: int, parent: int | None = None) -> BlockName:
    """A block's name with a hash that looks like one."""
    rng = random.Random(number)
    return BlockName(rng.getrandbits(64) | 1, parent, to_bytes([rng.randrange(500) for _ in range(LAYOUT.block_size)]))


def payload_of(number: int, shape: Shape = SHAPE) -> bytes:
    return random.Random(-number - 1).randbytes(shape.block_bytes)


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[MakeStore]:
    """``make_store(kind, num_blocks, memory=...)``."""
    opened: list[BlockStore] = []

    def make(
        kind: str, num_blocks: int = 256, *, shape: Shape = SHAPE, memory: PrivateMemory | None = None
    ) -> BlockStore:
        store: BlockStore
        if kind == "host":
            store = HostStore(memory or PrivateMemory(host_bytes(num_blocks, shape)), shape)
        else:
            store = DiskStore(tmp_path / "kv", shape, num_blocks * shape.stored_bytes, 1e6)
        opened.append(store)
        return store

    yield make
    for store in opened:
        store.close()
