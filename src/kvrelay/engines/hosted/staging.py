"""The staging pool: host memory of the worker through which a backend's KV comes and goes, and its blocks.

The backend's processes map the memory, too, and tell through a pipe which copies are complete (``KvReports``). Peers
write into a block, or read from it, while the hand-off's ledger has it lent; the backend copies from it, or into it,
while an answer is under way. Each such use holds the block, and a block is free when no use is left.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from kvrelay.config import WorkerConfig
from kvrelay.config.byte_sizes import parse_bytes
from kvrelay.core.layout import KVLayout
from kvrelay.engine.free_extents import FreeExtents
from kvrelay.engines.connector.terms import REPORT_BYTES, CopyKind, Report, StagingPlace, decode_reports
from kvrelay.errors import ConfigError, IntegrityError
from kvrelay.executors.host_memory import HostMemory

REPORTS_AT_ONCE = 1024


class Progress:
    """The copies for one request, of ``num_blocks`` blocks, as far as all ranks have told. ``heard(n)`` is called when
    every rank has copied more of its first n blocks. Times are of the host's monotonic clock; 0: nothing was copied."""

    def __init__(self, ticket: int, num_blocks: int, num_ranks: int, heard: Callable[[int], None]) -> None:
        self.ticket = ticket
        self.began_s = self.ended_s = 0.0
        self.num_bytes = 0
        self._num_blocks = num_blocks
        self._told = [0] * num_ranks
        self._heard = heard
        self._is_complete = asyncio.Event()

    def report(self, report: Report) -> None:
        before = min(self._told)
        self.began_s = min(self.began_s or report.began_s, report.began_s)
        self.ended_s = max(self.ended_s, report.ended_s)
        self.num_bytes += report.num_bytes
        self._told[report.rank] = max(self._told[report.rank], report.num_blocks)
        if (now := min(self._told)) > before:
            self._heard(now)
            if now >= self._num_blocks:
                self._is_complete.set()

    async def complete(self) -> None:
        """Return when every rank has copied all blocks."""
        await self._is_complete.wait()


class KvReports:
    """What the ranks of a backend tell of their copies, by the pipe ``path``. Used in one event loop."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self._writer, True)
        self.path = f"/proc/{os.getpid()}/fd/{self._writer}"
        self._rest = b""
        self._tickets = itertools.count(1)
        self._expected: dict[int, Progress] = {}
        self.bytes_copied = dict.fromkeys(CopyKind, 0)
        """By all ranks."""

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_reader(self._reader, self.read)

    @contextmanager
    def expect(self, num_blocks: int, heard: Callable[[int], None]) -> Iterator[Progress]:
        """The copies for a request that carries ``Progress.ticket``. Reports that come later are ignored."""
        progress = Progress(next(self._tickets), num_blocks, self._num_ranks, heard)
        self._expected[progress.ticket] = progress
        try:
            yield progress
        finally:
            del self._expected[progress.ticket]

    def read(self) -> None:
        """Take what there is."""
        with suppress(BlockingIOError):
            self._rest += os.read(self._reader, REPORTS_AT_ONCE * REPORT_BYTES)
        num_whole = len(self._rest) // REPORT_BYTES * REPORT_BYTES
        data, self._rest = self._rest[:num_whole], self._rest[num_whole:]
        for report in decode_reports(data):
            self.bytes_copied[report.kind] += report.num_bytes
            progress = self._expected.get(report.ticket)
            if progress is not None and report.rank < self._num_ranks:
                progress.report(report)

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._reader)
        os.close(self._reader)
        os.close(self._writer)


class StagingMemory(msgspec.Struct, frozen=True):
    """``num_blocks`` blocks of the worker's layout, which the backend has mapped, too."""

    memory: mmap.mmap
    num_blocks: int


class StagedBlocks(msgspec.Struct, eq=False):
    """The blocks of one request, in order, and how many uses hold them. Made by ``StagingBlocks.take``."""

    block_ids: tuple[int, ...]
    num_uses: int = 1


class StagingBlocks:
    """Not thread-safe."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = FreeExtents()
        self._free.add(0, num_blocks)
        self._taken: set[StagedBlocks] = set()

    def __repr__(self) -> str:
        return f"StagingBlocks({self.num_free} of {self.num_blocks} free, for {len(self._taken)} uses)"

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> StagedBlocks | None:
        """``count`` blocks with one use; None if fewer are free."""
        if count > self.num_free:
            return None
        blocks = StagedBlocks(tuple(self._free.take(count)))
        self._taken.add(blocks)
        return blocks

    def use(self, blocks: StagedBlocks) -> StagedBlocks:
        """One more use."""
        assert blocks in self._taken, "blocks that are free"
        blocks.num_uses += 1
        return blocks

    def release(self, blocks: StagedBlocks) -> None:
        """One use has ended."""
        assert blocks in self._taken, "blocks that are free already"
        blocks.num_uses -= 1
        if not blocks.num_uses:
            self._taken.remove(blocks)
            for block_id in blocks.block_ids:
                self._free.add(block_id)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every block is free or taken, and none is both or twice."""
        found = [block_id for blocks in self._taken for block_id in blocks.block_ids]
        for start, length in self._free.extents().items():
            found += range(start, start + length)
        if sorted(found) != list(range(self.num_blocks)):
            raise IntegrityError(f"{self!r}: a staging block is lost, or in two places")


class Staging(msgspec.Struct, frozen=True):
    """``place`` is for vLLM's processes, ``memory`` for this one, which reads their ``reports``. ``kind`` names vLLM's
    inner layout of a block, which kvrelay does not know: version, device, block size."""

    place: StagingPlace
    memory: StagingMemory
    kind: str
    reports: KvReports


def allocate_staging(
    layout: KVLayout,
    max_model_len: int,
    kind: str,
    settings: WorkerConfig,
    memory: HostMemory,
    layers: tuple[tuple[int, ...], ...] = (),
) -> Staging:
    """As large as ``--vllm-staging`` says. ``layers``: as in StagingPlace. Raises ConfigError if the longest prompt
    does not fit."""
    vllm = settings.vllm
    num_blocks = parse_bytes(vllm.vllm_staging, "vllm_staging") // layout.block_bytes
    if num_blocks * layout.block_size < max_model_len:
        needed = -(-max_model_len // layout.block_size) * layout.block_bytes
        raise ConfigError(
            f"--vllm-staging {vllm.vllm_staging} holds no prompt of {max_model_len} tokens: "
            f"set it to {needed} bytes or more, or set --max-model-len",
            param="vllm_staging",
        )
    num_bytes = num_blocks * layout.block_bytes
    if memory.allocate is not None and memory.reserve is not None:
        fd, pool = os.dup(memory.reserve()), memory.allocate(num_bytes)
    else:
        fd = os.memfd_create("kvrelay-kv-pool", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        pool = mmap.mmap(fd, num_bytes)
    # The descriptor stays open until this process ends: vLLM's processes open it when they start.
    path = f"/proc/{os.getpid()}/fd/{fd}"
    reports = KvReports(settings.runner.num_ranks)
    place = StagingPlace(path, num_blocks, layout, layers=layers, reports=reports.path)
    return Staging(place, StagingMemory(pool, num_blocks), kind, reports)
