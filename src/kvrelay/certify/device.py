"""Where an end's KV pool lies. The seam between the rows and an accelerator: memory, copies, events.

    put ──> event ──wait──> the bytes are in the memory that a transport reads
    a transport has written ──landed──> get reads them

Work is asynchronous: what was put is in memory when its event has been waited for, not before. What a transport has
written may be read after ``landed``. The host does all at once, a GPU does not, and a test's fake is as late as it may.
"""

from __future__ import annotations

import mmap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from kvrelay.certify.pattern import UInt8Array
from kvrelay.core.layout import MemoryRegion


class Event(Protocol):
    """The end of some work."""

    def wait(self) -> None:
        """Return when it has been reached."""


class Device(ABC):
    """One device with one pool of ``num_bytes``, which ``allocate`` makes."""

    name: str
    """As in ``MemoryRegion.device``."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> MemoryRegion:
        """The pool. Called once. Raises FatalError."""

    @abstractmethod
    def put(self, offsets: Sequence[int], rows: UInt8Array) -> Event:
        """Begin to write row i to ``offsets[i]`` of the pool, as a kernel would that computes it."""

    @abstractmethod
    def landed(self) -> None:
        """Make what transports have written until now visible to ``get``."""

    @abstractmethod
    def get(self, offsets: Sequence[int], num_bytes: int) -> UInt8Array:
        """[len(offsets), num_bytes] from the pool."""

    @abstractmethod
    def raw_copy_s(self, num_bytes: int) -> float:
        """Seconds that the device's own copy of so many bytes takes: the yardstick of a transfer."""

    def close(self) -> None:  # noqa: B027 - most have nothing to free
        """Free the pool. Idempotent."""


class _Done:
    def wait(self) -> None:
        """There is nothing to wait for."""


DONE = _Done()


class HostDevice(Device):
    """Memory of the host. ``allocator``: where a transport wants it to be (``transfer.factory.pool_allocator``)."""

    name = "cpu"

    def __init__(self, allocator: Callable[[int], mmap.mmap] | None = None) -> None:
        self._allocator = allocator
        self._pool = np.empty(0, dtype=np.uint8)

    def allocate(self, num_bytes: int) -> MemoryRegion:
        if self._allocator is None:
            self._pool = np.empty(num_bytes, dtype=np.uint8)
        else:
            self._pool = np.frombuffer(self._allocator(num_bytes), dtype=np.uint8)[:num_bytes]
        self._pool.fill(0)
        return MemoryRegion(self._pool.ctypes.data, num_bytes)

    def put(self, offsets: Sequence[int], rows: UInt8Array) -> Event:
        for offset, row in zip(offsets, rows, strict=True):
            self._pool[offset : offset + len(row)] = row
        return DONE

    def landed(self) -> None:
        """The host sees what was written."""

    def get(self, offsets: Sequence[int], num_bytes: int) -> UInt8Array:
        return np.stack([self._pool[offset : offset + num_bytes] for offset in offsets])

    def raw_copy_s(self, num_bytes: int) -> float:
        source = np.ones(num_bytes, dtype=np.uint8)
        target = np.ones(num_bytes, dtype=np.uint8)
        best_s = float("inf")
        for _ in range(3):
            began_s = time.perf_counter()
            np.copyto(target, source)
            best_s = min(best_s, time.perf_counter() - began_s)
        return best_s
