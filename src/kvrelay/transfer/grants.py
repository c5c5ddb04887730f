"""Which peers may touch which bytes of our pool, for transports whose bytes our own process puts into place.

    decode worker's side ── open(grant, worker, ranges) ──>  GrantTable  <── touching(...) ── threads of the transport
                         ── close(hand-off, loan) ────────>

With a two-sided transport a peer's bytes land in a buffer of ours, and a thread of ours copies them into blocks. That
copy runs under this table's lock, and only while the grant that the bytes name is open. So a block is never touched
after ``close`` has returned, however late the bytes come and whatever the peer believes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec
import numpy as np

from kvrelay.transfer.values import GrantRef, Int64Array, TransferOp, worker_of


class Grants(Protocol):
    """What the decode side sees of a table, or of those of all ranks."""

    def open(self, grant: GrantRef, loan: int, worker_id: str, readable: Int64Array, writable: Int64Array) -> None:
        """``worker_id`` may read and write these bytes: rows of (offset, length). Ends an earlier generation."""

    def close(self, handoff: str, loan: int) -> None:
        """The blocks of ``loan`` go back. Waits for a copy that is under way: milliseconds."""


class _Open(msgspec.Struct, frozen=True):
    worker_id: str
    generation: int
    loan: int
    starts: dict[TransferOp, Int64Array]
    """Where the permitted runs of bytes begin, ascending."""
    ends: dict[TransferOp, Int64Array]


class GrantTable:
    """Thread-safe. ``is_enforced`` False admits every worker that is not barred: for benchmarks, and for tests of the
    transport alone."""

    def __init__(self, *, is_enforced: bool = True) -> None:
        self.is_enforced = is_enforced
        self._lock = threading.RLock()
        self._open: dict[str, _Open] = {}
        self._barred: set[str] = set()
        self.num_refused = 0
        """Copies that no open grant covered."""

    def __repr__(self) -> str:
        return f"GrantTable({len(self._open)} open, {len(self._barred)} barred, {self.num_refused} refused)"

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open(self, grant: GrantRef, loan: int, worker_id: str, readable: Int64Array, writable: Int64Array) -> None:
        starts, ends = {}, {}
        for op, rows in ((TransferOp.READ, readable), (TransferOp.WRITE, writable)):
            ordered = rows.reshape(-1, 2)[np.argsort(rows.reshape(-1, 2)[:, 0])]
            starts[op], ends[op] = _joined(ordered[:, 0], ordered[:, 0] + ordered[:, 1])
        with self._lock:
            self._open[grant.handoff] = _Open(worker_id, grant.generation, loan, starts, ends)

    def close(self, handoff: str, loan: int) -> None:
        with self._lock:
            known = self._open.get(handoff)
            if known is not None and known.loan == loan:
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
        self, op: TransferOp, worker_id: str, grant: GrantRef | None, offsets: Int64Array, lengths: Int64Array
    ) -> Iterator[str | None]:
        """While the context lasts, the bytes may be touched if it gives None; else it gives the reason why not."""
        with self._lock:
            refusal = self.refusal(op, worker_id, grant, offsets, lengths)
            self.num_refused += refusal is not None
            yield refusal

    def refusal(
        self, op: TransferOp, worker_id: str, grant: GrantRef | None, offsets: Int64Array, lengths: Int64Array
    ) -> str | None:
        """Why a copy would be refused now; None: it would not. Nothing is counted. ``worker_id`` may be a rank's."""
        worker_id = worker_of(worker_id)
        with self._lock:
            if worker_id in self._barred:
                return "its lease has ended"
            known = None if grant is None else self._open.get(grant.handoff)
        if not self.is_enforced:
            return None
        if grant is None or known is None or known.worker_id != worker_id or known.generation != grant.generation:
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
