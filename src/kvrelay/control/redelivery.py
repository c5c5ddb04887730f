"""When the prefill queue gives an entry to somebody else: the consumer that pulled it has been silent for too long.

All consumers of a line share one setting on the server, which whoever came last has set. So workers with different
leases beat alike, often enough for the shortest wait: whichever is in force, it ends nobody's work that goes on.
"""

from __future__ import annotations

MIN_ACK_WAIT_S = 1.0
"""Shorter ones would take an event loop's longer moment, or a new connection to the server, for the consumer's end."""
MAX_ACK_WAIT_S = 5.0
"""Waiting longer only makes a first token later: who works on an entry says so, however long it takes."""
BEAT_INTERVAL_S = MIN_ACK_WAIT_S / 4


def ack_wait_for_lease(ttl_s: float) -> float:
    """Seconds of silence after which an entry is delivered again: a lease's time to live, within bounds."""
    return min(max(ttl_s, MIN_ACK_WAIT_S), MAX_ACK_WAIT_S)
