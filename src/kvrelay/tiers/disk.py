"""Blocks as files, one per block, that several workers and their restarts share (``disk_index.py``: where they lie).

    reads and writes    each on a thread of its own: a disk that hangs makes its blocks misses, and holds up nothing
    scans               folder by folder between the writes; a block that is not found yet is a miss

Files have mode 0600: they are users' text. A file is written under another name and then renamed, so a name has a whole
file or none; that it is whole it proves itself (``block.py``), so nothing is flushed. A file that does not prove itself
is removed.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from kvrelay.config.byte_sizes import shown_bytes
from kvrelay.core.tier_stats import StoreStats
from kvrelay.errors import ConfigError
from kvrelay.tiers.block import BlockName, Shape, header_of, refusal
from kvrelay.tiers.disk_index import TEMPORARY, DirectoryIndex
from kvrelay.tiers.store import BlockChanges

_log = logging.getLogger(__name__)
T = TypeVar("T")

RESCAN_S = 10.0
PAUSE_S = 30.0
"""After a full disk nothing is written for this long, and after a read that hangs nothing is read."""
LOAD_TIMEOUT_S = 2.0
"""For a block. Within it a disk that is merely busy answers."""
MAX_WAITING = 256
"""Blocks that wait to be written."""


def read_block(path: Path, num_bytes: int) -> bytes:
    """The file, if it is one of ``num_bytes``; else nothing of it. Links and fifos lead elsewhere. Raises OSError."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        return file.read(num_bytes) if stat.S_ISREG(status.st_mode) and status.st_size == num_bytes else b""


class Lane:
    """A daemon thread that runs what it is given, in order."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return self._jobs.qsize()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Its result or exception."""
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """Waits for what is given already, unless the disk hangs."""
        self._jobs.put(None)
        self._thread.join(LOAD_TIMEOUT_S)

    def _run(self) -> None:
        while (given := self._jobs.get()) is not None:
            job, future = given
            try:
                future.set_result(job())
            except Exception as exc:  # noqa: BLE001 - whoever waits gets it
                future.set_exception(exc)


class DiskStore:
    """Blocks of one shape below ``directory``. All models there have at most ``max_bytes``, and no block is unused for
    ``max_age_s``: the least recently used go first. Raises ConfigError if the directory cannot be used."""

    medium = "disk"

    def __init__(self, directory: Path, shape: Shape, max_bytes: int, max_age_s: float) -> None:
        self.stats, self.changes = StoreStats(), BlockChanges()
        self._shape = shape
        self._scan: Iterator[None] | None = None
        self._scan_due_s = self._full_until_s = self._slow_until_s = 0.0
        if max_bytes < shape.stored_bytes:
            raise ConfigError(f"disk_kv_cache is below {shape.stored_bytes} bytes, one block of this model")
        root = directory / shape.name
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            root.mkdir(mode=0o700, exist_ok=True)
            probe = root / f"probe{TEMPORARY}.{os.getpid()}"
            probe.touch(mode=0o600)
            probe.unlink()
            disk_bytes = shutil.disk_usage(directory).total
        except OSError as exc:
            raise ConfigError(f"disk_kv_cache: {exc}", param="disk_kv_cache") from exc
        if max_bytes > disk_bytes:
            raise ConfigError(
                f"disk_kv_cache: {shown_bytes(max_bytes)} were asked for, and the disk of {directory} has "
                f"{shown_bytes(disk_bytes)}",
                param="disk_kv_cache",
            )
        self._index = DirectoryIndex(directory, shape.name, shape.stored_bytes, max_bytes, max_age_s, self.changes)
        self._reader, self._writer = Lane("kv-disk-read"), Lane("kv-disk-write")
        self._later(self.refresh)

    def __repr__(self) -> str:
        return f"DiskStore({self._index!r})"

    def holds(self, sequence_hash: int) -> bool:
        return sequence_hash in self._index and time.monotonic() >= self._slow_until_s

    def worth_again(self, sequence_hash: int, worth_s: float) -> bool:
        return sequence_hash in self._index

    def load(self, name: BlockName, into: memoryview) -> bool:
        path = self._index.path(name.sequence_hash)
        read = self._reader.submit(lambda: read_block(path, self._shape.stored_bytes))
        try:
            content = memoryview(read.result(LOAD_TIMEOUT_S))
        except TimeoutError:
            # What the thread reads after this goes nowhere: it never had the pool's memory.
            self._slow_until_s = time.monotonic() + PAUSE_S
            self.stats.misses["slow"] += 1
            return False
        except FileNotFoundError:
            return self._missed(name.sequence_hash, "gone")
        except OSError as exc:
            return self._missed(name.sequence_hash, errno.errorcode.get(exc.errno or 0, "error"))
        reason: str | None = "short"
        if len(content) == self._shape.stored_bytes:
            into[:] = content[self._shape.header_bytes :]
            reason = refusal(content[: self._shape.header_bytes], name, self._shape, into)
        if reason is not None:
            if reason not in ("other", "tokens"):
                self._later(lambda: path.unlink(missing_ok=True))
            return self._missed(name.sequence_hash, reason)
        self.touch(name.sequence_hash)
        self.stats.num_loaded += 1
        return True

    def store(self, name: BlockName, payload: memoryview, worth_s: float) -> None:
        if self._writer.num_waiting >= MAX_WAITING:
            self.stats.drops["busy"] += 1
        else:
            self._later(lambda: self._write(name, payload))

    def write(self, name: BlockName, payload: memoryview) -> Future[None]:
        """As ``store``, however many wait; ``payload`` is read until the future is done."""
        return self._writer.submit(lambda: self._write(name, payload))

    def touch(self, sequence_hash: int) -> None:
        """The block was used elsewhere, so it is not the least recently used."""
        self._later(lambda: self._index.touch(sequence_hash))

    def _later(self, job: Callable[[], Any]) -> None:
        """On the writer's thread. Nobody waits for it, so what it raises is counted, and told the first time."""

        def run() -> None:
            try:
                job()
            except Exception as exc:  # noqa: BLE001 - a block less, never an answer less
                if not self.stats.drops["error"]:
                    _log.warning(
                        "the KV cache on disk failed; from now on such failures are only counted", exc_info=exc
                    )
                self.stats.drops["error"] += 1

        self._writer.submit(run)

    def _write(self, name: BlockName, payload: memoryview) -> None:
        self.refresh()
        if name.sequence_hash in self._index:
            self._index.touch(name.sequence_hash)
            return
        if time.monotonic() < self._full_until_s:
            self.stats.drops["full"] += 1
            return
        path = self._index.path(name.sequence_hash)
        temporary = path.with_name(f"{path.name}{TEMPORARY}.{os.getpid()}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                num_written = os.writev(fd, [header_of(name, self._shape, payload), payload])
            finally:
                os.close(fd)
            if num_written != self._shape.stored_bytes:
                raise OSError(errno.ENOSPC, "the disk took a part of a block")
            os.rename(temporary, path)
        except OSError as exc:
            with suppress(OSError):
                temporary.unlink()
            self.stats.drops[errno.errorcode.get(exc.errno or 0, "error")] += 1
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                _log.warning("the disk of the KV cache is full; nothing is written for %.0f s", PAUSE_S)
                self._full_until_s = time.monotonic() + PAUSE_S
            return
        self.stats.num_stored += 1
        self._index.add(name.sequence_hash)

    def clear(self) -> int:
        num_blocks = self._index.clear()
        self._later(self._index.remove_all)
        return num_blocks

    def settle(self, timeout_s: float) -> None:
        """Wait until everything that was given is done, and a scan that has begun. Raises TimeoutError."""
        self._reader.submit(lambda: None).result(timeout_s)
        while self._writer.submit(lambda: self._scan is not None).result(timeout_s):
            pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def refresh(self) -> None:
        """Begin a scan, at most every ``RESCAN_S``."""
        now_s = time.monotonic()
        if self._scan is None and now_s >= self._scan_due_s:
            self._scan_due_s = now_s + RESCAN_S
            self._scan = self._index.scan()
            self._scan_on()

    def _scan_on(self) -> None:
        """One folder, then what waits to be written, then the next."""
        if self._scan is None:
            return
        try:
            next(self._scan)
        except StopIteration:
            self._scan = None
        except BaseException:
            self._scan = None
            raise
        else:
            self._later(self._scan_on)

    def _missed(self, sequence_hash: int, reason: str) -> bool:
        self._index.forget(sequence_hash)
        self.stats.misses[reason] += 1
        return False
