"""When the prefill queue delivers an entry again: after its consumer has been silent for the ack deadline.

All consumers of a partition share one ack deadline on the server, which the last worker to join has set. So all workers
send keepalives at the same interval, whatever their leases, and often enough for the shortest deadline. No setting then
takes an entry from a worker that still computes it.
"""

from __future__ import annotations

MAX_DELIVERIES = 5
"""An entry that was delivered so often goes to the dead letters instead of to another consumer."""
MIN_ACK_WAIT_S = 1.0
"""A shorter deadline would mistake a busy event loop, or a reconnect to the server, for a dead consumer."""
MAX_ACK_WAIT_S = 5.0
"""A longer deadline only delays the first token: a live consumer sends keepalives, however long its prefill takes."""
KEEPALIVE_INTERVAL_S = MIN_ACK_WAIT_S / 4

RETURN_DELAYS_S = (0.25, 0.5, 1.0, 2.0)
"""A consumer that cannot reach the decode worker gives an entry back. It is delivered again after these seconds, by the
number of its deliveries so far. The consumer of the last delivery keeps it; the decode worker computes it when it hears
of the release, or at its own deadline. So an entry that was only given back never becomes a dead letter."""


def return_delay_s(num_deliveries: int) -> float | None:
    """Seconds until an entry that is given back now is delivered again; None: it may not be given back any more."""
    return RETURN_DELAYS_S[num_deliveries - 1] if num_deliveries <= len(RETURN_DELAYS_S) else None


def ack_wait_for_lease(ttl_s: float) -> float:
    """Seconds of silence after which an entry is delivered again: the lease's time to live, within bounds."""
    return min(max(ttl_s, MIN_ACK_WAIT_S), MAX_ACK_WAIT_S)
