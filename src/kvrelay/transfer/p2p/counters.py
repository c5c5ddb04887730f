"""What the peer-to-peer transport counts. It does not know who reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class P2pCounters:
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
    """Reads and writes that no open grant covered: late, or none of that peer's business."""
    num_dropped_frames: int = 0
    pairs: int = 0
    """Communicators that exist now; the next two are of this moment too."""
    buffer_used_bytes: int = 0
    pool_used_bytes: int = 0
