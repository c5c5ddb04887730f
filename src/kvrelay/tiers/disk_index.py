"""What lies in the directory of a disk tier, of all models, and what goes when that is too much or too old.

    DIR/<fingerprint, 32 hex digits>/<2 hex digits>/<sequence hash, 16 hex digits>      one file per block

Workers of several models share DIR, and each keeps its limits by itself: a scan tells what the others have written, and
models that nobody serves any more are counted too. All take the least recently used file first, by the files' clock,
so that two workers that make room at once choose the same files. A scan reads one folder at a time, so that it delays
no write for long, however many files there are.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.tiers.store import BlockChanges

NUM_FOLDERS = 256
MAX_FILES = 1 << 20
"""Files that a worker remembers, about 100 bytes each. What is beyond is too much, as if it were beyond the size."""
SPARE = 64
"""Room is made for this share of the limit at once, since the files have to be sorted for it."""
RETRY_S = 10.0
"""When no room could be made, because files cannot be removed or others use them all, it is tried again after this."""
TEMPORARY = ".writing"
STALE_S = 3600.0
"""A file under its temporary name for this long has no writer."""


class _Told(dict[int, float]):
    """The blocks of a model; each that comes or goes is told."""

    def __init__(self, changes: BlockChanges) -> None:
        super().__init__()
        self._changes = changes

    def __setitem__(self, sequence_hash: int, used_s: float) -> None:
        if sequence_hash not in self:
            self._changes.added(sequence_hash)
        super().__setitem__(sequence_hash, used_s)

    def pop(self, sequence_hash: int, default: Any = None) -> Any:
        if sequence_hash in self:
            self._changes.removed(sequence_hash)
        return super().pop(sequence_hash, default)


class _Model(msgspec.Struct):
    """Blocks of one fingerprint."""

    root: Path
    block_bytes: float = 0.0
    """Of another model: the mean of the files seen."""
    is_own: bool = False
    known: dict[int, float] = {}
    """When each block was written or used, by the files' clock."""
    scanned: dict[int, float] = {}
    """By folder: its time of change when it was read."""

    def path(self, sequence_hash: int) -> Path:
        name = f"{sequence_hash:016x}"
        return self.root / name[:2] / name

    def found(self, sequence_hash: int, used_s: float, num_bytes: int) -> None:
        """A file that was not known."""
        if not self.is_own:
            num_files = len(self.known)
            self.block_bytes = (self.block_bytes * num_files + num_bytes) / (num_files + 1)
        self.known[sequence_hash] = used_s


class DirectoryIndex:
    """Of ``directory``, for a worker whose blocks lie in its folder ``own``, ``block_bytes`` each. It belongs to one
    thread; ``in`` and ``forget`` may be called by any. ``changes`` hears of the blocks of ``own``, but for a clear."""

    def __init__(
        self, directory: Path, own: str, block_bytes: int, max_bytes: int, max_age_s: float, changes: BlockChanges
    ) -> None:
        self._directory = directory
        self._own = _Model(directory / own, block_bytes, is_own=True, known=_Told(changes))
        self._models = {own: self._own}
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._retry_s = self._latest_s = 0.0

    def __repr__(self) -> str:
        return f"DirectoryIndex({self.num_own} blocks of ours, {self.num_bytes} of {self._max_bytes} bytes)"

    def __contains__(self, sequence_hash: int) -> bool:
        """Whether a block of this worker's model is known."""
        return sequence_hash in self._own.known

    @property
    def num_own(self) -> int:
        return len(self._own.known)

    @property
    def num_bytes(self) -> int:
        """Of all models."""
        return round(sum(len(model.known) * model.block_bytes for model in self._models.values()))

    @property
    def num_files(self) -> int:
        return sum(len(model.known) for model in self._models.values())

    def path(self, sequence_hash: int) -> Path:
        """Where a block of this worker's model lies."""
        return self._own.path(sequence_hash)

    def add(self, sequence_hash: int) -> None:
        """It was written."""
        self._own.known[sequence_hash] = self._now_s()
        self.make_room()

    def touch(self, sequence_hash: int) -> None:
        """It was used. Nothing if it is not known any more."""
        if sequence_hash in self._own.known:
            used_s = self._own.known[sequence_hash] = self._now_s()
            with suppress(OSError):
                os.utime(self.path(sequence_hash), (used_s, used_s))

    def forget(self, sequence_hash: int) -> None:
        self._own.known.pop(sequence_hash, None)

    def clear(self) -> int:
        """Forget this worker's model; returns the number of blocks. ``remove_all`` removes them."""
        num_blocks = self.num_own
        self._own.known.clear()
        return num_blocks

    def remove_all(self) -> None:
        for number in range(NUM_FOLDERS):
            shutil.rmtree(self._own.root / f"{number:02x}", ignore_errors=True)
        for sequence_hash in list(self._own.known):
            self.forget(sequence_hash)  # what was written after the clear, and told
        self._own.scanned.clear()

    # -- scans --------------------------------------------------------------------------------------------------------

    def scan(self) -> Iterator[None]:
        """Read the folders that have changed, one a turn; after each the limits hold for what is known."""
        for model in self._found_models():
            for number in range(NUM_FOLDERS):
                folder = model.root / f"{number:02x}"
                try:
                    changed_s = folder.stat().st_mtime
                except OSError:
                    changed_s = 0.0  # gone, and its blocks with it
                if model.scanned.get(number, 0.0) != changed_s:
                    model.scanned[number] = changed_s
                    self._read(model, number, folder)
                    self.make_room()
                    yield
        self._remove_old()

    def _found_models(self) -> list[_Model]:
        for root in models_in(self._directory):
            self._models.setdefault(root.name, _Model(root))
        return list(self._models.values())

    @staticmethod
    def _read(model: _Model, number: int, folder: Path) -> None:
        now_s = time.time()
        found: set[int] = set()
        for sequence_hash, entry in entries(folder):
            found.add(sequence_hash)
            # Each of our own writes changes its folder: only files that are new to us are asked for their times.
            if sequence_hash not in model.known:
                with suppress(OSError):
                    status = entry.stat()
                    model.found(sequence_hash, min(status.st_mtime, now_s), status.st_size)
        for sequence_hash in [known for known in list(model.known) if known >> 56 == number and known not in found]:
            model.known.pop(sequence_hash, None)

    def _now_s(self) -> float:
        """By the files' clock. If it was set back, blocks of its future were used now: they must not outlive what is
        written from now on."""
        now_s = time.time()
        if now_s < self._latest_s:
            for known in (model.known for model in self._models.values()):
                known.update({found: now_s for found, used_s in list(known.items()) if used_s > now_s})
        self._latest_s = now_s
        return now_s

    # -- limits -------------------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Remove the least recently used, if there is too much."""
        if self._fits(self._max_bytes, MAX_FILES) or time.monotonic() < self._retry_s:
            return
        max_bytes, max_files = (limit - limit // SPARE for limit in (self._max_bytes, MAX_FILES))
        for _, model, sequence_hash in self._by_age():
            if self._fits(max_bytes, max_files):
                return
            self._remove(model, sequence_hash)
        if not self._fits(self._max_bytes, MAX_FILES):
            self._retry_s = time.monotonic() + RETRY_S

    def _fits(self, max_bytes: int, max_files: int) -> bool:
        return self.num_bytes <= max_bytes and self.num_files <= max_files

    def _remove_old(self) -> None:
        oldest_s = time.time() - self._max_age_s
        for used_s, model, sequence_hash in self._by_age():
            if used_s >= oldest_s:
                break
            self._remove(model, sequence_hash)

    def _by_age(self) -> list[tuple[float, _Model, int]]:
        blocks = [
            (used_s, model, sequence_hash)
            for model in self._models.values()
            for sequence_hash, used_s in list(model.known.items())
        ]
        return sorted(blocks, key=lambda block: block[0])

    @staticmethod
    def _remove(model: _Model, sequence_hash: int) -> None:
        """Unless another worker has used it since we looked. What cannot be removed goes on counting."""
        path = model.path(sequence_hash)
        try:
            used_s = path.stat().st_mtime
            if model.known.get(sequence_hash, used_s) < used_s <= time.time():
                model.known[sequence_hash] = used_s
                return
            path.unlink()
        except FileNotFoundError:
            pass  # another worker was faster
        except OSError:
            return
        model.known.pop(sequence_hash, None)


def models_in(directory: Path) -> Iterator[Path]:
    """The folders of all models below ``directory``; none if it is not there."""
    with suppress(OSError):
        for root in directory.iterdir():
            if len(root.name) == 32 and set(root.name) <= set("0123456789abcdef") and root.is_dir():
                yield root


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
            if len(entry.name) == 16 and entry.is_file(follow_symlinks=False):
                yield int(entry.name, 16), entry


def clear_directory(directory: Path) -> int:
    """Remove the blocks of all models below ``directory``, and nothing else. Returns their number."""
    num_blocks = 0
    for root in models_in(directory):
        for number in range(NUM_FOLDERS):
            folder = root / f"{number:02x}"
            num_blocks += sum(1 for _ in entries(folder))
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            root.rmdir()
    return num_blocks
