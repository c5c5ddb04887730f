"""What carries blocks between the pool and the stores: one job at a time, and how long that took.

    KvTiers ── Jobs ──> Carrier      clears first, then reads, then writes; ``ended`` follows each ``run``

``ThreadCarrier`` copies the pool's memory on a thread of its own. The simulator's carrier copies nothing, and moves a
virtual clock instead (``simulate/virtual_tiers.py``).
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import msgspec

from kvrelay.core.layout import MemoryRegion

_log = logging.getLogger(__name__)

UNUSED_S = 60.0


class Job(NamedTuple):
    """``run`` copies; ``ended`` follows it once, whatever ``run`` has raised."""

    run: Callable[[], None]
    ended: Callable[[], None]


class Jobs(msgspec.Struct):
    """Jobs that wait."""

    clears: deque[Job] = msgspec.field(default_factory=deque)
    reads: deque[Job] = msgspec.field(default_factory=deque)
    writes: deque[Job] = msgspec.field(default_factory=deque)

    def next(self) -> Job | None:
        """Take the one that comes first."""
        waiting = self.clears or self.reads or self.writes
        return waiting.popleft() if waiting else None


class Carrier(Protocol):
    """Runs ``jobs`` until it is closed. ``copy`` is called on the engine's thread, ``room`` by jobs."""

    jobs: Jobs
    """To be changed under ``lock``, which ``wake`` needs as well."""
    is_closed: bool
    """The present job should end soon."""

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    def start(self, on_unused: Callable[[], None]) -> None:
        """``on_unused`` is called once, after ``UNUSED_S``."""

    def wake(self) -> None:
        """There are new jobs."""

    def stopwatch(self) -> float:
        """Seconds of carrying. Only differences count."""

    def copy(self, block_id: int) -> bytes:
        """What a block of the pool holds, [block_bytes]."""

    def room(self, block_id: int) -> memoryview:
        """Where a block of the pool lies, [block_bytes]."""

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do. False: something is."""

    def close(self) -> None:
        """Returns when no job runs any more. Idempotent."""


class ThreadCarrier:
    """Copies blocks of the pool, whose memory is ``region``."""

    def __init__(self, region: MemoryRegion, block_bytes: int) -> None:
        owner = (ctypes.c_ubyte * region.num_bytes).from_address(region.address)
        self._pool, self._block_bytes = memoryview(owner).cast("B"), block_bytes
        self.jobs, self.lock, self.is_closed = Jobs(), threading.Condition(), False
        self._is_busy = False
        self._thread = threading.Thread(target=self._run, name="kv-tiers", daemon=True)
        self._on_unused: Callable[[], None] | None = None
        self._began_s = time.monotonic()

    def start(self, on_unused: Callable[[], None]) -> None:
        self._on_unused = on_unused
        self._thread.start()

    def wake(self) -> None:
        self.lock.notify_all()

    def stopwatch(self) -> float:
        return time.perf_counter()

    def copy(self, block_id: int) -> bytes:
        return bytes(self.room(block_id))

    def room(self, block_id: int) -> memoryview:
        start = block_id * self._block_bytes
        return self._pool[start : start + self._block_bytes]

    def settle(self, timeout_s: float) -> bool:
        jobs = self.jobs
        with self.lock:
            return self.lock.wait_for(
                lambda: not (self._is_busy or jobs.clears or jobs.reads or jobs.writes), timeout_s
            )

    def close(self) -> None:
        with self.lock:
            self.is_closed = True
            self.lock.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            for part in job:
                try:
                    part()
                except Exception:  # noqa: BLE001 - a store must not end the thread that requests wait for
                    _log.exception("a KV tier failed")

    def _next(self) -> Job | None:
        """None: closed, and all is done."""
        with self.lock:
            self._is_busy = False
            self.lock.notify_all()
            while (job := self.jobs.next()) is None and not self.is_closed:
                self.lock.wait(None if self._on_unused is None else UNUSED_S)
                self._tell_if_unused()
            self._is_busy = True
            return job

    def _tell_if_unused(self) -> None:
        if self._on_unused is not None and time.monotonic() - self._began_s >= UNUSED_S:
            self._on_unused()
            self._on_unused = None
