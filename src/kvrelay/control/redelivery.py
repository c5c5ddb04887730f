"""When the prefill queue delivers an entry again: after its consumer has been silent for the ack deadline.

All consumers of a partition share one ack deadline on the server, which the last worker to join has set. So all workers
send keepalives at the same interval, whatever their leases, and often enough for the shortest deadline. No setting then
takes an entry from a worker that still computes it.
"""

from __future__ import annotations

MIN_ACK_WAIT_S = 1.0
"""A shorter deadline would mistake a busy event loop, or a reconnect to the server, for a dead consumer."""
MAX_ACK_WAIT_S = 5.0
"""A longer deadline only delays the first token: a live consumer sends keepalives, however long its prefill takes."""
KEEPALIVE_INTERVAL_S = MIN_ACK_WAIT_S / 4


def ack_wait_for_lease(ttl_s: float) -> float:
    """Seconds of silence after which an entry is delivered again: the lease's time to live, within bounds."""
    return min(max(ttl_s, MIN_ACK_WAIT_S), MAX_ACK_WAIT_S)
