"""A ledger's knowledge of its peers' leases: which peers may still touch memory.

    registered ──> alive ──lease ended──> ended ──time to live later──> fenced
                     ^                      └──registered in a later term──> fenced, and alive again

An ended lease does not stop its holder: a revoked one ends before its time, and its holder may not know that yet. The
holder's own fence is at most a time to live after its last refresh, so after that time it writes nothing.

A worker counts its *terms*. It begins another term when it has lost its lease, or has withdrawn everything for another
reason. It registers in the new term when nothing begun before moves any more. Discovery reports late: a worker may have
lost a lease and claimed in its next term before we learn of either, and the late report must not fence the new claim.
So claims carry their term, and wait until it is the term that we know.

It knows no clock: time is an argument.
"""

from __future__ import annotations

from kvrelay.core.latest import Latest

MAX_REMEMBERED = 4096
MAX_LEASE_TTL_S = 3600.0
"""The longest time to live that a worker may have (``core.workers``): assumed when a worker's own is unknown."""


class PeerLeases:
    """Leases of other workers, in the order of discovery's events."""

    def __init__(self) -> None:
        self.live: dict[str, tuple[int, float]] = {}
        """Term and time to live."""
        self.ends: Latest[str, tuple[int, float]] = Latest(MAX_REMEMBERED)
        """Term and when."""
        self.fences_s: dict[str, float] = {}

    def is_live(self, worker_id: str, term: int) -> bool:
        """Whether the worker has a lease and is in this term, as far as known."""
        live = self.live.get(worker_id)
        return live is not None and live[0] == term

    def is_over(self, worker_id: str, term: int) -> bool:
        """Whether this term is known to have ended."""
        known = self.live.get(worker_id)
        if known is not None:
            return term < known[0]
        ended = self.ends.get(worker_id)
        return ended is not None and term <= ended[0]

    def ended_s(self, worker_id: str) -> float | None:
        """When its lease has ended; None while it lives, or is unknown."""
        ended = self.ends.get(worker_id)
        return None if ended is None else ended[1]

    def gone_s(self, worker_id: str, unlisted_s: float) -> float | None:
        """Since when it has had no lease; None while it has one. A worker that discovery does not list, and that has no
        known end, counts as gone since ``unlisted_s``."""
        return None if worker_id in self.live else self.ends.get(worker_id, (0, unlisted_s))[1]

    def registered(self, worker_id: str, ttl_s: float, term: int) -> bool:
        """The worker has a lease and is in this term. True if that fences what it began in an earlier term."""
        live = self.live.get(worker_id)
        before = live or self.ends.get(worker_id)
        self.ends.pop(worker_id, None)
        if live is not None:
            # An entry may be overwritten with a shorter time, which does not change its owner's fence.
            ttl_s = max(ttl_s, live[1])
        self.live[worker_id] = (term, ttl_s)
        if before is None or before[0] >= term:
            return False
        self.fences_s.pop(worker_id, None)
        return True

    def ended(self, worker_id: str, now_s: float) -> None:
        """Its lease has ended; it is fenced a time to live from now."""
        if worker_id in self.ends:
            return
        term, ttl_s = self.live.pop(worker_id, (0, MAX_LEASE_TTL_S))
        self.ends[worker_id] = (term, now_s)
        self.fences_s[worker_id] = now_s + ttl_s

    def take_fenced(self, now_s: float) -> list[str]:
        """Workers whose fence has passed since the last call."""
        fenced = [worker_id for worker_id, fence_s in self.fences_s.items() if fence_s <= now_s]
        for worker_id in fenced:
            del self.fences_s[worker_id]
        return fenced

    def next_fence_s(self) -> float | None:
        """When ``take_fenced`` will next return a worker."""
        return min(self.fences_s.values(), default=None)
