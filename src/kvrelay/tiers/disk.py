"""Blocks as files, one per block, that several workers and their restarts share.

    DIR/<fingerprint, 32 hex digits>/<2 hex digits>/<sequence hash, 16 hex digits>     mode 0600: they are users' text

    reads and writes    each on a thread of its own: a disk that hangs makes its blocks misses, and holds up nothing

A file is written under another name and then renamed, so a name has a whole file or none; that it is whole it proves
itself (``block.py``), so nothing is flushed. What lies there is known from a scan: at the start, and again for folders
that have changed, since other workers write as well. A file that does not prove itself is removed.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from kvrelay.core.tier_stats import StoreStats
from kvrelay.errors import ConfigError
from kvrelay.tiers.block import BlockName, Shape, header_of, refusal

_log = logging.getLogger(__name__)
T = TypeVar("T")

NUM_FOLDERS = 256
RESCAN_S = 10.0
PAUSE_S = 30.0
"""After a full disk nothing is written for this long, and after a read that hangs nothing is read."""
LOAD_TIMEOUT_S = 2.0
"""For a block. Within it a disk that is merely busy answers."""
MAX_WAITING = 256
"""Blocks that wait to be written."""
TEMPORARY = ".writing"
STALE_S = 3600.0
"""A file under its temporary name for this long has no writer."""


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
    """Blocks of one shape below ``directory``. At most ``max_bytes``, none older than ``max_age_s``: the least recently
    used go first. Raises ConfigError if the directory cannot be used."""

    medium = "disk"

    def __init__(self, directory: Path, shape: Shape, max_bytes: int, max_age_s: float) -> None:
        self.stats = StoreStats()
        self._root = directory / shape.name
        self._shape = shape
        self._max_blocks = max_bytes // shape.stored_bytes
        self._max_age_s = max_age_s
        self._known: OrderedDict[int, float] = OrderedDict()
        """When each block was written or used, by the files' clock; the least recently used first."""
        self._scanned: dict[int, float] = {}
        """By folder: its time of change when it was read."""
        self._scan_due_s = self._full_until_s = self._slow_until_s = 0.0
        if not self._max_blocks:
            raise ConfigError(f"disk_kv_cache is below {shape.stored_bytes} bytes, one block of this model")
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._root.mkdir(mode=0o700, exist_ok=True)
            probe = self._root / f"probe{TEMPORARY}.{os.getpid()}"
            probe.touch(mode=0o600)
            probe.unlink()
        except OSError as exc:
            raise ConfigError(f"disk_kv_cache: {exc}", param="disk_kv_cache") from exc
        self._reader, self._writer = Lane("kv-disk-read"), Lane("kv-disk-write")
        self._later(self.refresh)

    def __repr__(self) -> str:
        return f"DiskStore({self._root}, {len(self._known)} of {self._max_blocks} blocks)"

    def holds(self, sequence_hash: int) -> bool:
        return sequence_hash in self._known and time.monotonic() >= self._slow_until_s

    def worth_again(self, sequence_hash: int, worth_s: float) -> bool:
        return sequence_hash in self._known

    def load(self, name: BlockName, into: memoryview) -> bool:
        began_s = time.perf_counter()
        path = self._path(name.sequence_hash)
        try:
            content = memoryview(self._reader.submit(path.read_bytes).result(LOAD_TIMEOUT_S))
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
        self._later(lambda: self._touch(name.sequence_hash))
        self.stats.num_loaded += 1
        self.stats.loaded_bytes += len(into)
        self.stats.load_s += time.perf_counter() - began_s
        return True

    def store(self, name: BlockName, payload: memoryview, worth_s: float) -> None:
        if self._writer.num_waiting >= MAX_WAITING:
            self.stats.drops["busy"] += 1
        else:
            self._later(lambda: self._write(name, payload))

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
        if name.sequence_hash in self._known:
            self._touch(name.sequence_hash)
            return
        if time.monotonic() < self._full_until_s:
            self.stats.drops["full"] += 1
            return
        path = self._path(name.sequence_hash)
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
        self._known[name.sequence_hash] = time.time()
        self.stats.num_stored += 1
        self._shrink()

    def clear(self) -> int:
        num_blocks = len(self._known)
        self._known.clear()
        self._later(self._remove_all)
        return num_blocks

    def settle(self, timeout_s: float) -> None:
        """Wait until everything that was given is done. Raises TimeoutError."""
        for lane in (self._reader, self._writer):
            lane.submit(lambda: None).result(timeout_s)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _remove_all(self) -> None:
        for number in range(NUM_FOLDERS):
            shutil.rmtree(self._root / f"{number:02x}", ignore_errors=True)
        self._known.clear()
        self._scanned.clear()

    # -- what is known ------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read the folders that have changed, at most every ``RESCAN_S``."""
        now_s = time.monotonic()
        if now_s < self._scan_due_s:
            return
        self._scan_due_s = now_s + RESCAN_S
        for number in range(NUM_FOLDERS):
            folder = self._root / f"{number:02x}"
            try:
                changed_s = folder.stat().st_mtime
            except OSError:
                continue
            if self._scanned.get(number) != changed_s:
                self._scanned[number] = changed_s
                self._read_folder(number, folder)
        self._shrink()

    def _read_folder(self, number: int, folder: Path) -> None:
        found: dict[int, float] = {}
        for sequence_hash, entry in entries(folder):
            # Each of our own writes changes its folder: only files that are new to us are asked for their times.
            known_s = self._known.get(sequence_hash)
            with suppress(OSError):
                found[sequence_hash] = entry.stat().st_mtime if known_s is None else known_s
        for sequence_hash in [known for known in list(self._known) if known >> 56 == number and known not in found]:
            self._known.pop(sequence_hash, None)
        new = sorted(
            (used_s, sequence_hash) for sequence_hash, used_s in found.items() if sequence_hash not in self._known
        )
        for used_s, sequence_hash in new:
            self._known[sequence_hash] = used_s

    def _shrink(self) -> None:
        """Remove what is too much, and what is too old."""
        oldest_s = time.time() - self._max_age_s
        while self._known:
            sequence_hash, used_s = self._known.popitem(last=False)
            if len(self._known) < self._max_blocks and used_s >= oldest_s:
                self._known[sequence_hash] = used_s
                self._known.move_to_end(sequence_hash, last=False)
                break
            with suppress(OSError):
                self._path(sequence_hash).unlink()

    def _touch(self, sequence_hash: int) -> None:
        if sequence_hash not in self._known:
            return  # cleared, or found damaged, since it was used
        self._known[sequence_hash] = time.time()
        self._known.move_to_end(sequence_hash)
        with suppress(OSError):
            os.utime(self._path(sequence_hash))

    def _missed(self, sequence_hash: int, reason: str) -> bool:
        self._known.pop(sequence_hash, None)
        self.stats.misses[reason] += 1
        return False

    def _path(self, sequence_hash: int) -> Path:
        name = f"{sequence_hash:016x}"
        return self._root / name[:2] / name


def entries(folder: Path) -> Iterator[tuple[int, os.DirEntry[str]]]:
    """The blocks of a folder. Files whose writer has died are removed; foreign ones stay."""
    try:
        found = list(os.scandir(folder))
    except OSError:
        return
    for entry in found:
        if TEMPORARY in entry.name:
            with suppress(OSError):
                if time.time() - entry.stat().st_mtime > STALE_S:
                    os.unlink(entry.path)
            continue
        with suppress(ValueError):
            if len(entry.name) == 16:
                yield int(entry.name, 16), entry


def clear_directory(directory: Path) -> int:
    """Remove the blocks of all models below ``directory``, and nothing else. Returns their number."""
    num_blocks = 0
    for root in directory.iterdir() if directory.is_dir() else ():
        if not (root.is_dir() and len(root.name) == 32 and set(root.name) <= set("0123456789abcdef")):
            continue
        for number in range(NUM_FOLDERS):
            folder = root / f"{number:02x}"
            num_blocks += sum(1 for _ in entries(folder))
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            root.rmdir()
    return num_blocks
