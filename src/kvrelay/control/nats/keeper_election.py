"""Which watcher is the lease keeper: pure policy, with an injected clock.

One watcher, the lease keeper, hears the keepalives of all leases and ends the leases of dead processes. The others hear
only of members that come and go. So the traffic grows with the number of workers, not with its square. The keeper
announces itself on a subject; a watcher that misses the announcements takes over. Two keepers at a time do no harm,
because leases are ended by compare-and-swap; the one with the greater id then resigns.

    TRIAL ──heard a keeper──> RESTING <──heard a keeper with a smaller id── KEEPING
      └──────────heard no keeper───────> KEEPING <──heard no keeper── RESTING

A newcomer hears the keepalives from the start, on trial, and so learns which of the leases that it finds are alive.
"""

from __future__ import annotations

import enum

from kvrelay.control.base import KEEPALIVES_PER_LEASE
from kvrelay.core.clock import Clock, next_beat_s

MAX_INTERVAL_S = 5.0
MIN_INTERVAL_S = 0.05
PATIENCE_INTERVALS = 1.5
JITTER_INTERVALS = 0.9
"""With both, a keeper that died is replaced within the shortest lease."""


class KeeperState(enum.Enum):
    TRIAL = "trial"
    KEEPING = "keeping"
    RESTING = "resting"


class KeeperElection:
    """One watcher's role. ``jitter`` (0 to 1) differs between watchers, so that they do not all take over at once."""

    def __init__(self, clock: Clock, own_id: str, jitter: float) -> None:
        self._clock = clock
        self.own_id = own_id
        self._jitter = jitter
        self._heard_s = clock.now()
        self._said_s = -MAX_INTERVAL_S
        self._interval_s = MAX_INTERVAL_S
        self.may_keep = True
        """Whether these credentials may end leases, as far as known."""
        self.state = KeeperState.TRIAL

    def __repr__(self) -> str:
        return f"KeeperElection({self.own_id}, {self.state.value}, interval_s={self._interval_s:g})"

    def pace(self, shortest_ttl_s: float | None) -> None:
        """Set the announcement interval: the shortest lease decides how soon a dead keeper must be missed. Its holder
        sends keepalives on the same beats."""
        interval_s = MAX_INTERVAL_S
        if shortest_ttl_s is not None:
            interval_s = min(max(shortest_ttl_s / KEEPALIVES_PER_LEASE, MIN_INTERVAL_S), MAX_INTERVAL_S)
        if interval_s < self._interval_s:
            # The keeper learns of a short lease when we do, so its silence so far means nothing.
            self._heard_s = self._clock.now()
        self._interval_s = interval_s

    def heard(self, keeper_id: str) -> None:
        """Another watcher announces itself as the lease keeper."""
        if keeper_id == self.own_id:
            return
        self._heard_s = self._clock.now()
        if self.state is KeeperState.KEEPING and self.own_id < keeper_id:
            self._said_s = -MAX_INTERVAL_S  # at once, so that the other one resigns
            return
        self.state = KeeperState.RESTING

    def forbid(self) -> None:
        """These credentials may not end leases, so this watcher must never become the keeper."""
        self.may_keep = False
        self.state = KeeperState.RESTING

    def due_s(self) -> float:
        """The latest time for the next call of ``look``."""
        if self.state is KeeperState.KEEPING:
            return next_beat_s(self._said_s, self._interval_s)
        if not self.may_keep:
            return self._clock.now() + MAX_INTERVAL_S
        return self._heard_s + self._interval_s * (PATIENCE_INTERVALS + JITTER_INTERVALS * self._jitter)

    def tick(self) -> bool:
        """Whether to announce this watcher as the lease keeper now. It may have just become the keeper."""
        if self._clock.now() < self.due_s():
            return False
        self.state = KeeperState.KEEPING
        self._said_s = self._clock.now()
        return True
