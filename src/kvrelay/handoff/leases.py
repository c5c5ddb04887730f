"""What a ledger knows of its peers' leases: who may still touch memory.

    registered ──> alive ──lease ended──> ended ──time to live later──> fenced
                     ^                      └──registered in a later term──> fenced, and alive again

An ended lease does not stop its holder: a revoked one ends before its time, and the holder may not have heard of it.
Its own fence is at most a time to live after its last refresh, so after that long it writes nothing.

A worker counts its *terms*. It begins another one when it has lost its lease, or has withdrawn everything for another
reason; it registers in the new term when nothing that it had begun before moves any more. Discovery tells late: a
worker may have lost a lease and claimed in its next term before we hear of any of that, and what we hear then must not
fence the new claim. So claims name their term, and wait until it is the one that we know.

It knows no clock: time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_REMEMBERED = 4096
MAX_LEASE_TTL_S = 3600.0
"""The longest time to live that a worker may have (``core.workers``): assumed when a worker's own is unknown."""


class PeerLeases:
    """Leases of other workers, in the order in which discovery tells of them."""

    def __init__(self) -> None:
        self._live: dict[str, tuple[int, float]] = {}
        """Term and time to live."""
        self._ended: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """Term and when."""
        self._fences_s: dict[str, float] = {}

    def is_live(self, worker_id: str, term: int) -> bool:
        """Whether the worker has a lease and is in this term, as far as we have heard."""
        live = self._live.get(worker_id)
        return live is not None and live[0] == term

    def is_over(self, worker_id: str, term: int) -> bool:
        """Whether we have heard that this term has ended."""
        known = self._live.get(worker_id)
        if known is not None:
            return term < known[0]
        ended = self._ended.get(worker_id)
        return ended is not None and term <= ended[0]

    def ended_s(self, worker_id: str) -> float | None:
        """When its lease has ended; None while it lives, or is unknown."""
        ended = self._ended.get(worker_id)
        return None if ended is None else ended[1]

    def registered(self, worker_id: str, ttl_s: float, term: int) -> bool:
        """It has a lease and is in this term. True if that fences what was begun in an earlier one."""
        live = self._live.get(worker_id)
        before = live or self._ended.get(worker_id)
        self._ended.pop(worker_id, None)
        if live is not None:
            # An entry that was overwritten with a shorter time says nothing of what its owner goes by.
            ttl_s = max(ttl_s, live[1])
        self._live[worker_id] = (term, ttl_s)
        if before is None or before[0] >= term:
            return False
        self._fences_s.pop(worker_id, None)
        return True

    def ended(self, worker_id: str, now_s: float) -> None:
        """Its lease has ended; it is fenced a time to live from now."""
        if worker_id in self._ended:
            return
        term, ttl_s = self._live.pop(worker_id, (0, MAX_LEASE_TTL_S))
        self._ended[worker_id] = (term, now_s)
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        self._fences_s[worker_id] = now_s + ttl_s

    def take_fenced(self, now_s: float) -> list[str]:
        """Workers whose fence has passed since the last call."""
        fenced = [worker_id for worker_id, fence_s in self._fences_s.items() if fence_s <= now_s]
        for worker_id in fenced:
            del self._fences_s[worker_id]
        return fenced

    def next_fence_s(self) -> float | None:
        """When ``take_fenced`` will have something to give."""
        return min(self._fences_s.values(), default=None)
