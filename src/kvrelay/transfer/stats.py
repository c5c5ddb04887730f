"""Counts of a transfer thread's bytes, pieces and seconds. This module does not publish metrics."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvrelay.core.events import MAX_FLOWS, Flow
from kvrelay.core.histogram import Histogram
from kvrelay.transfer.values import TransferOp


class PeerTransferStats(msgspec.Struct):
    """All ended transfers of one kind with one peer. ``seconds`` sums submission to end, including waiting."""

    worker_id: str
    op: TransferOp
    num_transfers: int = 0
    num_errors: int = 0
    num_bytes: int = 0
    num_pieces: int = 0
    seconds: float = 0.0


class TransferStats(msgspec.Struct, frozen=True):
    """A snapshot of a transfer thread. Bytes and pieces count only completed transfers."""

    peers: tuple[PeerTransferStats, ...]
    num_notifications: int
    num_unfinished: int
    num_open_handoffs: int
    p2p: P2pCounters | None = None

    @property
    def num_bytes(self) -> int:
        return sum(peer.num_bytes for peer in self.peers)

    @property
    def num_errors(self) -> int:
        return sum(peer.num_errors for peer in self.peers)

    def flows(self) -> tuple[Flow, ...]:
        """The largest by bytes, of peers that have not departed; at most MAX_FLOWS."""
        present = sorted((peer for peer in self.peers if peer.worker_id), key=lambda peer: -peer.num_bytes)
        return tuple(
            Flow(peer.worker_id, peer.op is TransferOp.READ, peer.num_transfers, peer.num_bytes, peer.seconds)
            for peer in present[:MAX_FLOWS]
        )


class StatsCounter:
    """Adds ended transfers up. Not thread-safe; ``TransferThread`` guards it."""

    def __init__(self) -> None:
        self._peers: dict[tuple[str, TransferOp], PeerTransferStats] = {}
        self.num_notifications = 0
        self.durations = {op: Histogram() for op in TransferOp}
        """Of ended transfers, from submission to end. Without the lock any thread may read it."""

    def add(
        self, worker_id: str, op: TransferOp, num_bytes: int, num_pieces: int, seconds: float, error: str | None
    ) -> None:
        self.durations[op].observe(seconds)
        peer = self._of(worker_id, op)
        peer.num_transfers += 1
        peer.seconds += seconds
        if error is None:
            peer.num_bytes += num_bytes
            peer.num_pieces += num_pieces
        else:
            peer.num_errors += 1

    def forget(self, worker_id: str) -> None:
        """Fold a removed worker's counts into those of worker "", so that departed workers do not fill the memory."""
        for op in TransferOp:
            gone = self._peers.pop((worker_id, op), None)
            if gone is not None:
                rest = self._of("", op)
                for name in ("num_transfers", "num_errors", "num_bytes", "num_pieces", "seconds"):
                    setattr(rest, name, getattr(rest, name) + getattr(gone, name))

    def _of(self, worker_id: str, op: TransferOp) -> PeerTransferStats:
        return self._peers.setdefault((worker_id, op), PeerTransferStats(worker_id, op))

    def snapshot(self, num_unfinished: int, num_open_handoffs: int, p2p: P2pCounters | None) -> TransferStats:
        peers = tuple(msgspec.structs.replace(peer) for peer in self._peers.values())
        return TransferStats(peers, self.num_notifications, num_unfinished, num_open_handoffs, p2p)


class P2pCounters(msgspec.Struct, frozen=True):
    """Since start. ``num_lost`` messages found no room in time: their hand-off is recomputed."""

    num_connections: int = 0
    num_evicted: int = 0
    num_busy: int = 0
    """Communicators refused because all that may exist were in use."""
    num_failed: int = 0
    """Communicators that ended by a failure."""
    num_spilled: int = 0
    num_spilled_bytes: int = 0
    num_waited: int = 0
    num_lost: int = 0
    num_refused: int = 0
    """Reads and writes that no open window had: late, or none of that peer's business."""
    num_dropped_frames: int = 0
    pairs: int = 0
    """Communicators that exist now; the next two are of this moment too."""
    buffer_used_bytes: int = 0
    pool_used_bytes: int = 0

    @classmethod
    def sum(cls, counters: Sequence[P2pCounters]) -> P2pCounters:
        """Over the ranks of a worker."""
        return cls(**{name: sum(getattr(each, name) for each in counters) for name in cls.__struct_fields__})
