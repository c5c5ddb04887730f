"""The request plane's heartbeats: how soon a silent peer counts as gone. They follow the lease of one end's worker.

    peer's last word ──up to interval──> our ping ──timeout──> no answer: the connection ends
    └───────────────────────── detection_s, at most ────────────────────────┘

ZMQ's I/O thread, native code, sends the pings and answers them, so neither a busy event loop nor the interpreter's lock
delays one. Only a process that does not run, or an unreachable host, is silent. The two ends may have different leases:
each answers the other's pings at once, and each of its own pings carries the time after which its silence means death.
"""

from __future__ import annotations

import msgspec

INTERVAL_SHARE = 0.2
TIMEOUT_SHARE = 0.6
"""Shares of the lease's time to live. A fifth of it remains to notice the end and to continue elsewhere; a peer has
three intervals to answer."""
MIN_TIMEOUT_S = 0.8
"""A runnable thread may get no CPU for tens of milliseconds on cores with dozens of busy threads, and for some hundreds
if a quota or a hypervisor takes the cores away."""


class Heartbeat(msgspec.Struct, frozen=True):
    """A ping every ``interval_s``; a peer that does not answer one within ``timeout_s`` is gone. The defaults follow
    from the default lease."""

    interval_s: float = 2.0
    timeout_s: float = 6.0

    @classmethod
    def for_lease(cls, ttl_s: float) -> Heartbeat:
        """Heartbeats that detect a silent lease holder within the lease's time to live, if that is at least 1 s."""
        return cls(INTERVAL_SHARE * ttl_s, max(TIMEOUT_SHARE * ttl_s, MIN_TIMEOUT_S))

    @property
    def detection_s(self) -> float:
        """Longest time for which a connection outlives a silent peer."""
        return self.interval_s + self.timeout_s


DEFAULT_HEARTBEAT = Heartbeat()
