"""How soon a silent peer counts as gone: the request plane's heartbeats, by the lease of the worker at one end.

    peer's last word ──up to interval──> our ping ──timeout──> no answer: the connection ends
    └───────────────────────── detection_s, at most ────────────────────────┘

ZMQ's I/O thread, native code, sends the pings and answers them, so neither a busy event loop nor the interpreter's lock
delays one; only a process that does not run, or a host out of reach, is silent. The two ends may have different leases:
each answers the other's pings at once, and says with its own for how long nothing more may come from it.
"""

from __future__ import annotations

from dataclasses import dataclass

INTERVAL_SHARE = 0.2
TIMEOUT_SHARE = 0.6
"""Of the lease's time to live. A fifth of it is left to notice the end and to go on elsewhere, and a peer has three
intervals to answer in."""
MIN_TIMEOUT_S = 0.8
"""A thread that only waits for its turn has been quiet for tens of milliseconds on cores with dozens of busy threads,
and for some hundreds where a quota or a hypervisor takes the cores away."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A ping every ``interval_s``; a peer that leaves one unanswered for ``timeout_s`` is gone. The defaults are those
    of the default lease."""

    interval_s: float = 2.0
    timeout_s: float = 6.0

    @classmethod
    def for_lease(cls, ttl_s: float) -> Heartbeat:
        """Heartbeats that notice within a lease's time to live, from 1 s on, that its holder is silent."""
        return cls(INTERVAL_SHARE * ttl_s, max(TIMEOUT_SHARE * ttl_s, MIN_TIMEOUT_S))

    @property
    def detection_s(self) -> float:
        """How long a connection outlives a silent peer, at most."""
        return self.interval_s + self.timeout_s


DEFAULT_HEARTBEAT = Heartbeat()
