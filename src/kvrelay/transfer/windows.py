"""Which peers may touch which bytes of our pool, for transports whose bytes our own process puts into place.

    decode worker's side ── open(window) ─────────>  WindowTable  <── touching(...) ── threads of the transport
                         ── close(hand-off, loan) ─>

With a two-sided transport a peer's bytes land in a buffer of ours, and a thread of ours copies them into blocks. That
copy runs under this table's lock, and only while the window is open whose key the bytes name. So a block is never
touched after ``close`` has returned, however late the bytes come and whatever the peer believes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from kvrelay.core.window import MemoryWindow, RemoteKey
from kvrelay.transfer.values import Int64Array, TransferOp, worker_of


class _Open(msgspec.Struct, frozen=True):
    window: MemoryWindow
    starts: dict[TransferOp, Int64Array]
    """Where the permitted runs of bytes begin, ascending."""
    ends: dict[TransferOp, Int64Array]


class WindowTable:
    """Thread-safe. ``is_enforced`` False admits every worker that is not barred: for benchmarks, and for tests of the
    transport alone."""

    def __init__(self, *, is_enforced: bool = True) -> None:
        self.is_enforced = is_enforced
        self._lock = threading.RLock()
        self._open: dict[str, _Open] = {}
        self._barred: set[str] = set()
        self.num_refused = 0
        """Copies that no open window had."""

    def __repr__(self) -> str:
        return f"WindowTable({len(self._open)} open, {len(self._barred)} barred, {self.num_refused} refused)"

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open(self, window: MemoryWindow) -> None:
        """Ends that of an earlier generation."""
        starts, ends = {}, {}
        for op, blocks in ((TransferOp.READ, window.readable), (TransferOp.WRITE, window.writable)):
            begins = window.begin + np.sort(np.asarray(blocks, dtype=np.int64)) * window.stride
            starts[op], ends[op] = _joined(begins, begins + window.block_bytes)
        with self._lock:
            self._open[window.key.handoff] = _Open(window, starts, ends)

    def close(self, handoff: str, loan: int) -> None:
        """The blocks of ``loan`` go back. Waits for a copy that is under way: milliseconds."""
        with self._lock:
            known = self._open.get(handoff)
            if known is not None and known.window.loan == loan:
                del self._open[handoff]

    def bar(self, worker_id: str) -> None:
        """Nothing of that worker is copied from now on, until ``admit``."""
        with self._lock:
            self._barred.add(worker_id)

    def admit(self, worker_id: str) -> None:
        with self._lock:
            self._barred.discard(worker_id)

    @contextmanager
    def touching(
        self, op: TransferOp, worker_id: str, key: RemoteKey | None, offsets: Int64Array, lengths: Int64Array
    ) -> Iterator[str | None]:
        """While the context lasts, the bytes may be touched if it gives None; else it gives the reason why not."""
        with self._lock:
            refusal = self.refusal(op, worker_id, key, offsets, lengths)
            self.num_refused += refusal is not None
            yield refusal

    def refusal(
        self, op: TransferOp, worker_id: str, key: RemoteKey | None, offsets: Int64Array, lengths: Int64Array
    ) -> str | None:
        """Why a copy would be refused now; None: it would not. Nothing is counted. ``worker_id`` may be a rank's."""
        worker_id = worker_of(worker_id)
        with self._lock:
            if worker_id in self._barred:
                return "its lease has ended"
            known = None if key is None else self._open.get(key.handoff)
        if not self.is_enforced:
            return None
        if known is None or (known.window.worker_id, known.window.key) != (worker_id, key):
            return "no such grant is open"
        index = np.searchsorted(known.starts[op], offsets, side="right") - 1
        if len(offsets) and (int(index.min()) < 0 or bool((offsets + lengths > known.ends[op][index]).any())):
            return f"the grant does not let it {op.value} there"
        return None


def _joined(starts: Int64Array, ends: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Adjacent runs as one."""
    if len(starts) == 0:
        return starts, ends
    first = np.concatenate(([True], starts[1:] != ends[:-1]))
    last = np.concatenate((first[1:], [True]))
    return starts[first], ends[last]
